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

PLACES = ("loss", "input", "activation", "gradient", "second micro-step")


@dataclass
class Injecting(DM05OptimizerConfig):
    """Puts a value that is not finite into one place, on one rank, in some steps."""

    place: str = "loss"
    rank: int = 0
    steps: tuple[int, ...] = (2,)
    accumulation: int = 1

    def prepare_model(self, model):
        super().prepare_model(model)
        if dist.is_initialized() and dist.get_rank() != self.rank:
            return
        forwards, gradients = [], []

        def micro_step(calls):
            calls.append(1)
            step, micro = divmod(len(calls) - 1, self.accumulation)
            is_last = micro == self.accumulation - 1
            return step + 1 in self.steps and is_last

        def before(_module, args, kwargs):
            if micro_step(forwards) and self.place == "input":
                kwargs["action"] = kwargs["action"] * float("nan")
            return args, kwargs

        def after(_module, _args, _kwargs, output):
            step, micro = divmod(len(forwards) - 1, self.accumulation)
            is_bad = step + 1 in self.steps and micro == self.accumulation - 1
            if is_bad and self.place in ("loss", "second micro-step"):
                output["loss"] = output["loss"] * float("inf")
            return output

        def spoil_activation(_module, _args, output):
            step, _ = divmod(len(forwards) - 1, self.accumulation)
            bad = step + 1 in self.steps and self.place == "activation"
            return output * float("nan") if bad else output

        def spoil_gradient(grad):
            bad = micro_step(gradients) and self.place == "gradient"
            return grad * float("nan") if bad else grad

        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after, with_kwargs=True)
        layer = model.model.action_expert.layers[0].mlp.down_proj
        layer.register_forward_hook(spoil_activation)
        layer.register_full_backward_hook(
            lambda _module, grads, _out: tuple(
                None if g is None else spoil_gradient(g) for g in grads
            )
        )


def injecting(tiny, folder, place, rank=0, steps=(2,), **changes):
    accumulation = 2 if place == "second micro-step" else 1
    world = changes.pop("world", 1)
    config = Injecting(place=place, rank=rank, steps=steps, accumulation=accumulation)
    return experiment(
        tiny, folder, optimizer_config=config,
        trainer_config__gradient_accumulation_steps=accumulation,
        trainer_config__per_device_train_batch_size=4 // accumulation // world,
        trainer_config__num_train_steps=3, trainer_config__save_steps=1,
        **changes,
    )  # fmt: skip


def tensors(folder, step):
    """Exported weights, and every rank's pieces of weights and moments."""
    checkpoint = Path(folder) / f"checkpoint-{step}"
    files = [checkpoint / "model.safetensors", *sorted(checkpoint.glob("state/*.safetensors"))]
    return {f"{path.name}/{k}": v for path in files for k, v in load_file(path).items()}


def assert_step_changed_nothing(folder, step):
    before, after = tensors(folder, step - 1), tensors(folder, step)
    assert before.keys() == after.keys()
    changed = [name for name, value in after.items() if not np.array_equal(value, before[name])]
    assert changed == []


def schedule(folder, step):
    state = json.loads((folder / f"checkpoint-{step}" / "state" / "state.json").read_text())
    return state["scheduler"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("optim", ["adamw", "muon_adamw"])
def test_one_process_skips_the_whole_step(place, optim, tiny_checkpoint, tmp_path):
    folder = tmp_path / "run"
    exp = injecting(tiny_checkpoint, folder, place, optimizer_config__optim=optim)
    assert run(exp) == 0
    assert_step_changed_nothing(folder, 2)
    assert schedule(folder, 1) == schedule(folder, 2)
    first, bad, last = metrics(folder)
    assert (first["nonfinite"], last["nonfinite"]) == (None, None)
    assert " is " in bad["nonfinite"]
    assert None in (bad["loss"], bad["grad_norm"])
    assert last["lr"] == bad["lr"]
    (record,) = json.loads((folder / "nonfinite.json").read_text())
    assert record["step"] == 2
    assert record["ranks"][0]["samples"]


@pytest.mark.parametrize("engine", ["fsdp1", "ddp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_bad_rank_stops_the_step_on_all(engine, rank, tiny_checkpoint, tmp_path):
    for place in ("loss", "gradient"):
        folder = tmp_path / place
        exp = injecting(
            tiny_checkpoint, folder, place, rank, world=2, trainer_config__fsdp1=engine == "fsdp1"
        )
        assert run_ranks(exp, 2, tmp_path) == [0, 0]
        assert_step_changed_nothing(folder, 2)
        (record,) = json.loads((folder / "nonfinite.json").read_text())
        assert [r["rank"] for r in record["ranks"]] == [0, 1]


def test_stop_ends_the_run_with_its_own_code(tiny_checkpoint, tmp_path, capsys):
    folder = tmp_path / "run"
    exp = injecting(tiny_checkpoint, folder, "loss", trainer_config__nonfinite="stop")
    assert run(exp) == 5
    assert "step 2: loss is inf" in capsys.readouterr().err
    assert (folder / "checkpoint-1").is_dir()
    assert not (folder / "checkpoint-2").exists()


def test_too_many_in_a_row_end_the_run(tiny_checkpoint, tmp_path, capsys):
    exp = injecting(
        tiny_checkpoint, tmp_path / "run", "gradient", steps=(1, 2),
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
