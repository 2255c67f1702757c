"""The state of training on disk: exact, between all engines and numbers of ranks."""

import errno
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from ranks import fork_ranks
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import train_state_work as work
from train_state_work import BY_WORLD, OPTIMIZERS

from opendm.errors import CheckpointError, ConfigError
from opendm.optimizer import MuonAdamW
from opendm.trainer.train_state import load_train_state, save_train_state

# Between engines and numbers of ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of saved states, one by every engine and optimizer."""
    root = tmp_path_factory.mktemp("states")
    work.save_all(0, root, 1)
    for world_size in (2, 3, 4):
        fork_ranks(
            work.save_all, root, world_size,
            tmp_path=tmp_path_factory.mktemp("store"), world_size=world_size,
        )  # fmt: skip
    return root


@pytest.mark.parametrize("world_size", BY_WORLD)
def test_every_saved_state_loads_bit_for_bit_under_every_engine(world_size, saved, tmp_path):
    wholes = {optim: work.whole_run(optim, 3) for optim in OPTIMIZERS}
    later = {optim: work.whole_run(optim, 5) for optim in OPTIMIZERS}
    arguments = (saved, world_size, wholes, later)
    if world_size == 1:
        by_rank = [work.load_all(0, *arguments)]
    else:
        by_rank = fork_ranks(work.load_all, *arguments, tmp_path=tmp_path, world_size=world_size)
    num_engines = sum(len(engines) for engines in BY_WORLD.values())
    for found in by_rank:
        assert len(found) == len(BY_WORLD[world_size]) * len(OPTIMIZERS) * (num_engines + 1)
        assert {case: wrong for case, wrong in found.items() if wrong != (0, 0, 0)} == {}


def test_every_element_is_written_once_and_every_rank_writes_some(saved):
    numel = sum(tensor.numel() for tensor in work.Run("single", "adamw").trainable().values())
    for folder in saved.iterdir():
        counts = []
        for file in (folder / "state").glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                weights = [key for key in opened.keys() if key.endswith("/weight")]  # noqa: SIM118
                counts.append(sum(opened.get_tensor(key).numel() for key in weights))
        assert sum(counts) == numel, folder.name
        assert min(counts) > 0, folder.name
        assert len(counts) == int(folder.name.split("-")[-2])


def test_what_one_rank_cannot_do_is_said_and_nobody_waits(tmp_path):
    root = tmp_path / "states"
    root.mkdir()
    first, second = fork_ranks(work.failures, root, tmp_path=tmp_path)
    for said in (first, second):
        assert re.search(r"rank 1: AdamW keeps odd of 0\.layers\.0\.weight", said["odd state"])
        for engine in ("fsdp1", "fsdp2"):
            assert said[engine, "before"] == said[engine, "after"] == "accepted"
            assert "reshard weights that an evaluation" in said[engine, "save"]
            assert "reshard weights that an evaluation" in said[engine, "load"]
    assert first["unwritable"] == "accepted"
    assert re.search(r"state-00001\.safetensors of 0\.000 GiB could not", second["unwritable"])


def test_random_states_return_for_the_same_number_of_ranks_alone(tmp_path):
    run = (work.random_numbers, tmp_path / "state")
    saving = fork_ranks(*run, True, tmp_path=tmp_path)
    loading = fork_ranks(*run, False, tmp_path=tmp_path)
    assert saving == loading
    assert saving[0] != saving[1]
    numbers, lines = work.random_numbers(0, tmp_path / "state", False)
    torch.manual_seed(0)
    assert numbers == torch.rand(4).tolist()
    assert lines == ["the checkpoint is of 2 ranks and this run has 1: random states start anew"]


# One process


def network(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 3)).to(dtype)
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0, dtype=dtype)))
    model[0].bias.requires_grad_(False)
    return model


MAKERS = {
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr),
    "amsgrad": lambda params, lr: torch.optim.AdamW(params, lr=lr, amsgrad=True),
    "fused": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
    "rate as a tensor": lambda params, lr: torch.optim.AdamW(params, lr=torch.tensor(lr)),
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "nadam": lambda params, lr: torch.optim.NAdam(params, lr=lr),
    "muon": None,
}


def make(maker="adamw", lr=0.0625, dtype=torch.float32, rate=lambda n: 1 / (1 + n)):
    model = network(dtype)
    if maker == "muon":
        optimizer = MuonAdamW(model, lr=lr, predicate=lambda name, param: param.ndim == 2)
    else:
        optimizer = MAKERS[maker]([p for p in model.parameters() if p.requires_grad], lr)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def train(run, num_steps):
    """Losses and rates; dropout and data draw on the random state."""
    model, optimizer, scheduler = run
    record = []
    for _ in range(num_steps):
        inputs = torch.randn(4, 5).to(model.scale.dtype)
        loss = (model.scale * model(inputs)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        record.append((loss.item(), float(scheduler.get_last_lr()[0])))
    return record


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_resumed_run_is_the_uninterrupted_one(maker, dtype, tmp_path):
    run = make(maker, dtype=dtype)
    train(run, 3)
    save_train_state(tmp_path, *run, {"step": 3, "seen": [1, 2]})
    expected = train(run, 3)
    resumed = make(maker, lr=0.5, dtype=dtype)
    train(resumed, 1)
    fresh = make(maker, lr=0.5, dtype=dtype)
    for other in (resumed, fresh):
        assert load_train_state(tmp_path, *other) == {"step": 3, "seen": [1, 2]}
        assert train(other, 3) == expected
        assert_same(other, run)


def assert_same(left, right):
    for (name, ours), (_, theirs) in zip(
        left[0].named_parameters(), right[0].named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    ours, theirs = left[1].state_dict(), right[1].state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in ours["state"].items():
        assert state.keys() == theirs["state"][key].keys()
        for kind, tensor in state.items():
            other = theirs["state"][key][kind]
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), kind
            assert torch.equal(tensor, other), kind


def test_nothing_is_pickled(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("pickled")

    run = make()
    train(run, 1)
    for name in ("pickle.dump", "pickle.dumps", "pickle.load", "pickle.loads", "torch.save"):
        monkeypatch.setattr(name, refuse)
    save_train_state(tmp_path, *run, {})
    load_train_state(tmp_path, *run)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert names == ["state/state-00000.safetensors", "state/state.json"]


def test_own_rates_go_on_at_the_saved_step(tmp_path):
    run = make()
    train(run, 3)
    save_train_state(tmp_path, *run, {})
    other = make(lr=0.5, rate=lambda n: 1 / (1 + n * n))
    other[1].param_groups[0]["betas"] = (0.5, 0.75)
    load_train_state(tmp_path, *other, keep_rates=True)
    assert other[1].param_groups[0]["betas"] == (0.5, 0.75)
    assert other[1].param_groups[0]["lr"] == 0.5 / (1 + 3 * 3)
    train(other, 1)
    assert other[1].param_groups[0]["lr"] == 0.5 / (1 + 4 * 4)
    state = other[1].state[other[0].scale]
    assert state["step"] == 4


def test_ways_of_computing_stay_those_of_the_run(tmp_path):
    run = make()
    train(run, 1)
    save_train_state(tmp_path, *run, {})
    other = make("fused", lr=0.5)
    load_train_state(tmp_path, *other)
    assert other[1].param_groups[0]["fused"] is True
    assert other[1].param_groups[0]["lr"] == run[1].param_groups[0]["lr"]
    train(other, 1)
    assert other[1].state[other[0].scale]["step"] == 2


def test_averages_that_were_not_saved_start_from_the_weights(tmp_path):
    run = make()
    train(run, 2)
    save_train_state(tmp_path, *run, {})
    ema = {name: torch.zeros_like(p) for name, p in run[0].named_parameters() if p.requires_grad}
    load_train_state(tmp_path, *run, ema=ema)
    for name, tensor in ema.items():
        assert torch.equal(tensor, run[0].get_parameter(name)), name


# What is refused


def widened(run):
    run[0][2] = nn.Linear(8, 3)


def other_dtype(run):
    run[0].to(torch.bfloat16)


def renamed(run):
    run[0].register_parameter("factor", run[0].scale)
    del run[0].scale


def remade(run, change):
    """A run of the changed model."""
    change(run)
    params = [p for p in run[0].parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.5)
    return run[0], optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (widened, r"of 2\.weight for shape \(3, 7\), and the model has \(3, 8\)"),
        (other_dtype, r"saved as torch\.float32 and is stored as torch\.bfloat16; resume"),
        (renamed, r"no state \(factor\), 1 states have no parameter \(scale\)"),
    ],
)
def test_a_state_of_another_model_is_refused_and_changes_nothing(change, message, tmp_path):
    run = make()
    train(run, 2)
    save_train_state(tmp_path, *run, {})
    other = remade(make(), change)
    before = [param.clone() for param in other[0].parameters()]
    with pytest.raises(ConfigError, match=message):
        load_train_state(tmp_path, *other)
    assert all(torch.equal(a, b) for a, b in zip(before, other[0].parameters(), strict=True))
    assert not other[1].state
    assert other[1].param_groups[0]["lr"] == 0.5


def cut_off(state):
    file = state / "state-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def remove_pieces(state):
    (state / "state-00000.safetensors").unlink()


def remove_index(state):
    (state / "state.json").unlink()


def garble_index(state):
    (state / "state.json").write_text("{")


def other_format(state):
    edit(state, lambda index: index.update(format=99))


def lose_elements(state):
    edit(state, lambda index: index["parameters"]["2.weight"]["pieces"][0].__setitem__(1, 20))


def lose_a_parameter(state):
    edit(state, lambda index: index["parameters"]["2.weight"]["pieces"].clear())


def lose_a_tensor(state):
    file = state / "state-00000.safetensors"
    with safe_open(file, framework="pt") as opened:
        tensors, texts = opened.get_tensors(), opened.metadata()
    tensors["2.weight/exp_avg"] = tensors["2.weight/exp_avg"][:20].clone()
    save_file(tensors, file, metadata=texts)


def edit(state, change):
    index = json.loads((state / "state.json").read_text())
    change(index)
    (state / "state.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, r"state-00000\.safetensors cannot be read: .*; take another checkpoint"),
        (remove_pieces, r"state-00000\.safetensors cannot be read"),
        (remove_index, r"state\.json cannot be read: .*save-only-model"),
        (garble_index, r"state\.json cannot be read"),
        (other_format, r"has format 99; this version reads 1"),
        (lose_elements, r"holds 20 of 21 elements of 2\.weight; it is not complete"),
        (lose_a_parameter, r"holds 0 of 21 elements of 2\.weight"),
        (lose_a_tensor, r"holds 20 of 21 elements of 2\.weight"),
    ],
)
def test_a_damaged_state_is_one_error(damage, message, tmp_path):
    run = make()
    train(run, 1)
    save_train_state(tmp_path, *run, {})
    damage(tmp_path / "state")
    with pytest.raises(CheckpointError, match=message):
        load_train_state(tmp_path, *make())


def test_a_full_disk_is_one_error_with_the_size(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match=r"of 0\.000 GiB could not .*No space left.*room"):
        save_train_state(tmp_path, *make(), {})


def test_parameters_and_averages_of_another_model_cannot_be_saved(tmp_path):
    model, _, scheduler = make()
    stranger = torch.optim.AdamW([nn.Parameter(torch.zeros(2, 9))])
    with pytest.raises(CheckpointError, match=r"of shape \(2, 9\) that is not among the model's"):
        save_train_state(tmp_path, model, stranger, scheduler, {})
    with pytest.raises(CheckpointError, match=r"of 1 parameters were given .* trains 4"):
        save_train_state(tmp_path, *make(), {}, ema={"other": torch.zeros(2)})


def test_counters_must_be_strict_json(tmp_path):
    for counters in ({"loss": float("nan")}, {"model": nn.Linear(1, 1)}):
        with pytest.raises(CheckpointError, match=r"state\.json could not be written"):
            save_train_state(tmp_path, *make(), counters)
