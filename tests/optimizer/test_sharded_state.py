"""States of sharded optimizers on disk, and what sharded optimizers refuse."""

import sys
from pathlib import Path

import numpy as np
import pytest
from ranks import fork_ranks

sys.path.insert(0, str(Path(__file__).parent))
import sharded_work
from sharded_work import load_by_name, save_by_name, train
from test_sharded import BLOCKS, mismatches


@pytest.fixture(scope="module")
def uninterrupted():
    return train(0, BLOCKS, "single", 5)[0]


@pytest.fixture(scope="module")
def weights():
    """Whole weights after three steps."""
    return {name: w for name, (_, w, _) in train(0, BLOCKS, "single", 3)[0].items()}


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (("fsdp1", 2), ("fsdp1", 3)),
        (("fsdp1", 3), ("fsdp2", 2)),
        (("fsdp2", 3), ("single", 1)),
        (("single", 1), ("fsdp1", 2)),
        (("ddp", 2), ("tp", 2)),
        (("tp", 2), ("fsdp2", 3)),
        (("hsdp", 4), ("fsdp1:HYBRID_SHARD", 4)),
        (("fsdp1:HYBRID_SHARD", 4), ("ddp", 2)),
    ],
)
def test_a_state_moves_between_engines_and_numbers_of_ranks(
    saver, loader, uninterrupted, weights, tmp_path
):
    folder = tmp_path / "state"
    run(save_by_name, saver, (folder,), tmp_path)
    pieces = run(load_by_name, loader, (folder, weights), tmp_path)
    assert mismatches([piece for piece, _ in pieces], uninterrupted) == (0, 0)


def run(work, engine, arguments, tmp_path):
    name, world_size = engine
    if world_size == 1:
        return [work(0, BLOCKS, name, *arguments)]
    return fork_ranks(work, BLOCKS, name, *arguments, tmp_path=tmp_path, world_size=world_size)


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_a_ranks_own_state_dict_continues_bit_for_bit(engine, uninterrupted, weights, tmp_path):
    pieces = fork_ranks(
        sharded_work.state_dict_round_trip, BLOCKS, engine, weights, tmp_path, tmp_path=tmp_path
    )
    assert mismatches([piece for piece, _ in pieces], uninterrupted) == (0, 0)


def test_fsdp2_works_with_torchs_distributed_checkpoint(uninterrupted, weights, tmp_path):
    folder = tmp_path / "dcp"
    fork_ranks(sharded_work.dcp_save, BLOCKS, folder, tmp_path=tmp_path)
    pieces = fork_ranks(
        sharded_work.dcp_load, BLOCKS, folder, weights, tmp_path=tmp_path, world_size=3
    )
    assert mismatches([piece for piece, _ in pieces], uninterrupted) == (0, 0)


def test_refusals_say_the_same_on_every_rank_and_what_to_do(tmp_path):
    said = fork_ranks(sharded_work.refusals, BLOCKS, tmp_path=tmp_path, world_size=4)
    assert all(of_rank == said[0] for of_rank in said)
    for case, parts in {
        "optim_state_dict": ("save_optimizer_state", "FSDP.optim_state_dict"),
        "dcp of fsdp1": ("save_optimizer_state",),
        "no_sync": ("outside no_sync",),
        "hidden": ("use_orig_params=True",),
        "nothing": ("predicate=is_hidden_matrix",),
        "one rank selects nothing": ("predicate=is_hidden_matrix",),
        "lonely matrix": ("do not agree", "by name"),
        "strided": ("0.layers.2.weight", "Shard"),
        "incomplete": ("cannot be put together", "1000x1000"),
    }.items():
        assert all(part in said[0][case] for part in parts), (case, said[0][case])


def test_marks_are_enough_where_the_sharded_model_is_not_given(tmp_path):
    for (with_model, with_marks), described in fork_ranks(
        sharded_work.marked_parameters, BLOCKS, tmp_path=tmp_path
    ):
        assert "Muon for 6 matrices" in described
        for ours, theirs in zip(with_model, with_marks, strict=True):
            np.testing.assert_array_equal(ours, theirs)
