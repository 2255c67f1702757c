"""``--use-lora`` in whole runs: engines, files, going on, and bases that do not fit. About 60 s."""

import json
import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from lora_runs import ENGINES, exit_codes, lora_run
from run_ranks import Ranks, assert_same_metrics, interrupted_at, metrics, run_ranks
from safetensors.torch import load_file

from opendm.cli import main
from opendm.exp.dm05_exp import run
from opendm.infer import serve
from opendm.infer.policy import Observation, Policy
from opendm.model.dm05.adapter_folder import file_hash, weights_hash
from opendm.trainer.trainer import DMTrainer

ADAPTER_FILES = {
    "adapter_config.json", "adapter_model.safetensors", "base_model.json", "norm_stats.json",
    "opendm.json", "tokenizer.json", "processor_config.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def base(tiny_checkpoint, place):
    """A base that tests may move."""
    return shutil.copytree(tiny_checkpoint, place / "base")


class Runs(dict):
    """Folders of three steps by engine; each is run when a test first asks for it."""

    def __init__(self, base, place):
        super().__init__()
        self.base, self.place = base, place

    def __missing__(self, engine):
        folder = self.place / engine
        assert exit_codes(lora_run(self.base, folder, engine), engine, self.place) == {0}
        self[engine] = folder
        return folder


@pytest.fixture(scope="module")
def runs(base, place):
    return Runs(base, place)


def base_of(folder):
    record = json.loads((folder / "base_model.json").read_text())
    return [record[key] for key in ("path", "sha256", "config_sha256")]


def refusal(exp, capsys):
    assert run(exp) == 2
    return capsys.readouterr().err


def test_losses_and_adapters_agree_between_engines(runs):
    expected = load_file(runs["single"] / "adapter_model.safetensors")
    for engine in ENGINES.keys() - {"single"}:
        assert_same_metrics(runs[engine], runs["single"], rel=1e-5)
        tensors = load_file(runs[engine] / "adapter_model.safetensors")
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-4)
    losses = [line["loss"] for line in metrics(runs["single"])]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_ends_with_an_adapter_and_no_copy_of_the_base(engine, runs, base):
    for folder in (runs[engine], runs[engine] / "checkpoint-2"):
        names = {path.name for path in folder.iterdir()}
        assert names >= ADAPTER_FILES
        assert "model.safetensors" not in names
        record = json.loads((folder / "base_model.json").read_text())
        assert base_of(folder) == [
            str(base), weights_hash(base), file_hash(base / "config.json"),
        ]  # fmt: skip
        for name in ("adapter_model.safetensors", "config.json"):
            assert record["files"][name] == file_hash(folder / name)
    assert (runs[engine] / "checkpoint-2" / "state" / "state.json").is_file()
    summary = json.loads((runs[engine] / "trainable_summary.json").read_text())
    saved = load_file(runs[engine] / "adapter_model.safetensors")
    assert summary["adapter_total"] == sum(tensor.numel() for tensor in saved.values())


def test_a_resumed_adapter_ends_bit_for_bit_where_the_run_did_though_its_base_was_moved(
    runs, base, tmp_path
):
    folder = interrupted_at(2, runs["single"], tmp_path / "resumed")
    moved = base.rename(tmp_path / "moved")
    try:
        assert run(lora_run(base, folder, lora={"base_model": str(moved)})) == 0
    finally:
        moved.rename(base)
    assert_same_run(folder, runs["single"])


def test_a_killed_run_goes_on_to_the_adapter_of_one_that_was_not(runs, base, tmp_path):
    exp = lora_run(base, tmp_path / "run", "ddp")
    assert Ranks(exp, 2, tmp_path, die_in_step_3).wait() == [-signal.SIGKILL] * 2
    assert not (tmp_path / "run" / "adapter_model.safetensors").exists()
    assert run_ranks(exp, 2, tmp_path) == [0, 0]
    assert_same_run(tmp_path / "run", runs["ddp"])


def die_in_step_3(rank):
    def end_step(trainer, step, *arguments):
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        original(trainer, step, *arguments)

    original, DMTrainer._end_step = DMTrainer._end_step, end_step


def assert_same_run(folder, expected):
    assert_same_metrics(folder, expected)
    written = (folder / "adapter_model.safetensors").read_bytes()
    assert written == (expected / "adapter_model.safetensors").read_bytes()


def test_a_run_that_starts_from_an_adapter_trains_that_adapter(runs, place):
    exp = lora_run(runs["fsdp1"], place / "on")
    model = exp.model_config.build_model(use_lora=True)
    names = [name for name, _ in model.named_parameters()]
    assert not [name for name in names if name.count("base_layer") + name.count("lora_A") > 1]
    saved = load_file(runs["fsdp1"] / "adapter_model.safetensors")
    own = {n.replace(".modules_to_save", "").replace(".default", ""): model.get_parameter(n)
           for n in model.adapter.names}  # fmt: skip
    assert {f"base_model.model.{name}" for name in own} == saved.keys()
    assert all(torch.equal(own[n.removeprefix("base_model.model.")], t) for n, t in saved.items())
    assert {n for n in names if model.get_parameter(n).requires_grad} < model.adapter.names
    assert run(exp) == 0
    assert base_of(place / "on") == base_of(runs["fsdp1"])
    ranks = lora_run(runs["fsdp1"], place / "on_ranks", "fsdp2")
    assert run_ranks(ranks, 2, place) == [0, 0]
    assert_same_metrics(place / "on_ranks", place / "on", rel=1e-5)
    assert metrics(place / "on")[0]["loss"] != metrics(runs["fsdp1"])[0]["loss"]
    assert base_of(place / "on_ranks") == base_of(runs["fsdp1"])


def test_an_adapter_is_never_trained_as_a_merged_full_model(runs, tmp_path, capsys):
    exp = lora_run(runs["single"], tmp_path / "full")
    exp.use_lora = False
    error = refusal(exp, capsys)
    assert "--use-lora True" in error
    assert "opendm merge --adapter" in error
    assert not (tmp_path / "full").exists()


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ({"r": 8}, "model_config.lora_config.r: 4 -> 8"),
        ({"lora_alpha": 4}, "model_config.lora_config.lora_alpha: 16 -> 4"),
        ({"target_modules": "q_proj"}, "model_config.lora_config.target_modules: all-linear ->"),
    ],
)
def test_another_adapter_is_not_resumed(lora, expected, runs, base, tmp_path, capsys):
    folder = interrupted_at(2, runs["single"], tmp_path / "resumed")
    assert expected in refusal(lora_run(base, folder, lora=lora), capsys)


def test_an_adapter_of_another_rank_is_not_gone_on_with(runs, tmp_path, capsys):
    exp = lora_run(runs["single"], tmp_path / "on", lora={"r": 8})
    assert "has r 4 and this run asks for 8" in refusal(exp, capsys)


def test_an_altered_base_is_refused_on_resume_and_start(runs, base, tmp_path, capsys):
    altered = shutil.copytree(base, tmp_path / "altered")
    with (altered / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    folder = interrupted_at(2, runs["single"], tmp_path / "resumed")
    where = {"base_model": str(altered)}
    for exp in (
        lora_run(base, folder, lora=where),
        lora_run(runs["single"], tmp_path / "on", lora=where),
    ):
        assert f"{altered} is not the base of the adapter" in refusal(exp, capsys)


def test_a_base_of_another_configuration_is_refused_on_resume_and_start(
    runs, base, tmp_path, capsys
):
    altered = shutil.copytree(base, tmp_path / "altered")
    config = json.loads((altered / "config.json").read_text())
    config["action_config"]["rms_norm_eps"] = 0.3
    (altered / "config.json").write_text(json.dumps(config))
    folder = interrupted_at(2, runs["single"], tmp_path / "resumed")
    where = {"base_model": str(altered)}
    for exp in (
        lora_run(base, folder, lora=where),
        lora_run(runs["single"], tmp_path / "on", lora=where),
    ):
        assert "its config.json was altered since training" in refusal(exp, capsys)


def test_a_fresh_run_has_no_base_to_move(base, tiny_checkpoint, tmp_path, capsys):
    exp = lora_run(tiny_checkpoint, tmp_path / "new", lora={"base_model": str(base)})
    error = refusal(exp, capsys)
    assert f"--model-config.lora-config.base-model {base} says where" in error
    assert str(tiny_checkpoint) in error


def test_the_check_of_a_run_that_goes_on_takes_the_base_from_where_it_was_moved_to(
    runs, base, tmp_path, capsys
):
    folder = interrupted_at(2, runs["single"], tmp_path / "resumed")
    moved = shutil.copytree(base, tmp_path / "moved")
    altered = shutil.copytree(base, tmp_path / "altered")
    with (altered / "model.safetensors").open("ab") as file:
        file.write(b"0")
    exp = lora_run(base, folder, lora={"base_model": str(moved)})
    exp.task = "check"
    assert run(exp) == 0, capsys.readouterr()
    assert "one batch" in capsys.readouterr().out
    exp.model_config.lora_config.base_model = str(altered)
    assert f"{altered} is not the base of the adapter" in refusal(exp, capsys)
    exp.trainer_config.resume = "never"
    assert "starts a new adapter" in refusal(exp, capsys)


def test_a_folder_of_the_other_kind_is_not_written_into(runs, base, tmp_path, capsys):
    full = lora_run(base, shutil.copytree(runs["single"], tmp_path / "adapter"))
    full.use_lora, full.trainer_config.overwrite = False, True
    assert "adapter holds an adapter (adapter_config.json)" in refusal(full, capsys)
    own = lora_run(base, shutil.copytree(base, tmp_path / "base"))
    assert "base holds a full checkpoint (model.safetensors)" in refusal(own, capsys)
    assert not (tmp_path / "base" / "run.json").exists()


@pytest.mark.parametrize("what", ["altered weights", "summary in a file", "summary is a folder"])
def test_every_rank_ends_at_once_where_rank_0_cannot_read_or_write(what, runs, base, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    start, lora = base, {}
    if what == "altered weights":
        start = shutil.copytree(runs["single"], tmp_path / "adapter")
        path = start / "adapter_model.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        place = "file/summary.json" if what == "summary in a file" else "folder"
        lora = {"dump_trainable_path": str(tmp_path / place)}
    exp = lora_run(start, tmp_path / "on", "fsdp1", lora=lora)
    began = time.monotonic()
    assert run_ranks(exp, 2, tmp_path) == [2, 2]
    assert time.monotonic() - began < 40, "a rank waited for the other to time out"
    assert not list(tmp_path.glob(".*.partial"))


def test_an_output_folder_that_cannot_be_written_to_is_named(base, tmp_path, capsys):
    (tmp_path / "file").touch()
    stats = {"data_config__norm_stats_root": str(tmp_path / "stats")}
    exp = lora_run(base, tmp_path / "file" / "out", **stats)
    assert "--trainer-config.output-dir" in refusal(exp, capsys)
    exp.use_lora = False
    assert f"--trainer-config.output-dir {tmp_path}/file/out cannot be" in refusal(exp, capsys)


def test_a_base_that_is_gone_is_asked_for(runs, tmp_path, capsys):
    adapter = shutil.copytree(runs["single"], tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "gone/base"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    error = refusal(lora_run(adapter, tmp_path / "on"), capsys)
    assert "gone/base" in error
    assert "--model-config.lora-config.base-model" in error


def test_muon_has_nothing_to_take(base, tmp_path, capsys):
    exp = lora_run(base, tmp_path / "muon", optimizer_config__optim="muon_adamw")
    assert "LoRA's adapters go to AdamW" in refusal(exp, capsys)


def test_a_moved_base_is_named_to_the_policy_and_to_the_service(
    runs, base, tmp_path, monkeypatch, capsys
):
    adapter = shutil.copytree(runs["single"], tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "gone/base"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    served = []
    monkeypatch.setattr(serve, "run_server", lambda service, _listener: served.append(service))
    words = ["serve", "--checkpoint", str(adapter), "--inference-config.port", "0",
             "--inference-config.diffusion-steps", "1"]  # fmt: skip
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "--model-config.lora-config.base-model in training and serving" in error
    assert "base= in Python" in error
    assert main([*words, "--model-config.lora-config.base-model", str(base)]) == 0
    assert len(served) == 1
    moved = Policy.from_checkpoint(adapter, base=base).model.state_dict()
    expected = Policy.from_checkpoint(runs["single"]).model.state_dict()
    assert all(torch.equal(moved[name], tensor) for name, tensor in expected.items())


def test_a_policy_of_the_adapter_acts_as_one_of_the_merged_checkpoint(runs, base, tmp_path):
    assert main(["merge", "--adapter", str(runs["fsdp1"]), "--output", str(tmp_path / "all")]) == 0
    merged, adapter = (Policy.from_checkpoint(path) for path in (tmp_path / "all", runs["fsdp1"]))
    untrained = Policy.from_checkpoint(base, layout_from=runs["fsdp1"])
    picture = np.full((112, 112, 3), 90, dtype=np.uint8)
    keys = adapter.layout.image_keys
    seen = Observation([0.1, 0.2, 0.3, 0.4], dict.fromkeys(keys, picture), "Reach the red square")
    noise = adapter.noise_for([0])
    actions = [p.act(seen, noise=noise) for p in (merged, adapter, untrained)]
    np.testing.assert_allclose(actions[0], actions[1], atol=1e-5)
    assert np.abs(actions[1] - actions[2]).max() > 1e-3
