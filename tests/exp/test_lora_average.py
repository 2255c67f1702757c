"""What a LoRA run exports under each policy, with an average of its weights. About 20 s."""

import json
import shutil
from functools import partial

import pytest
import torch
from lora_runs import exit_codes, lora_run
from run_ranks import Ranks, assert_same_metrics
from safetensors.torch import load_file

from opendm.model.dm05.lora_files import file_name
from opendm.trainer.engine import clean_name
from opendm.trainer.trainer import DMTrainer

DECAY = 0.5
STEPS = (1, 2)
RUNS = {
    "bf16_mixed on fsdp1": ("fsdp1", {"model_config__bf16": True}),
    "fp32_mixed on fsdp2": ("fsdp2", {"model_config__precision_policy": "fp32_mixed"}),
}


def averaging(base, folder, name):
    engine, changes = RUNS[name]
    return lora_run(
        base, folder, engine,
        trainer_config__num_train_steps=len(STEPS),
        trainer_config__save_steps=1,
        trainer_config__ema_decay=DECAY,
        trainer_config__bf16=True,
        optimizer_config__warmup_steps=0,
        **changes,
    )  # fmt: skip


def trained(checkpoint):
    """The weights of training by name, flat: what ranks hold of one stands in their order."""
    pieces = {}
    for file in sorted((checkpoint / "state").glob("*.safetensors")):
        for key, tensor in load_file(file).items():
            if key.endswith("/weight"):
                pieces.setdefault(key.removesuffix("/weight"), []).append(tensor.flatten())
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def note_base(folder, rank):
    """Write down the dtypes of the base as its engine has stored it."""

    def create_optimizer(trainer, *arguments):
        names = trainer.trainable_model.adapter.names
        named = trainer.model_wrapped.named_parameters()
        found = {str(p.dtype)[6:] for name, p in named if clean_name(name) not in names}
        (folder / f"base-{rank}").write_text(" ".join(sorted(found)))
        return original(trainer, *arguments)

    original, DMTrainer.create_optimizer = DMTrainer.create_optimizer, create_optimizer


@pytest.mark.parametrize("name", RUNS)
def test_the_average_is_exported_in_float32_and_a_resume_goes_on_with_it(
    name, tiny_checkpoint, tmp_path
):
    folder, engine = tmp_path / "run", RUNS[name][0]
    exp = averaging(tiny_checkpoint, folder, name)
    assert Ranks(exp, 2, tmp_path, partial(note_base, tmp_path)).wait() == [0, 0]
    loaded = "float32" if name.startswith("fp32") else "bfloat16"
    assert [(tmp_path / f"base-{rank}").read_text() for rank in (0, 1)] == [loaded] * 2
    start = exp.model_config.build_model(use_lora=True, lora_seed=exp.trainer_config.seed)
    averages = {n: start.get_parameter(n).detach().double() for n in start.adapter.names}
    for step in STEPS:
        exported = load_file(folder / f"checkpoint-{step}" / "adapter_model.safetensors")
        assert exported.keys() == {file_name(n) for n in averages}
        assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
        weights = trained(folder / f"checkpoint-{step}")
        assert weights.keys() == averages.keys() - start.adapter.unread
        for key, weight in weights.items():
            old = averages[key]
            averages[key] = DECAY * old + (1 - DECAY) * weight.double().reshape(old.shape)
        for key, average in averages.items():
            torch.testing.assert_close(exported[file_name(key)], average.float())
        assert not any(
            torch.equal(exported[file_name(key)].flatten(), weight)
            for key, weight in weights.items()
            if "lora_B" in key  # the first factors do not move in the first step
        )
        assert any((t != t.bfloat16().float()).any() for t in exported.values())
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    shutil.copytree(folder / "checkpoint-1", resumed / "checkpoint-1")
    shutil.copy(folder / "metrics.jsonl", resumed)
    assert exit_codes(averaging(tiny_checkpoint, resumed, name), engine, tmp_path) == {0}
    assert_same_metrics(resumed, folder)
    last = (folder / "adapter_model.safetensors").read_bytes()
    assert (resumed / "adapter_model.safetensors").read_bytes() == last
    assert (folder / "checkpoint-2" / "adapter_model.safetensors").read_bytes() == last
    assert json.loads((folder / "config.json").read_text())["dtype"] == loaded
