"""Every engine computes the same, and is what it says it is."""

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import fsdp

from opendm.errors import ConfigError, EngineError
from opendm.trainer.engine import Engine, clean_name, fsdp_engine

sys.path.insert(0, str(Path(__file__).parent))
import workers
from ranks import fork_ranks
from workers import Case, train_two_steps

SINGLE = [
    Case("single", accumulation=2),
    Case("single", accumulation=4, checkpointing=True),
]
TWO = [
    Case("ddp"),
    Case("ddp", accumulation=2, checkpointing=True),
    Case("fsdp1"),
    Case("fsdp1", "full_shard", "per_layer", checkpointing=True),
    Case("fsdp1", preset="per_layer", accumulation=4),
    Case("fsdp1", "full_shard"),
    Case("fsdp2"),
    Case("fsdp2", "full_shard", "per_layer", checkpointing=True),
    Case("fsdp2", preset="per_layer", accumulation=4),
    Case("fsdp2", "full_shard"),
]
FOUR = [
    Case("fsdp1"),
    Case("fsdp1", "hybrid_shard", "per_layer", accumulation=2),
    Case("fsdp2", "hybrid_shard", "per_layer", accumulation=2),
]
MUON_TWO = [Case(name, optim="muon_adamw") for name in ("ddp", "fsdp1", "fsdp2")]
MUON_FOUR = [Case(name, "hybrid_shard", optim="muon_adamw") for name in ("fsdp1", "fsdp2")]
HALF = [
    Case(name, policy=policy)
    for policy in ("bf16_mixed", "fp32_mixed")
    for name in ("ddp", "fsdp1", "fsdp2")
]


def label(case):
    return "-".join(str(value) for value in (
        case.name, case.strategy, case.preset, case.checkpointing, case.accumulation, case.policy,
        case.optim,
    ) if value)  # fmt: skip


@pytest.fixture(scope="module")
def single():
    return train_two_steps(Case("single"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Outcomes by (number of ranks, case), a list over ranks."""
    found = {(1, case): [train_two_steps(case)] for case in SINGLE}
    for world_size, cases in ((2, TWO + MUON_TWO + HALF), (4, FOUR + MUON_FOUR)):
        folder = tmp_path_factory.mktemp("ranks")
        by_rank = fork_ranks(
            workers.train_cases, world_size, cases, tmp_path=folder, world_size=world_size
        )
        found |= {(world_size, case): [rank[case] for rank in by_rank] for case in cases}
    return found


def runs(*groups):
    return [
        pytest.param(world_size, case, id=f"x{world_size}-{label(case)}")
        for world_size, cases in groups
        for case in cases
    ]


def assert_agrees(by_rank, single):
    for outcome in by_rank:
        np.testing.assert_allclose(outcome.record, single.record, rtol=1e-5)
    weights = by_rank[0].weights
    assert weights.keys() == single.weights.keys()
    for key, value in single.weights.items():
        np.testing.assert_allclose(weights[key], value, rtol=0, atol=5e-5, err_msg=key)
    assert all(outcome.weights == {} for outcome in by_rank[1:])


@pytest.mark.parametrize(("world_size", "case"), runs((1, SINGLE), (2, TWO), (4, FOUR)))
def test_loss_gradient_norm_and_weights_agree_with_one_process(world_size, case, single, outcomes):
    assert_agrees(outcomes[world_size, case], single)


@pytest.mark.parametrize(("world_size", "case"), runs((2, MUON_TWO), (4, MUON_FOUR)))
def test_muon_agrees_with_one_process(world_size, case, outcomes):
    assert_agrees(outcomes[world_size, case], train_two_steps(Case("single", optim="muon_adamw")))


@pytest.mark.parametrize("policy", ["bf16_mixed", "fp32_mixed"])
def test_engines_agree_within_bfloat16_under_both_policies(policy, outcomes):
    one = np.array(train_two_steps(Case("single", policy=policy)).record)
    for name in ("ddp", "fsdp1", "fsdp2"):
        two = np.array(outcomes[2, Case(name, policy=policy)][0].record)
        loss, norm = np.abs(two / one - 1).max(0)
        print(f"{policy}, {name} x2 against one process: loss {loss:.1e}, norm {norm:.1e} relative")
        assert max(loss, norm) < 2e-2


@pytest.mark.parametrize(("world_size", "case"), runs((2, TWO), (4, FOUR)))
def test_only_shards_of_gradients_are_kept_between_micro_batches(world_size, case, outcomes):
    whole = outcomes[2, Case("ddp")][0].num_grad_elements
    shards = {"ddp": 1, "fsdp1": world_size, "fsdp2": world_size}[case.name]
    if case.strategy == "hybrid_shard":
        shards = case.engine.ranks_per_node
    held = [outcome.num_grad_elements for outcome in outcomes[world_size, case]]
    assert sum(held) == whole * world_size // shards
    assert max(held) <= 1.2 * whole / shards


@pytest.mark.parametrize(("world_size", "case"), runs((2, TWO[2:]), (4, FOUR)))
def test_only_shard_grad_op_keeps_gathered_weights_for_the_backward_pass(
    world_size, case, outcomes
):
    num_units = {"published": 4, "per_layer": 7}[case.preset]
    kept = num_units if case.strategy == "shard_grad_op" else 1  # of the root
    assert outcomes[world_size, case][0].num_gathered == kept


@pytest.mark.parametrize(("world_size", "case"), runs((2, TWO), (4, FOUR)))
def test_no_engine_warns(world_size, case, outcomes):
    assert outcomes[world_size, case][0].warnings == []


def test_engines_say_strategy_and_units(outcomes):
    said = {
        "DDP x2": (2, Case("ddp")),
        "FSDP1 SHARD_GRAD_OP x2, 4 units": (2, Case("fsdp1")),
        "FSDP2 SHARD_GRAD_OP x2, 4 units": (2, Case("fsdp2")),
        "FSDP1 FULL_SHARD x2, 7 units": (2, TWO[3]),
        "FSDP2 FULL_SHARD x2, 7 units": (2, TWO[7]),
        "FSDP1 HYBRID_SHARD x4, 7 units, 2 copies": (4, FOUR[1]),
        "FSDP2 HYBRID_SHARD x4, 7 units, 2 copies": (4, FOUR[2]),
    }
    for text, run in said.items():
        assert outcomes[run][0].description == text


def test_ranks_that_start_from_other_weights_get_rank_0s(single, tmp_path):
    for records in fork_ranks(workers.train_from_own_seed, tmp_path=tmp_path):
        for record in records:
            np.testing.assert_allclose(record, single.record, rtol=1e-5)


def test_weights_that_change_after_an_evaluation_count(tmp_path):
    """The stale halves say what ``free_gathered`` is for: when they fail, it can go."""
    for found in fork_ranks(workers.changes, tmp_path=tmp_path):
        for (_, free), (before, after, expected) in found.items():
            assert after == pytest.approx(expected if free else before, rel=1e-5)
            assert abs(expected / before - 1) > 1e-3


def test_fsdp2_averages_gradients_over_ranks(tmp_path):
    """It summed them under gloo once: https://github.com/pytorch/pytorch/issues/162344."""
    for gradient in fork_ranks(workers.mean_gradient, tmp_path=tmp_path):
        assert gradient == [[1.5] * 3] * 2


def test_torchs_own_synchronisation_still_refuses_cpu_modules(tmp_path):
    """When this fails, FSDP1 could do what ``materialize`` does."""
    message = fork_ranks(workers.synchronise_by_torch, tmp_path=tmp_path)[0]
    assert "sync_module_states=True" in message


def test_another_strategy_or_a_missing_unit_is_an_error(tmp_path):
    said = {
        ("fsdp1", "FULL_SHARD", 1): "asked for SHARD_GRAD_OP and got FULL_SHARD",
        ("fsdp1", "NO_SHARD", 1): "asked for SHARD_GRAD_OP and got NO_SHARD",
        ("fsdp2", "FULL_SHARD", 1): "asked for SHARD_GRAD_OP and got FULL_SHARD",
        ("fsdp1", "SHARD_GRAD_OP", 2): "asked for 2 FSDP units and got 1",
        ("fsdp2", "SHARD_GRAD_OP", 2): "asked for 2 FSDP units and got 1",
    }
    accepted = [("fsdp1", "SHARD_GRAD_OP", 1), ("fsdp2", "SHARD_GRAD_OP", 1)]
    results = fork_ranks(workers.check_assertions, [*said, *accepted], tmp_path=tmp_path)
    assert results == [said, said]


@pytest.mark.parametrize("name", ["ddp", "fsdp1", "fsdp2"])
def test_asking_for_an_engine_and_getting_a_plain_module_is_an_error(name):
    with pytest.raises(EngineError, match=f"asked for {name} and got single \\(Linear\\)"):
        Engine(name, torch.device("cpu"), None).assert_got(torch.nn.Linear(2, 2))


def test_torchs_own_clipping_sees_one_ranks_shards_only(tmp_path):
    """When the FSDP1 half fails, FSDP1's branch of ``Engine.clip_grad_norm`` can go."""
    for found in fork_ranks(workers.gradient_norms, tmp_path=tmp_path):
        for name, (own, whole, expected) in found.items():
            assert whole == pytest.approx(expected, rel=1e-5)
            assert name == "fsdp2" or own < 0.99 * whole


@pytest.mark.parametrize(("ranks_per_node", "world_size"), [(1, 4), (3, 4), (8, 4)])
def test_hybrid_needs_nodes_of_equal_size_and_more_than_one_rank(
    ranks_per_node, world_size, monkeypatch
):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    engine = Engine(
        "fsdp2", torch.device("cpu"), None, strategy="hybrid_shard", ranks_per_node=ranks_per_node
    )
    with pytest.raises(ConfigError, match=f"nodes of {ranks_per_node} of 4 processes"):
        engine.wrap(torch.nn.Linear(2, 2), [])


def test_fsdp2_takes_over_where_torch_has_no_fsdp1(monkeypatch, caplog):
    assert (fsdp_engine(1), fsdp_engine(2)) == ("fsdp1", "fsdp2")
    monkeypatch.delattr(fsdp, "FullyShardedDataParallel")
    with caplog.at_level(logging.WARNING):
        assert fsdp_engine(1) == "fsdp2"
    assert caplog.messages == ["the installed torch has no FSDP1 any more; FSDP2 takes over"]


def test_fsdp2_runs_without_fsdp1(single, tmp_path):
    for record in fork_ranks(workers.train_without_fsdp1, tmp_path=tmp_path):
        np.testing.assert_allclose(record, single.record, rtol=1e-5)


def test_clean_name_removes_what_wrappers_add():
    name = "module._fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.weight"
    assert clean_name(name) == "model.layers.0.weight"
