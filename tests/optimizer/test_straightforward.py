"""The plain implementation that the speed of MuonAdamW is compared with does what it says."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import fork_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "optimizer"))

from straightforward import StraightforwardMuonAdamW, matrix_shapes

STEPS = 3
OPTIONS = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def small_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5), nn.Linear(5, 5)).to(dtype)


def is_matrix(name, param):
    return name.endswith("weight") and not name.startswith("2.")


def gradients(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(param.shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, param in small_model().named_parameters()
    }


def independent_loop():
    """Both update rules by scalars, power series of the singular values and float64."""
    values = {name: p.detach().double() for name, p in small_model().named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in values.items()}
    second = {name: torch.zeros_like(value) for name, value in values.items()}
    for step in range(1, STEPS + 1):
        for name, grad in gradients(step, torch.float64).items():
            decayed = values[name] * (1 - 0.05 * 0.1)
            if is_matrix(name, None):
                first[name] = 0.95 * first[name] + grad
                u, sigma, v = torch.linalg.svd(grad + 0.95 * first[name], full_matrices=False)
                sigma = sigma / sigma.square().sum().sqrt()
                for _ in range(5):
                    sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
                update = 0.2 * max(grad.shape) ** 0.5 * (u @ torch.diag(sigma) @ v)
            else:
                first[name] = 0.9 * first[name] + 0.1 * grad
                second[name] = 0.95 * second[name] + 0.05 * grad * grad
                mean, square = first[name] / (1 - 0.9**step), second[name] / (1 - 0.95**step)
                update = mean / (square.sqrt() + 1e-8)
            values[name] = decayed - 0.05 * update
    return values


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_one_process_equals_an_independent_loop_on_singular_values(dtype, tolerance):
    model = small_model(dtype)
    optimizer = StraightforwardMuonAdamW(
        model.named_parameters(), matrix_shapes(model, is_matrix), **OPTIONS
    )
    for step in range(1, STEPS + 1):
        for name, grad in gradients(step, dtype).items():
            model.get_parameter(name).grad = grad
        optimizer.step()
    for name, expected in independent_loop().items():
        difference = (model.get_parameter(name).double() - expected).norm() / expected.norm()
        assert difference < tolerance, name


def wrap(model, engine):
    if engine == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return FullyShardedDataParallel(
        model,
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=torch.device("cpu"),
    )


def train_one_rank(rank, engine):
    """Give each rank its slice of the gradients through a real backward pass."""
    model = small_model()
    shapes = matrix_shapes(model, is_matrix)
    model = wrap(model, engine)
    optimizer = StraightforwardMuonAdamW(model.named_parameters(), shapes, **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(inputs(step)).square().sum().backward()
        optimizer.step()
    if engine == "fsdp2":
        result = {name: param.full_tensor() for name, param in model.named_parameters()}
    else:
        with FullyShardedDataParallel.summon_full_params(model):
            result = {name: param.clone() for name, param in model.named_parameters()}
    return {name: param.detach().numpy() for name, param in result.items()}


def inputs(step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 + step))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_sharded_equals_one_process(engine, world_size, tmp_path):
    model = small_model()
    optimizer = StraightforwardMuonAdamW(
        model.named_parameters(), matrix_shapes(model, is_matrix), **OPTIONS
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        model(inputs(step)).square().sum().backward()
        optimizer.step()

    for result in fork_ranks(train_one_rank, engine, tmp_path=tmp_path, world_size=world_size):
        for name, expected in model.named_parameters():
            whole = torch.from_numpy(result[name])
            torch.testing.assert_close(whole, expected.detach(), rtol=1e-4, atol=1e-5)
