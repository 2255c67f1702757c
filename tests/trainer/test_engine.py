"""Every engine computes the same, and is what it says it is."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from workers import fork_ranks, small_model, train_two_steps

from opendm.errors import EngineError
from opendm.trainer.engine import Engine, assert_fsdp1, broadcast_from_rank_0, clean_name


@pytest.fixture(scope="module")
def single():
    return train_two_steps(0, "single", 1)


@pytest.mark.parametrize(
    ("name", "checkpointing"), [("ddp", False), ("fsdp1", False), ("fsdp1", True)]
)
def test_loss_gradient_norm_and_weights_agree_with_one_process(
    name, checkpointing, single, tmp_path
):
    results = fork_ranks(train_two_steps, name, 2, checkpointing, tmp_path=tmp_path)
    for record, _, _ in results:
        np.testing.assert_allclose(record, single[0], rtol=1e-5)
    weights = results[0][2]
    assert weights.keys() == single[2].keys()
    for key, value in single[2].items():
        np.testing.assert_allclose(weights[key], value, rtol=0, atol=5e-5, err_msg=key)
    assert results[1][2] == {}


def test_fsdp1_says_strategy_and_units(tmp_path):
    results = fork_ranks(train_two_steps, "fsdp1", 2, tmp_path=tmp_path)
    assert results[0][1] == "FSDP1 SHARD_GRAD_OP x2, 4 units"


def test_ranks_that_start_from_other_weights_get_rank_0s(single, tmp_path):
    def work(rank):
        return train_two_steps(rank, "fsdp1", 2, seed=rank)[0]

    for record in fork_ranks(work, tmp_path=tmp_path):
        np.testing.assert_allclose(record, single[0], rtol=1e-5)


def test_bf16_engines_agree_within_bfloat16(tmp_path):
    one = train_two_steps(0, "single", 1, compute_dtype=torch.bfloat16)[0]
    for name in ("ddp", "fsdp1"):
        two = fork_ranks(train_two_steps, name, 2, False, torch.bfloat16, tmp_path=tmp_path)[0][0]
        difference = np.abs(np.array(two) / np.array(one) - 1).max()
        print(f"bf16_mixed, {name} x2 against one process: {difference:.1e} relative")
        assert difference < 2e-2


def test_torchs_own_synchronisation_still_refuses_cpu_modules(tmp_path):
    """When this fails, ``broadcast_from_rank_0`` can go."""

    def work(_rank):
        try:
            FullyShardedDataParallel(
                small_model(), device_id=torch.device("cpu"), sync_module_states=True
            )
        except ValueError as error:
            return str(error)
        return "accepted"

    assert "sync_module_states=True" in fork_ranks(work, tmp_path=tmp_path)[0]


def test_broadcast_from_rank_0_overwrites_the_other_ranks(tmp_path):
    def work(rank):
        model = small_model(seed=rank)
        broadcast_from_rank_0(model)
        return model.model.action_in_proj.weight.sum().item()

    first, second = fork_ranks(work, tmp_path=tmp_path)
    assert first == second


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_another_sharding_strategy_is_an_error(strategy, tmp_path):
    def work(_rank):
        model = FullyShardedDataParallel(
            torch.nn.Linear(4, 4),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy[strategy],
        )
        try:
            assert_fsdp1(model, num_units=1)
        except EngineError as error:
            return str(error)
        return "accepted"

    assert strategy in fork_ranks(work, tmp_path=tmp_path)[0]


def test_a_missing_unit_is_an_error(tmp_path):
    def work(_rank):
        model = FullyShardedDataParallel(
            torch.nn.Linear(4, 4),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        )
        try:
            assert_fsdp1(model, num_units=2)
        except EngineError as error:
            return str(error)
        return "accepted"

    assert fork_ranks(work, tmp_path=tmp_path)[0] == "asked for 2 FSDP units and got 1"


def test_asking_for_fsdp_and_getting_a_plain_module_is_an_error():
    with pytest.raises(EngineError, match="asked for fsdp1 and got Linear"):
        Engine("fsdp1", torch.device("cpu"), None).assert_got(torch.nn.Linear(2, 2))


def test_torchs_own_clipping_sees_one_ranks_shards_only(tmp_path):
    """When this fails, ``Engine.clip_grad_norm`` can go."""

    def work(rank):
        model = FullyShardedDataParallel(
            torch.nn.Linear(64, 64),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            use_orig_params=True,
        )
        model(torch.ones(1, 64) * (1 + rank)).pow(2).sum().backward()
        own = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        whole = Engine("fsdp1", torch.device("cpu"), None).clip_grad_norm(model, float("inf"))
        squares = own.clone().square()
        dist.all_reduce(squares)
        return float(own), float(whole), float(squares.sqrt())

    for own, whole, expected in fork_ranks(work, tmp_path=tmp_path):
        assert whole == pytest.approx(expected, rel=1e-5)
        assert own < 0.99 * whole


def test_clean_name_removes_what_wrappers_add():
    name = "module._fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.weight"
    assert clean_name(name) == "model.layers.0.weight"
