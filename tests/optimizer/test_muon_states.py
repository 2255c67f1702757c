"""The state of ``MuonAdamW``: what is in it, and that it survives every way of storing it."""

import copy
import inspect
import json

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from opendm.errors import CheckpointError, ConfigError
from opendm.optimizer import MuonAdamW, load_optimizer_state, save_optimizer_state

KINDS = {
    "float32": {"dtype": torch.float32},
    "bfloat16 with masters": {"dtype": torch.bfloat16},
    "bfloat16 without": {"dtype": torch.bfloat16, "master_weights": False},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def network(dtype=torch.float32, cols=5):
    torch.manual_seed(0)
    shapes = {"a": (6, cols), "b": (4, 9), "bias": (7,), "cube": (2, 3, 4), "scalar": ()}
    return nn.ParameterDict({
        name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()
    })  # fmt: skip


def is_matrix(name, param):
    return param.ndim == 2


def make(kind="float32", model=None, **options):
    options = {**KINDS[kind], "lr": 0.03, "weight_decay": 0.1, "predicate": is_matrix, **options}
    model = model or network(options["dtype"])
    del options["dtype"]
    return model, MuonAdamW(model, **options)


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, param in model.items():
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if name == "cube" else grad
        optimizer.step()


def states(model, optimizer):
    return {name: optimizer.state[param] for name, param in model.items()}


def assert_same_states(left, right):
    assert left.keys() == right.keys()
    for name, state in left.items():
        assert state.keys() == right[name].keys(), name
        for key, value in state.items():
            assert value.dtype == right[name][key].dtype, (name, key)
            assert torch.equal(value, right[name][key]), (name, key)


def assert_same_run(left, right):
    assert_same_states(states(*left), states(*right))
    for name, param in left[0].items():
        assert torch.equal(param, right[0][name]), name


def trained(kind="float32", **options):
    """A run in its fourth step, and a new one with the same weights and another state."""
    model, optimizer = make(kind, **options)
    train(model, optimizer, range(3))
    fresh = make(kind, lr=0.5)
    train(*fresh, range(7, 9))
    fresh[0].load_state_dict(model.state_dict())
    return (model, optimizer), fresh


# What is in it


@kinds
def test_state_is_complete_before_the_first_step_and_holds_nothing_unused(kind):
    model, optimizer = make(kind)
    before = copy.deepcopy(states(model, optimizer))
    train(model, optimizer, range(1))
    master = ["master"] if kind == "bfloat16 with masters" else []
    for state in (before, states(model, optimizer)):
        for name, param in model.items():
            tensors = dict(state[name])
            if name in ("a", "b"):
                assert sorted(tensors) == sorted(["exp_avg", *master])
            else:
                assert tensors.pop("step").shape == ()
                assert sorted(tensors) == sorted(["exp_avg", "exp_avg_sq", *master])
            assert {(t.dtype, t.shape) for t in tensors.values()} == {(torch.float32, param.shape)}


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_changes_no_state(default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        model, optimizer = make(model=network().float())
    finally:
        torch.set_default_dtype(before)
    dtypes = {t.dtype for state in states(model, optimizer).values() for t in state.values()}
    assert dtypes == {torch.float32}


def test_masters_share_no_memory_with_the_weights():
    model, optimizer = make("bfloat16 with masters")
    pointers = [t.data_ptr() for state in states(model, optimizer).values() for t in state.values()]
    assert len(set(pointers)) == len(pointers)
    assert not set(pointers) & {param.data_ptr() for param in model.values()}


def test_state_dict_holds_options_names_and_tensors_only():
    _, optimizer = make()
    plain = (int, float, bool, tuple, list, str)
    for group in optimizer.state_dict()["param_groups"]:
        assert set(group) == {
            "lr", "betas", "eps", "weight_decay", "muon_momentum", "muon_nesterov",
            "muon_ns_steps", "muon_lr_scale", "muon_moonlight_coefficient", "use_muon",
            "param_names", "params",
        }  # fmt: skip
        assert all(isinstance(value, plain) for value in group.values())


# state_dict and load_state_dict


@kinds
def test_a_loaded_run_continues_bit_for_bit(kind, tmp_path):
    run, fresh = trained(kind)
    torch.save(run[1].state_dict(), tmp_path / "state")
    fresh[1].load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert_same_run(run, fresh)
    for each in (run, fresh):
        train(*each, range(3, 5))
    assert_same_run(run, fresh)
    assert [group["lr"] for group in fresh[1].param_groups] == [0.03, 0.03]


def test_float32_states_of_bf16_weights_are_not_rounded():
    run, fresh = trained("bfloat16 with masters")
    fresh[1].load_state_dict(run[1].state_dict())
    for name in ("a", "b", "bias"):
        state = fresh[1].state[fresh[0][name]]
        for key in state.keys() - {"step"}:
            assert not torch.equal(state[key], state[key].to(torch.bfloat16).float()), (name, key)
    assert_same_states(states(*run), states(*fresh))


def test_names_decide_which_state_is_whose():
    (model, optimizer), (other, _) = trained()
    reordered = MuonAdamW(
        [
            {"params": [("b", other["b"]), ("a", other["a"])], "use_muon": True},
            {"params": [("scalar", other["scalar"]), ("cube", other["cube"])], "use_muon": False},
            {"params": [("module.bias", other["bias"])], "use_muon": False},
        ],
        lr=9.0,
    )
    reordered.load_state_dict(optimizer.state_dict())
    assert_same_states(states(model, optimizer), states(other, reordered))
    for each in ((model, optimizer), (other, reordered)):
        train(*each, range(3, 5))
    assert_same_run((model, optimizer), (other, reordered))


def older_state(optimizer, style):
    """What public OpenDM writes: spec 6.2."""
    state = copy.deepcopy(optimizer.state_dict())
    adamw, muon = state["param_groups"]
    names, shapes = muon.pop("param_names"), [(6, 5), (4, 9)]
    adamw.pop("param_names")
    if style == "names and shapes":
        muon |= {"muon_names": names, "muon_shapes": shapes}
    elif style == "matrix shapes":
        muon["muon_matrix_shapes"] = shapes
    else:
        pairs = zip(names, shapes, strict=True)
        muon["muon_param_infos"] = [{"name": n, "matrix_shape": s} for n, s in pairs]
    for index in muon["params"]:
        values = state["state"][index]
        values["exp_avg_sq"] = torch.ones_like(values["exp_avg"])
        values["step"] = torch.tensor(3.0)
        if style == "matrix shapes":
            values["momentum_buffer"] = values.pop("exp_avg")
    for index in adamw["params"]:
        state["state"][index]["step"] = int(state["state"][index]["step"])
    return state


@pytest.mark.parametrize("style", ["names and shapes", "matrix shapes", "infos"])
def test_states_of_public_opendm_load(style):
    run, fresh = trained()
    fresh[1].load_state_dict(older_state(run[1], style))
    assert_same_run(run, fresh)
    for group in fresh[1].param_groups:
        assert not [key for key in group if key.startswith("muon_param") or "shapes" in key]
    for each in (run, fresh):
        train(*each, range(3, 5))
    assert_same_run(run, fresh)


def test_older_state_without_masters_takes_them_from_the_weights():
    model, optimizer = make("bfloat16 without")
    train(model, optimizer, range(3))
    other, fresh = make("bfloat16 with masters")
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    for name, param in other.items():
        assert torch.equal(fresh.state[param]["master"], param.float()), name
        assert torch.equal(
            fresh.state[param]["exp_avg"], optimizer.state[model[name]]["exp_avg"]
        ), name


def renamed(state):
    state["param_groups"][1]["param_names"][0] = "other"


def shortened(state):
    for key in ("param_names", "params"):
        state["param_groups"][0][key].pop()


def reshaped(state):
    state["state"][state["param_groups"][1]["params"][0]]["exp_avg"] = torch.zeros(5, 6)


def without_names(state):
    del state["param_groups"][0]["param_names"]
    state["param_groups"][0]["params"].pop()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (renamed, r"1 parameters have no state \(a\), 1 states have no parameter \(other\)"),
        (shortened, r"1 parameters have no state \(scalar\), 0 states"),
        (reshaped, r"exp_avg .* shape \(5, 6\), and this rank holds \(6, 5\); .*save_optimizer"),
        (without_names, "group 0 .* holds 2 parameters and no names, .* 3; load it into the model"),
    ],
)
def test_state_of_another_model_is_refused_and_changes_nothing(damage, message):
    run, fresh = trained()
    state = copy.deepcopy(run[1].state_dict())
    damage(state)
    before = copy.deepcopy(states(*fresh))
    with pytest.raises(ConfigError, match=message):
        fresh[1].load_state_dict(state)
    assert_same_states(states(*fresh), before)


def test_signatures_are_those_of_torch():
    for name in ("load_state_dict", "state_dict", "zero_grad", "step"):
        ours, torchs = (
            list(inspect.signature(getattr(cls, name)).parameters)
            for cls in (MuonAdamW, torch.optim.Optimizer)
        )
        assert ours == torchs, name
    run, fresh = trained()
    fresh[1].load_state_dict(state_dict=run[1].state_dict())
    assert_same_run(run, fresh)


def test_rate_that_is_a_tensor_stays_one():
    run, _ = trained(lr=torch.tensor(0.25))
    fresh = make(lr=torch.tensor(0.5))
    fresh[1].load_state_dict(run[1].state_dict())
    assert [type(group["lr"]) for group in fresh[1].param_groups] == [torch.Tensor] * 2
    assert [float(group["lr"]) for group in fresh[1].param_groups] == [0.25] * 2


# A folder by name


@kinds
def test_a_folder_restores_the_state_bit_for_bit(kind, tmp_path):
    run, fresh = trained(kind)
    save_optimizer_state(run[1], tmp_path / "state")
    load_optimizer_state(fresh[1], tmp_path / "state")
    assert_same_run(run, fresh)
    for each in (run, fresh):
        train(*each, range(3, 5))
    assert_same_run(run, fresh)
    index = json.loads((tmp_path / "state" / "optimizer.json").read_text())
    assert set(index["parameters"]) == set(run[0])


def test_options_come_back_from_a_folder_as_they_were(tmp_path):
    run, _ = trained(betas=(0.5, 0.75), muon_lr_scale=2.0, muon_nesterov=False)
    save_optimizer_state(run[1], tmp_path)
    fresh = make()
    load_optimizer_state(fresh[1], tmp_path)
    for ours, theirs in zip(run[1].param_groups, fresh[1].param_groups, strict=True):
        for key in ours.keys() - {"params"}:
            assert ours[key] == theirs[key], key
            assert type(ours[key]) is type(theirs[key]), key


def test_rate_that_is_a_tensor_stays_one_through_a_folder(tmp_path):
    run, _ = trained(lr=torch.tensor(0.25))
    save_optimizer_state(run[1], tmp_path)
    fresh = make(lr=torch.tensor(0.5))
    load_optimizer_state(fresh[1], tmp_path)
    assert [type(group["lr"]) for group in fresh[1].param_groups] == [torch.Tensor] * 2
    assert [float(group["lr"]) for group in fresh[1].param_groups] == [0.25] * 2


def test_a_folder_that_was_not_completed_is_refused(tmp_path):
    run, fresh = trained()
    save_optimizer_state(run[1], tmp_path)
    (tmp_path / "optimizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no optimizer\.json; give a folder"):
        load_optimizer_state(fresh[1], tmp_path)


def test_saving_again_is_incomplete_until_it_has_ended(tmp_path, monkeypatch):
    run, fresh = trained()
    save_optimizer_state(run[1], tmp_path)

    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", stopped)
    with pytest.raises(KeyboardInterrupt):
        save_optimizer_state(run[1], tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no optimizer\.json"):
        load_optimizer_state(fresh[1], tmp_path)


def test_a_folder_of_another_format_is_refused(tmp_path):
    run, fresh = trained()
    save_optimizer_state(run[1], tmp_path)
    index = json.loads((tmp_path / "optimizer.json").read_text())
    (tmp_path / "optimizer.json").write_text(json.dumps({**index, "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99; this version reads 1"):
        load_optimizer_state(fresh[1], tmp_path)


def test_a_folder_of_another_model_is_refused(tmp_path):
    run, _ = trained()
    save_optimizer_state(run[1], tmp_path)
    _, wider = make(model=network(cols=8))
    before = copy.deepcopy(wider.state_dict()["state"])
    with pytest.raises(CheckpointError, match=r"of a for shape \(6, 5\), and the model has \(6, 8"):
        load_optimizer_state(wider, tmp_path)
    assert_same_states(wider.state_dict()["state"], before)
    _, other = make(model=nn.ParameterDict({"c": nn.Parameter(torch.zeros(2, 2))}))
    with pytest.raises(ConfigError, match=r"1 parameters have no state \(c\), 5 states"):
        load_optimizer_state(other, tmp_path)


# In other hands


@kinds
def test_accelerate_prepares_saves_and_restores_it(kind):
    run, fresh = trained(kind)
    accelerator = Accelerator(cpu=True)
    prepared, restored = accelerator.prepare(run[1]), accelerator.prepare(fresh[1])
    assert prepared.optimizer is run[1]
    restored.load_state_dict(prepared.state_dict())
    assert_same_run(run, fresh)
    train(run[0], prepared, range(3, 5))
    train(fresh[0], restored, range(3, 5))
    assert_same_run(run, fresh)
