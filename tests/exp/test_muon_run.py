"""``--optimizer-config.optim muon_adamw`` in whole runs, and steps without a finite gradient."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from opendm.exp.dm05_exp import DM05Exp, DM05OptimizerConfig, run

REPOSITORY = Path(__file__).parents[2]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def launch(nproc, tiny_checkpoint, tmp_path):
    """Output and metrics of two steps."""
    flags = [
        "--model-config.no-bf16", "--trainer-config.no-bf16",
        "--model-config.model-name-or-path", str(tiny_checkpoint),
        "--optimizer-config.optim", "muon_adamw",
        "--optimizer-config.base-lr", "1e-3",
        "--optimizer-config.warmup-steps", "0",
        "--trainer-config.output-dir", str(tmp_path / "run"),
        "--trainer-config.num-train-steps", "2",
        "--trainer-config.per-device-train-batch-size", str(4 // nproc),
        "--trainer-config.dataloader-num-workers", "0",
        "--data-config.norm-stats-root", str(tmp_path / "stats"),
    ]  # fmt: skip
    result = subprocess.run(
        [
            "script/dm05_launcher.sh", "--nproc_per_node", str(nproc),
            "--exp", "playground/dm05_sft_demo.py", *flags,
        ],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout, metrics(tmp_path / "run")


def test_muon_trains_through_the_launcher_as_in_one_process(tiny_checkpoint, tmp_path):
    single, expected = launch(1, tiny_checkpoint, tmp_path / "1")
    sharded, lines = launch(2, tiny_checkpoint, tmp_path / "2")
    assert "optimizer: Muon for 28 matrices, AdamW for" in single
    assert "engine: FSDP1 SHARD_GRAD_OP x2" in sharded
    assert "of 2 ranks the busiest has" in sharded
    for ours, theirs in zip(lines, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


@dataclass
class WithOneBadGradient(DM05OptimizerConfig):
    """The second step's gradient of one weight is infinite."""

    def prepare_model(self, model):
        super().prepare_model(model)
        calls = []

        def spoil(grad):
            calls.append(1)
            return grad * float("inf") if len(calls) == 2 else grad

        model.model.action_in_proj.weight.register_hook(spoil)


@pytest.mark.parametrize("optim", ["adamw", "muon_adamw"])
def test_a_step_without_a_finite_gradient_is_dropped(optim, tiny_checkpoint, tmp_path):
    exp = DM05Exp(optimizer_config=WithOneBadGradient(warmup_steps=0, optim=optim, base_lr=1e-3))
    exp.model_config.model_name_or_path = str(tiny_checkpoint)
    exp.model_config.chunk_size = 4
    exp.model_config.bf16 = False
    exp.data_config.norm_stats_root = str(tmp_path / "stats")
    exp.trainer_config.bf16 = False
    exp.trainer_config.num_train_steps = 3
    exp.trainer_config.save_steps = 1
    exp.trainer_config.dataloader_num_workers = 0
    exp.trainer_config.output_dir = str(tmp_path / "out")
    assert run(exp) == 0
    lines = metrics(tmp_path / "out")
    assert [line["dropped_steps"] for line in lines] == [0, 1, 1]
    assert [line["grad_norm"] is None for line in lines] == [False, True, False]
    first, second, third = (
        load_file(tmp_path / "out" / f"checkpoint-{step}" / "model.safetensors")
        for step in (1, 2, 3)
    )
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert any(not np.array_equal(second[name], third[name]) for name in first)
    assert all(np.isfinite(value).all() for value in third.values())
