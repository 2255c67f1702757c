"""Every engine computes the same, and is what it says it is."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from opendm.errors import EngineError
from opendm.trainer.engine import Engine, clean_name

sys.path.insert(0, str(Path(__file__).parent))
import workers
from ranks import fork_ranks
from workers import train_two_steps


@pytest.fixture(scope="module")
def single():
    return train_two_steps(0, "single", 1)


def assert_agrees(results, single):
    for record, _, _ in results:
        np.testing.assert_allclose(record, single[0], rtol=1e-5)
    weights = results[0][2]
    assert weights.keys() == single[2].keys()
    for key, value in single[2].items():
        np.testing.assert_allclose(weights[key], value, rtol=0, atol=5e-5, err_msg=key)
    assert results[1][2] == {}


@pytest.mark.parametrize(
    ("name", "checkpointing"), [("ddp", False), ("fsdp1", False), ("fsdp1", True)]
)
def test_loss_gradient_norm_and_weights_agree_with_one_process(
    name, checkpointing, single, tmp_path
):
    assert_agrees(fork_ranks(train_two_steps, name, 2, checkpointing, tmp_path=tmp_path), single)


@pytest.mark.parametrize("name", ["ddp", "fsdp1"])
def test_muon_agrees_with_one_process(name, tmp_path):
    options = (False, None, 0, "muon_adamw")
    single = train_two_steps(0, "single", 1, *options)
    assert_agrees(fork_ranks(train_two_steps, name, 2, *options, tmp_path=tmp_path), single)


def test_fsdp1_says_strategy_and_units(tmp_path):
    results = fork_ranks(train_two_steps, "fsdp1", 2, tmp_path=tmp_path)
    assert results[0][1] == "FSDP1 SHARD_GRAD_OP x2, 4 units"


def test_ranks_that_start_from_other_weights_get_rank_0s(single, tmp_path):
    for record in fork_ranks(workers.train_from_own_seed, tmp_path=tmp_path):
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
    message = fork_ranks(workers.synchronise_by_torch, tmp_path=tmp_path)[0]
    assert "sync_module_states=True" in message


def test_broadcast_from_rank_0_overwrites_the_other_ranks(tmp_path):
    first, second = fork_ranks(workers.broadcast, tmp_path=tmp_path)
    assert first == second


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_another_sharding_strategy_is_an_error(strategy, tmp_path):
    results = fork_ranks(workers.check_assertion, strategy, 1, tmp_path=tmp_path)
    assert all(strategy in message for message in results)


def test_a_missing_unit_is_an_error(tmp_path):
    results = fork_ranks(workers.check_assertion, "SHARD_GRAD_OP", 2, tmp_path=tmp_path)
    assert results == ["asked for 2 FSDP units and got 1"] * 2
    assert fork_ranks(workers.check_assertion, "SHARD_GRAD_OP", 1, tmp_path=tmp_path)[0] == (
        "accepted"
    )


def test_asking_for_fsdp_and_getting_a_plain_module_is_an_error():
    with pytest.raises(EngineError, match="asked for fsdp1 and got Linear"):
        Engine("fsdp1", torch.device("cpu"), None).assert_got(torch.nn.Linear(2, 2))


def test_torchs_own_clipping_sees_one_ranks_shards_only(tmp_path):
    """When this fails, ``Engine.clip_grad_norm`` can go."""
    for own, whole, expected in fork_ranks(workers.gradient_norms, tmp_path=tmp_path):
        assert whole == pytest.approx(expected, rel=1e-5)
        assert own < 0.99 * whole


def test_clean_name_removes_what_wrappers_add():
    name = "module._fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.weight"
    assert clean_name(name) == "model.layers.0.weight"
