"""A loss or gradient that is not finite changes nothing, on no rank."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from run_ranks import experiment, metrics, run_ranks
from safetensors.numpy import load_file

from opendm.exp.dm05_exp import DM05OptimizerConfig, run

BAD_STEPS = {2: "loss", 3: "input", 5: "activation", 6: "gradient", 8: "second micro-step"}
NUM_STEPS = 9
ACCUMULATION = 2


class Injecting(DM05OptimizerConfig):
    """Puts a value that is not finite into a place of each bad step, on one rank."""

    def __init__(self, bad_steps, rank=0):
        super().__init__()
        self.bad_steps = bad_steps
        self.rank = rank

    def prepare_model(self, model):
        super().prepare_model(model)
        if dist.is_initialized() and dist.get_rank() != self.rank:
            return
        forwards, backwards = [], []

        def is_bad(calls, place, micro_step=0):
            step, now = divmod(len(calls) - 1, ACCUMULATION)
            return self.bad_steps.get(step + 1) == place and now == micro_step

        def before(_module, args, kwargs):
            forwards.append(1)
            if is_bad(forwards, "input"):
                kwargs["action"] = kwargs["action"] * float("nan")
            return args, kwargs

        def after(_module, _args, _kwargs, output):
            if is_bad(forwards, "loss") or is_bad(forwards, "second micro-step", 1):
                output["loss"] = output["loss"] * float("inf")
            return output

        def activation(_module, _args, output):
            return output * float("nan") if is_bad(forwards, "activation") else output

        def gradients(_module, grads, _outputs):
            backwards.append(1)
            factor = float("nan") if is_bad(backwards, "gradient") else 1.0
            return tuple(None if grad is None else grad * factor for grad in grads)

        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after, with_kwargs=True)
        layer = model.model.action_expert.layers[0].mlp.down_proj
        layer.register_forward_hook(activation)
        layer.register_full_backward_hook(gradients)


def injecting(tiny, folder, bad_steps=BAD_STEPS, rank=0, world=1, **changes):
    return experiment(
        tiny, folder, optimizer_config=Injecting(bad_steps, rank),
        trainer_config__gradient_accumulation_steps=ACCUMULATION,
        trainer_config__per_device_train_batch_size=4 // ACCUMULATION // world,
        trainer_config__num_train_steps=NUM_STEPS, trainer_config__save_steps=1, **changes,
    )  # fmt: skip


def tensors(folder, step):
    """Exported weights, and every rank's pieces of weights and moments."""
    checkpoint = Path(folder) / f"checkpoint-{step}"
    files = [checkpoint / "model.safetensors", *sorted(checkpoint.glob("state/*.safetensors"))]
    return {f"{path.name}/{k}": v for path in files for k, v in load_file(path).items()}


def schedule(folder, step):
    state = json.loads((folder / f"checkpoint-{step}" / "state" / "state.json").read_text())
    return state["scheduler"]


def num_unchanged(folder):
    """Values that bad steps left as they were: all; good steps change weights and moments."""
    count = 0
    for step in range(2, NUM_STEPS + 1):
        before, after = tensors(folder, step - 1), tensors(folder, step)
        assert before.keys() == after.keys()
        changed = [name for name, value in after.items() if not np.array_equal(value, before[name])]
        assert (not changed) == (step in BAD_STEPS), (step, changed)
        assert (schedule(folder, step - 1) == schedule(folder, step)) == (step in BAD_STEPS)
        if step in BAD_STEPS:
            count += sum(value.size for value in after.values())
    return count


@pytest.mark.parametrize("optim", ["adamw", "muon_adamw"])
def test_one_process_skips_every_bad_step_whole(optim, tiny_checkpoint, tmp_path):
    folder = tmp_path / "run"
    assert run(injecting(tiny_checkpoint, folder, optimizer_config__optim=optim)) == 0
    count = num_unchanged(folder)
    for line in metrics(folder):
        is_bad = line["step"] in BAD_STEPS
        assert (line["nonfinite"] is not None) == is_bad
        assert (None in (line["loss"], line["grad_norm"])) == is_bad
        assert not is_bad or " is " in line["nonfinite"]
    records = json.loads((folder / "nonfinite.json").read_text())
    assert [record["step"] for record in records] == list(BAD_STEPS)
    assert all(record["ranks"][0]["samples"] for record in records)
    print(f"{optim}, bad values in {len(BAD_STEPS)} places: 0 of {count:,} values changed")


@pytest.mark.parametrize("engine", ["fsdp1", "ddp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_value_on_one_rank_drops_the_step_on_all(engine, rank, tiny_checkpoint, tmp_path):
    folder = tmp_path / "run"
    exp = injecting(
        tiny_checkpoint, folder, rank=rank, world=2, trainer_config__fsdp1=engine == "fsdp1"
    )
    assert run_ranks(exp, 2, tmp_path) == [0, 0]
    count = num_unchanged(folder)
    records = json.loads((folder / "nonfinite.json").read_text())
    assert [record["step"] for record in records] == list(BAD_STEPS)
    assert all([r["rank"] for r in record["ranks"]] == [0, 1] for record in records)
    print(
        f"{engine} x2, bad values in {len(BAD_STEPS)} places on rank {rank}: 0 of {count:,} values "
        "changed"
    )


def test_stop_ends_the_run_with_its_own_code(tiny_checkpoint, tmp_path, capsys):
    folder = tmp_path / "run"
    exp = injecting(tiny_checkpoint, folder, {2: "loss"}, trainer_config__nonfinite="stop")
    assert run(exp) == 5
    assert "step 2: loss is inf" in capsys.readouterr().err
    assert (folder / "checkpoint-1").is_dir()
    assert not (folder / "checkpoint-2").exists()


def test_too_many_in_a_row_end_the_run(tiny_checkpoint, tmp_path, capsys):
    exp = injecting(
        tiny_checkpoint, tmp_path / "run", {1: "gradient", 2: "gradient"},
        trainer_config__max_nonfinite_steps=2,
    )  # fmt: skip
    assert run(exp) == 5
    assert "2 steps in a row" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_never_committed(tiny_checkpoint, tmp_path, capsys):
    @dataclass
    class Overflowing(DM05OptimizerConfig):
        def build_optimizer(self, model):
            optimizer = super().build_optimizer(model)
            weight = optimizer.param_groups[0]["params"][0]

            def spoil(*_):
                with torch.no_grad():
                    weight.fill_(float("inf"))

            optimizer.register_step_post_hook(spoil)
            return optimizer

    exp = experiment(
        tiny_checkpoint, tmp_path / "run", optimizer_config=Overflowing(),
        trainer_config__num_train_steps=1,
    )  # fmt: skip
    assert run(exp) == 5
    assert "the weights are not finite" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("checkpoint-*"))
