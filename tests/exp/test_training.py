"""Whole runs: from a playground file to a folder that a policy loads."""

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from opendm.exp.dm05_exp import DM05DataConfig, DM05Exp, DM05OptimizerConfig, run

REPOSITORY = Path(__file__).parents[2]
METRICS = {
    "step", "loss", "fm_loss", "grad_norm", "lr", "samples_per_s", "step_s", "data_wait_s",
    "dropped_steps", "replaced_samples", "nonfinite", "val_loss",
}  # fmt: skip
FULL_FLOAT32 = ["--model-config.no-bf16", "--trainer-config.no-bf16"]


def flags(tiny, folder, batch):
    return [
        *FULL_FLOAT32,
        "--model-config.model-name-or-path", str(tiny),
        "--optimizer-config.base-lr", "1e-3",
        "--optimizer-config.warmup-steps", "1",
        "--trainer-config.output-dir", str(folder),
        "--trainer-config.num-train-steps", "3",
        "--trainer-config.save-steps", "2",
        "--trainer-config.per-device-train-batch-size", str(batch),
        "--trainer-config.dataloader-num-workers", "1",
        "--data-config.norm-stats-root", str(folder.parent / "stats"),
    ]  # fmt: skip


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def sharded(tiny_checkpoint, tmp_path_factory):
    """FSDP1 x2 through the launcher."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    result = subprocess.run(
        [
            "script/dm05_launcher.sh", "--nproc_per_node", "2",
            "--exp", "playground/dm05_sft_demo.py", *flags(tiny_checkpoint, folder, 2),
        ],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    assert "engine: FSDP1 SHARD_GRAD_OP x2, 6 units" in result.stdout
    return folder


@pytest.fixture(scope="module")
def single(tiny_checkpoint, tmp_path_factory):
    """One plain process."""
    folder = tmp_path_factory.mktemp("single") / "run"
    result = subprocess.run(
        [
            REPOSITORY / ".venv/bin/python" if (REPOSITORY / ".venv").exists() else "python",
            "playground/dm05_sft_demo.py", "--task", "train", *flags(tiny_checkpoint, folder, 4),
        ],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    return folder


def test_metrics_hold_one_strict_line_per_step(sharded):
    lines = metrics(sharded)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line.keys() == METRICS for line in lines)
    assert [line["lr"] for line in lines][:2] == [0.0, 1e-3]


def test_the_launcher_under_fsdp1_trains_as_one_process(sharded, single):
    for ours, theirs in zip(metrics(sharded), metrics(single), strict=True):
        for key in ("loss", "fm_loss", "grad_norm", "lr"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (key, ours["step"])


def test_saved_weights_agree_and_moved(sharded, single, tiny_checkpoint):
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (sharded, single))
    start = load_file(tiny_checkpoint / "model.safetensors")
    assert ours.keys() == theirs.keys() == start.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=2e-4, err_msg=name)
    moved = {name for name, value in ours.items() if not np.array_equal(value, start[name])}
    assert "model.action_in_proj.weight" in moved
    assert "model.vlm.model.language_model.embed_tokens.weight" not in moved
    assert "model.vlm.model.language_model.norm.weight" not in moved


def test_every_checkpoint_holds_what_inference_needs(sharded):
    needed = {
        "config.json", "model.safetensors", "norm_stats.json", "opendm.json",
        "tokenizer.json", "processor_config.json", "chat_template.jinja",
    }  # fmt: skip
    for folder in (sharded, sharded / "checkpoint-2", sharded / "checkpoint-3"):
        assert needed <= {path.name for path in folder.iterdir()}
    assert not list(sharded.glob(".*partial"))


def test_run_json_says_configuration_versions_engine_and_data(sharded):
    content = json.loads((sharded / "run.json").read_text())
    assert content["config"]["optimizer_config"]["base_lr"] == 1e-3
    assert content["config"]["data_config"]["action_mode"] == "relative"
    assert content["engine"]["name"] == "fsdp1"
    assert content["engine"]["world_size"] == 2
    assert len(content["dataset_fingerprint"]) == 64
    assert {"torch", "transformers", "python"} <= content["versions"].keys()


def test_users_hooks_are_called_and_the_configuration_stays_as_it_was(tiny_checkpoint, tmp_path):
    called = []

    @dataclass
    class OwnData(DM05DataConfig):
        def _dataset_info(self):
            called.append("_dataset_info")
            return super()._dataset_info()

        def build_dataset(self, *args, **kwargs):
            called.append("build_dataset")
            return super().build_dataset(*args, **kwargs)

        def build_norm_stats_dataset(self, *args, **kwargs):
            called.append("build_norm_stats_dataset")
            return super().build_norm_stats_dataset(*args, **kwargs)

    @dataclass
    class OwnOptimizer(DM05OptimizerConfig):
        def prepare_model(self, model):
            called.append("prepare_model")

    exp = DM05Exp(
        data_config=OwnData(norm_stats_root=str(tmp_path / "stats")),
        optimizer_config=OwnOptimizer(warmup_steps=0),
    )
    exp.model_config.model_name_or_path = str(tiny_checkpoint)
    exp.model_config.chunk_size = 4
    exp.trainer_config.num_train_steps = 1
    exp.trainer_config.dataloader_num_workers = 0
    exp.trainer_config.output_dir = str(tmp_path / "out")
    before = asdict(exp)
    assert run(exp) == 0
    assert asdict(exp) == before
    assert set(called) == {
        "_dataset_info", "build_dataset", "build_norm_stats_dataset", "prepare_model",
    }  # fmt: skip
    weights = load_file_dtypes(tmp_path / "out" / "model.safetensors")
    assert weights == {"BF16"}


def load_file_dtypes(path: Path) -> set[str]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
