"""One step of ``MuonAdamW`` in one process against references that are written out here."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

from opendm.errors import ConfigError
from opendm.optimizer import MuonAdamW, zeropower_via_newtonschulz5
from opendm.optimizer.sharded_muon import ShardedMuon
from opendm.optimizer.update_rules import apply_, muon_rate

SHAPES = {"tall": (24, 9), "wide": (9, 24), "square": (12, 12), "row": (1, 17), "column": (17, 1)}
OPTIONS = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(shapes=SHAPES, dtype=torch.float32):
    """Matrices for Muon by name, and a vector, an odd tensor and a scalar for AdamW."""
    generator = torch.Generator().manual_seed(3)
    others = {"vector": (1024,), "cube": (2, 3, 8), "odd": (43,), "scalar": ()}
    return nn.ParameterDict({
        name: nn.Parameter(torch.randn(shape, generator=generator).to(torch.bfloat16).to(dtype))
        for name, shape in {**shapes, **others}.items()
    })  # fmt: skip


def is_matrix(name, param):
    return param.ndim == 2


def make(model, **options):
    return MuonAdamW(model, **{**OPTIONS, "predicate": is_matrix, **options})


def gradients(model, step):
    generator = torch.Generator().manual_seed(100 + step)
    return {n: torch.randn(p.shape, generator=generator) for n, p in model.items()}


def set_gradients(model, grads):
    for name, param in model.items():
        param.grad = None if grads.get(name) is None else grads[name].to(param.dtype, copy=True)


def train(model, optimizer, steps):
    for step in steps:
        set_gradients(model, gradients(model, step))
        optimizer.step()


def bits(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_bits(left, right, names=None):
    for name in names or left:
        assert torch.equal(left[name], right[name]), name


def orthogonalized(matrix, steps=5):
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def public_muon(weight, grads, *, lr, weight_decay, scale=1.0, mu=0.95, nesterov=True):
    """Spec 6.3 and 6.4 in float64 for one matrix."""
    weight, momentum = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for grad in grads:
        direction = torch.zeros_like(momentum) if grad is None else grad.double()
        momentum = mu * momentum + direction
        update = orthogonalized(direction + mu * momentum if nesterov else momentum)
        weight = weight * (1 - lr * weight_decay)
        weight = weight - lr * scale * 0.2 * max(weight.shape) ** 0.5 * update
    return weight


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize(("nesterov", "scale"), [(True, 1.0), (False, 2.5)])
def test_matrices_follow_the_public_loop_in_float64(nesterov, scale, weight_decay):
    model, start = network(), network()
    optimizer = make(model, weight_decay=weight_decay, muon_nesterov=nesterov, muon_lr_scale=scale)
    train(model, optimizer, range(5))
    for name in SHAPES:
        grads = [gradients(start, step)[name] for step in range(5)]
        expected = public_muon(
            start[name].detach(), grads, lr=0.02, weight_decay=weight_decay, scale=scale,
            nesterov=nesterov,
        )  # fmt: skip
        moved = (expected - start[name]).norm()
        assert moved > 0.03, name
        assert (model[name] - expected).norm() < 2e-6 * max(moved, expected.norm()), name


def test_the_rest_is_torch_adamw_bit_for_bit():
    model, expected = network(), network()
    optimizer = make(model)
    rest = [param for param in expected.values() if param.ndim != 2]
    reference = torch.optim.AdamW(rest, **OPTIONS, fused=True)
    for step in range(10):
        for each in (model, expected):
            set_gradients(each, gradients(each, step))
        optimizer.step()
        reference.step()
    # Of other sizes the end, less than a vector, is computed as if it were a whole one.
    assert_same_bits(bits(model), bits(expected), ["vector", "cube"])
    for name in ("odd", "scalar"):
        torch.testing.assert_close(model[name], expected[name], rtol=5e-7, atol=1e-8)


@pytest.mark.parametrize("shape", [(32, 8), (8, 32), (16, 16), (1, 64), (64, 1)])
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_effective_rate_is_a_fifth_of_the_root_of_the_longer_side(shape, scale):
    rows, cols = shape
    orthonormal = torch.linalg.qr(torch.randn(max(shape), min(shape)))[0]
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(shape))})
    optimizer = make(model, weight_decay=0.0, lr=1e-3, muon_lr_scale=scale)
    set_gradients(model, {"w": 7.0 * (orthonormal if rows >= cols else orthonormal.T)})
    optimizer.step()
    sigma = 1 / math.sqrt(min(shape))  # each of them, after the division by the norm
    for _ in range(5):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    rate = 1e-3 * scale * 0.2 * math.sqrt(max(shape))
    values = torch.linalg.svdvals(model["w"].detach())
    torch.testing.assert_close(values, torch.full_like(values, rate * sigma), rtol=1e-4, atol=0)
    rms = model["w"].detach().square().mean().sqrt()
    assert rms.item() == pytest.approx(1e-3 * scale * 0.2 * sigma, rel=1e-4)


def test_muon_lr_scale_multiplies_the_update_and_nothing_else():
    updates = []
    for scale in (1.0, 4.0):
        model = network()
        for param in model.values():
            nn.init.zeros_(param)
        train(model, make(model, weight_decay=0.0, muon_lr_scale=scale), range(1))
        updates.append(bits(model))
    for name in updates[0]:
        factor = 4.0 if name in SHAPES else 1.0
        assert torch.equal(factor * updates[0][name], updates[1][name]), name


# Gradients that are missing, not finite, zero, tiny or huge


def test_without_gradients_nothing_changes():
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(2))
    before, state = bits(model), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer.step()
    assert_same_bits(bits(model), before)
    for index, values in optimizer.state_dict()["state"].items():
        assert_same_bits(values, state["state"][index])


def test_a_missing_gradient_leaves_its_matrix_alone_and_no_other():
    model, expected = network(), network()
    optimizer, reference = make(model), make(expected)
    for step in range(4):
        grads = gradients(model, step)
        missing = {"tall": None} if step == 2 else {}
        set_gradients(expected, grads)
        set_gradients(model, {**grads, **missing})
        before = model["tall"].detach().clone()
        optimizer.step()
        reference.step()
        if step == 2:
            assert torch.equal(model["tall"], before)
    assert_same_bits(bits(model), bits(expected), set(bits(model)) - {"tall"})
    only, alone = network(), network()
    train(alone, make(alone), [0, 1, 3])
    assert torch.equal(model["tall"], alone["tall"])
    assert not torch.equal(model["tall"], only["tall"])


def test_missing_grad_zero_replays_the_public_loop():
    model, start = network(), network()
    optimizer = make(model, missing_grad="zero")
    for step in range(3):
        grads = gradients(model, step)
        set_gradients(model, {**grads, "tall": None} if step else grads)
        optimizer.step()
    grads = [gradients(start, 0)["tall"], None, None]
    expected = public_muon(start["tall"].detach(), grads, lr=0.02, weight_decay=0.1)
    assert (model["tall"] - expected).norm() < 2e-6 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_gradient_costs_its_matrix_that_step_only(bad, dtype):
    model, expected, alone = (network(dtype=dtype) for _ in range(3))
    runs = [(each, make(each)) for each in (model, expected, alone)]
    for run in runs:
        train(*run, range(1))
        with torch.no_grad():  # the one number whose bits change when zero is added
            run[0]["wide"][0, 0] = run[1].state[run[0]["wide"]]["exp_avg"][0, 0] = -0.0

    weight, momentum = model["wide"].detach(), runs[0][1].state[model["wide"]]["exp_avg"]
    before = weight.clone(), momentum.clone()
    grads = gradients(model, 1)
    set_gradients(expected, grads)
    grads["wide"][3, 5] = bad
    set_gradients(model, grads)
    for _, optimizer in runs[:2]:
        optimizer.step()
    for value, old in zip((weight, momentum), before, strict=True):
        assert torch.equal(value.view(torch.int16), old.view(torch.int16))

    for run in runs:
        train(*run, range(2, 3))
    assert [optimizer.skipped_matrices for _, optimizer in runs] == [1, 0, 0]
    assert_same_bits(bits(model), bits(expected), set(bits(model)) - {"wide"})
    assert torch.equal(model["wide"], alone["wide"])


def test_zero_gradient_from_zero_momentum_only_decays():
    model, start = network(), network()
    optimizer = make(model)
    set_gradients(model, {name: torch.zeros_like(p) for name, p in model.items()})
    optimizer.step()
    for name in SHAPES:
        assert torch.equal(model[name], start[name] * (1 - 0.02 * 0.1)), name
    assert optimizer.skipped_matrices == 0


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e-8, 1e10, 1e20, 1e30])
def test_direction_does_not_depend_on_the_scale_of_the_gradient(scale):
    updates = []
    for factor in (1.0, scale):
        model = network()
        for name in SHAPES:
            nn.init.zeros_(model[name])
        optimizer = make(model)
        set_gradients(model, {n: factor * g for n, g in gradients(model, 0).items()})
        optimizer.step()
        updates.append(bits(model))
    for name in SHAPES:
        # 1e-38 is the smallest normal number: elements below it keep fewer bits
        tolerance = 1e-4 if scale < 1e-37 else 2e-5
        difference = (updates[0][name] - updates[1][name]).norm() / updates[0][name].norm()
        assert difference < tolerance, (name, difference)


# Half precision


def test_bf16_weights_keep_float32_states():
    model = network(dtype=torch.bfloat16)
    optimizer = make(model)
    train(model, optimizer, range(1))
    dtypes = {value.dtype for state in optimizer.state.values() for value in state.values()}
    assert dtypes == {torch.float32}


def test_master_is_the_float32_run_rounded_once():
    model, expected = network(dtype=torch.bfloat16), network()
    optimizer, reference = make(model, lr=1e-3), make(expected, lr=1e-3)
    for step in range(8):
        grads = {n: g.to(torch.bfloat16).float() for n, g in gradients(model, step).items()}
        set_gradients(model, grads)
        set_gradients(expected, grads)
        optimizer.step()
        reference.step()
    for name, param in model.items():
        assert torch.equal(optimizer.state[param]["master"], expected[name]), name
        assert torch.equal(param, expected[name].to(torch.bfloat16)), name


def test_master_weights_keep_updates_that_bf16_loses():
    unchanged = {}
    for master_weights in (True, False):
        model = nn.ParameterDict({"w": nn.Parameter(torch.empty(96, 128, dtype=torch.bfloat16))})
        nn.init.normal_(model["w"], std=0.02, generator=torch.Generator().manual_seed(0))
        start = model["w"].detach().clone()
        optimizer = make(model, lr=1e-5, weight_decay=0.0, master_weights=master_weights)
        constant = gradients(model, 0)
        for step in range(50):
            noise = gradients(model, step)
            set_gradients(model, {"w": constant["w"] + 0.5 * noise["w"]})
            optimizer.step()
        unchanged[master_weights] = (model["w"] == start).float().mean().item()
    print(f"unchanged bf16 weights after 50 steps at 1e-5: {unchanged}")
    assert unchanged[True] < 0.5 * unchanged[False]


@pytest.mark.parametrize("master_weights", [True, False])
def test_weights_loaded_after_construction_are_kept(master_weights):
    loaded = network(dtype=torch.bfloat16)
    model = copy.deepcopy(loaded)
    with torch.no_grad():
        for param in model.values():
            param.mul_(3)
    late = make(model, master_weights=master_weights)
    model.load_state_dict(loaded.state_dict())
    early = make(loaded, master_weights=master_weights)
    for each, optimizer in ((model, late), (loaded, early)):
        train(each, optimizer, range(2))
    assert_same_bits(bits(model), bits(loaded))


def test_without_masters_bf16_takes_the_public_order():
    model, expected = network(dtype=torch.bfloat16), network(dtype=torch.bfloat16)
    optimizer = make(model, master_weights=False)
    momentum = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(5):
        set_gradients(model, gradients(model, step))
        optimizer.step()
        for name, m in momentum.items():
            grad = gradients(expected, step)[name].to(torch.bfloat16).float()
            m.mul_(0.95).add_(grad)
            update = zeropower_via_newtonschulz5(grad + 0.95 * m).to(torch.bfloat16)
            weight = expected[name].detach()
            weight.copy_(weight.float() * (1 - 0.02 * 0.1))
            weight.copy_(weight.float() - 0.02 * 0.2 * max(m.shape) ** 0.5 * update.float())
    assert_same_bits(bits(model), bits(expected), SHAPES)


def test_without_masters_the_rest_is_rounded_after_the_decay_and_after_the_update():
    model, expected = network(dtype=torch.bfloat16), network()
    optimizer = make(model, master_weights=False)
    rest = {name: expected[name] for name in ("vector", "cube")}
    reference = torch.optim.AdamW(rest.values(), **{**OPTIONS, "weight_decay": 0.0}, fused=True)
    for step in range(5):
        grads = {n: g.to(torch.bfloat16).float() for n, g in gradients(model, step).items()}
        set_gradients(model, grads)
        set_gradients(expected, grads)
        for weight in rest.values():
            weight.detach().copy_((weight * (1 - 0.02 * 0.1)).to(torch.bfloat16))
        optimizer.step()
        reference.step()
        for name, weight in rest.items():
            weight.detach().copy_(weight.to(torch.bfloat16))
            assert torch.equal(model[name].float(), weight), name


# What a training loop does


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 7))


def loss_of(model, part=slice(None), step=0):
    inputs = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
    return model(inputs)[part].square().mean()


def test_accumulated_micro_batches_equal_one_batch():
    whole, parts = mlp(), mlp()
    optimizer, accumulating = make(whole, lr=1e-3), make(parts, lr=1e-3)
    for step in range(3):
        loss_of(whole, step=step).backward()
        for k in range(4):
            (loss_of(parts, slice(4 * k, 4 * k + 4), step) / 4).backward()
        for each in (optimizer, accumulating):
            each.step()
            each.zero_grad()
    for left, right in zip(whole.parameters(), parts.parameters(), strict=True):
        assert (left - right).norm() < 1e-6 * left.norm()
    assert accumulating.num_orthogonalized == 3 * 2


def test_closure_runs_with_gradients_and_its_loss_is_returned():
    model, expected = mlp(), mlp()
    optimizer, reference = make(model), make(expected)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    loss_of(expected).backward()
    reference.step()
    loss = optimizer.step(closure)
    assert loss.item() == loss_of(mlp()).item()
    assert_same_bits(bits(model), bits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rate_as_tensor_equals_rate_as_number(dtype):
    rate = torch.tensor(
        0.0213, dtype=dtype
    )  # times 0.2 sqrt(12) its float32 bits depend on the way
    model, expected = network(), network()
    for each in (model, expected):
        for param in each.values():
            nn.init.zeros_(param)  # so that no bit of an update is lost in a sum
    train(model, make(model, lr=rate), range(5))
    train(expected, make(expected, lr=rate.item()), range(5))
    assert_same_bits(bits(model), bits(expected))


SCHEDULES = {
    "lambda": lambda o: LambdaLR(o, lambda step: 0.0 if step == 2 else 1 / (1 + step)),
    "one_cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=5),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=5),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_set_the_rate_of_both_groups_as_of_torch_adamw(schedule):
    model, plain = network(), network()
    optimizer = make(model, muon_lr_scale=3.0, weight_decay=0.0)
    reference = torch.optim.AdamW(plain.values(), lr=OPTIONS["lr"], betas=OPTIONS["betas"])
    schedulers = [SCHEDULES[schedule](each) for each in (optimizer, reference)]
    sizes = []
    for step in range(4):
        before = bits(model)
        train(model, optimizer, [step])
        reference.step()
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == 2 * [reference.param_groups[0]["lr"]]
        sizes.append((model["square"] - before["square"]).norm().item() / (rates[0] or 1))
        for scheduler in schedulers:
            scheduler.step()
    is_off = [size == 0 for size in sizes]
    assert is_off == [schedule == "lambda" and step == 2 for step in range(4)]
    moved = [size for size in sizes if size]
    assert max(moved) < 1.5 * min(moved)  # 3 * 0.2 * sqrt(12) * |orthogonal 12 x 12|


def test_both_ways_to_zero_gradients_train_alike():
    models = {True: mlp(), False: mlp()}
    for set_to_none, model in models.items():
        optimizer = make(model)
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, step=step).backward()
            optimizer.step()
    assert_same_bits(bits(models[True]), bits(models[False]))


def test_compiled_model_has_the_names_and_steps_of_the_plain_one():
    plain, model = mlp(), torch.compile(mlp(), backend="eager")
    optimizer, reference = make(model), make(plain)
    assert [g["param_names"] for g in optimizer.param_groups] == [
        ["0.bias", "2.weight", "2.bias", "3.bias"], ["0.weight", "3.weight"]
    ]  # fmt: skip
    for each, its_optimizer in ((model, optimizer), (plain, reference)):
        loss_of(each).backward()
        its_optimizer.step()
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right)


def test_step_inside_autocast_changes_no_bit():
    model, expected = network(), network()
    optimizer = make(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(model, optimizer, range(3))
    train(expected, make(expected), range(3))
    assert_same_bits(bits(model), bits(expected))


def test_clipping_bounds_what_the_momentum_takes():
    model = network()
    optimizer = make(model)
    set_gradients(model, gradients(model, 0))
    expected = torch.stack([p.grad.norm() for p in model.values()]).norm()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(
        optimizer.state[model["tall"]]["exp_avg"],
        gradients(model, 0)["tall"] * 0.5 / expected,
        rtol=1e-4,
        atol=0,
    )


class NoHostReads(TorchDispatchMode):
    """Fails where the host would wait for a value of the device."""

    FORBIDDEN = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        is_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in self.FORBIDDEN or is_mask:
            raise AssertionError(f"the host reads the device in {func}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "read",
    [torch.Tensor.item, bool, torch.nonzero, lambda x: torch.equal(x, x), lambda x: x[x > 0]],
)
def test_a_host_read_is_noticed(read):
    with NoHostReads(), pytest.raises(AssertionError, match="host reads"):
        read(torch.ones(1))


@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("master_weights", [True, False])
def test_a_step_never_waits_for_the_device(dtype, master_weights, lr):
    model = network(dtype=dtype)
    optimizer = make(model, master_weights=master_weights, lr=lr)
    grads = gradients(model, 0)
    grads["tall"][0, 0] = math.inf
    set_gradients(model, {**grads, "wide": None})
    with NoHostReads():
        optimizer.step()
    assert optimizer.skipped_matrices == 1


class NumbersOnly(TorchDispatchMode):
    """Fails where a kernel, but one that fills, gets a tensor of another device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        devices = {a.device for a in args if isinstance(a, torch.Tensor)}
        if len(devices) > 1 and func.overloadpacket is not torch.ops.aten.fill_:
            raise AssertionError(f"{func} copies from the host")
        return func(*args, **(kwargs or {}))


def test_a_rate_on_the_host_reaches_another_device_as_a_number():
    weight, update = torch.empty(2, 3, 4, device="meta").unbind()
    active, lr = torch.empty((), dtype=torch.bool, device="meta"), torch.tensor(0.1)
    rate = muon_rate(lr, lr_scale=1.0, moonlight_coefficient=0.2, shape=(3, 4))
    with NumbersOnly():
        apply_(weight, update, lr=lr, rate=rate, weight_decay=0.1, active=active)


# What a project does with its parameters


@pytest.mark.parametrize("is_moved", ["weight", "gradient"])
def test_a_gradient_may_lie_otherwise_in_memory_than_its_weight(is_moved):
    shapes = {"matrix": (16, 32), "table": (16, 64), "short": (3, 5)}
    chosen = {"predicate": lambda name, _: name == "matrix"}
    results = []
    for layout in ("same", is_moved):
        model = network(shapes)
        for param in model.values():
            if layout == "weight" and param.ndim == 2:
                param.data = param.data.T.contiguous().T
        grads = gradients(model, 0)
        optimizer = make(model, **chosen)
        for name, param in model.items():
            is_turned = layout == "gradient" and param.ndim == 2
            param.grad = grads[name].T.contiguous().T if is_turned else grads[name]
        optimizer.step()
        results.append(bits(model))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_matrices_of_several_devices_are_planned_apart():
    model = network({"here": (4, 6), "there": (6, 4), "near": (5, 5)})
    model["there"] = nn.Parameter(torch.empty(6, 4, device="meta"))
    plans = make(model).plans
    assert [plan.names for plan in plans] == [("here", "near"), ("there",)]


def exchange(model, optimizer):
    optimizer.param_groups[1]["params"] = [
        nn.Parameter(param.detach().clone()) for param in optimizer.param_groups[1]["params"]
    ]


def cut(model, optimizer):
    model["wide"].data = model["wide"].data[:2]


def add(model, optimizer):
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(3)))]})


@pytest.mark.parametrize("change", [exchange, cut, add])
def test_parameters_that_change_after_construction_are_refused(change):
    model = network()
    optimizer = make(model)
    change(model, optimizer)
    before = bits(model)
    with pytest.raises(ConfigError, match="shard the model first, then make a new MuonAdamW"):
        optimizer.step()
    assert_same_bits(bits(model), before)


def by_shape(muon, matrices):
    """Stacks as on a GPU."""
    for shape in dict.fromkeys(muon.plan.shapes[m] for m in matrices):
        yield [m for m in matrices if muon.plan.shapes[m] == shape]


def test_stacks_of_a_gpu_give_each_matrix_its_own_update_and_verdict(monkeypatch):
    shapes = {f"{name}{k}": shape for name, shape in SHAPES.items() for k in range(3)}
    results = []
    for stacks in (ShardedMuon._stacks, by_shape):
        monkeypatch.setattr(ShardedMuon, "_stacks", stacks)
        model = network(shapes)
        optimizer = make(model)
        for step in range(3):
            grads = gradients(model, step)
            grads["tall1"][0, 0], grads["wide2"] = math.inf, None
            set_gradients(model, grads)
            optimizer.step()
        assert (optimizer.skipped_matrices, optimizer.num_orthogonalized) == (3, 3 * len(shapes))
        results.append(bits(model))
    assert_same_bits(*results)
    start = bits(network(shapes))
    assert_same_bits(results[0], start, ["tall1", "wide2"])
    assert not torch.equal(results[0]["tall0"], start["tall0"])
