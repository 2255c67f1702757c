"""Sharded steps are, bit for bit, the steps of one process; each matrix is orthogonalised once."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import fork_ranks

sys.path.insert(0, str(Path(__file__).parent))
import sharded_work
from sharded_work import train, train_cases

BLOCKS = (((9, 5), (6, 11), (16, 16), (1, 12)), ((13, 7), (12, 12)))
NUM_MATRICES = 6
ENGINES = {
    2: ["ddp", "fsdp1", "fsdp1:FULL_SHARD", "fsdp1:NO_SHARD", "fsdp2", "tp"],
    3: ["ddp", "fsdp1", "fsdp2", "tp"],
    4: ["ddp", "fsdp1", "fsdp1:HYBRID_SHARD", "fsdp2", "hsdp", "tp"],
}
CASES = [(world, engine) for world, engines in ENGINES.items() for engine in engines]


def mismatches(pieces_by_rank, reference):
    """Elements of weights and momenta that differ, and elements nobody holds."""
    differing, held = 0, {name: np.zeros(w.size, bool) for name, (_, w, _) in reference.items()}
    for pieces in pieces_by_rank:
        for name, (positions, weight, momentum) in pieces.items():
            _, whole_weight, whole_momentum = reference[name]
            differing += (whole_weight.reshape(-1)[positions] != weight).sum()
            differing += (whole_momentum.reshape(-1)[positions] != momentum).sum()
            held[name][positions.reshape(-1)] = True
    return differing, sum((~mask).sum() for mask in held.values())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Results of 20 steps by ranks of every engine; one set of processes for each world size."""
    results = {}
    for world, engines in ENGINES.items():
        cases = [
            {"args": (BLOCKS, engine), "options": {"scenario": "faults"}} for engine in engines
        ]
        ranks = fork_ranks(
            train_cases, cases, tmp_path=tmp_path_factory.mktemp("ranks"), world_size=world
        )
        for index, engine in enumerate(engines):
            results[world, engine] = [rank[index] for rank in ranks]
    return results


@pytest.fixture(scope="module")
def reference():
    return train(0, BLOCKS, "single", scenario="faults")


@pytest.mark.parametrize(("world", "engine"), CASES)
def test_twenty_steps_are_bit_equal_to_one_process(world, engine, plain, reference):
    pieces = [pieces for pieces, _ in plain[world, engine]]
    assert mismatches(pieces, reference[0]) == (0, 0)
    assert all(c["skipped"] == reference[1]["skipped"] == 4 for _, c in plain[world, engine])


@pytest.mark.parametrize(("world", "engine"), CASES)
def test_each_matrix_is_orthogonalised_once_in_the_job(world, engine, plain):
    counters = [counters for _, counters in plain[world, engine]]
    assert sum(c["orthogonalized"] for c in counters) == 20 * NUM_MATRICES


@pytest.mark.parametrize(("world", "engine"), CASES)
def test_a_step_makes_two_collectives_a_bucket_no_group_and_no_host_read(world, engine, plain):
    for _, counters in plain[world, engine]:
        assert counters["plans"] == 1
        assert counters["collectives"] <= 20 * 2 * counters["buckets"]
        assert counters["other_collectives"] == []
        assert counters["host_reads"] == []
        assert counters["groups_added"] == 0


def test_the_counters_see_what_they_count():
    with sharded_work.Counter() as counted:
        torch.ones(1).item()
        bool(torch.ones(1).equal(torch.ones(1)))
    assert counted.host_reads


@pytest.mark.parametrize("world", [2, 3, 4])
def test_flat_shards_cut_in_mid_row_and_leave_ranks_without_a_piece(world, plain):
    counters = plain[world, "fsdp1"][0][1]
    cut_in_mid_row = [
        (rows, cols)
        for matrix, (rows, cols) in enumerate(counters["shapes"])
        for start, stop in (row[matrix] for row in counters["intervals"])
        if 0 < stop < rows * cols and stop % cols
    ]
    assert cut_in_mid_row
    assert any((0, 0) in row for row in counters["intervals"])


def test_some_rank_holds_no_piece_at_all(tmp_path):
    blocks = (((2, 2),),)  # four elements of a unit of twenty
    ranks = fork_ranks(train, blocks, "fsdp1", 3, tmp_path=tmp_path, world_size=4)
    intervals = ranks[0][1]["intervals"]
    assert any(all(start == stop for start, stop in row) for row in intervals)
    assert mismatches([r[0] for r in ranks], train(0, blocks, "single", 3)[0]) == (0, 0)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_shapes_are_bit_equal_under_any_sharding(world, tmp_path):
    chooser = random.Random(world)
    cases = []
    for _ in range(8):
        blocks = tuple(
            tuple((chooser.randint(1, 24), chooser.randint(1, 24)) for _ in range(3))
            for _ in range(chooser.randint(1, 3))
        )
        engine = chooser.choice(ENGINES[world])
        options = {"num_steps": 2, "bucket_bytes": chooser.choice([1, 2000, 1 << 20])}
        cases.append({"args": (blocks, engine), "options": options})
    ranks = fork_ranks(train_cases, cases, tmp_path=tmp_path, world_size=world)
    for index, case in enumerate(cases):
        single = train(0, case["args"][0], "single", 2)
        assert mismatches([rank[index][0] for rank in ranks], single[0]) == (0, 0), case


def test_small_buckets_change_nothing(tmp_path, reference):
    cases = [
        {"args": (BLOCKS, engine), "options": {"scenario": "faults", "bucket_bytes": 1}}
        for engine in ("fsdp2", "ddp")
    ]
    ranks = fork_ranks(train_cases, cases, tmp_path=tmp_path)
    for index in range(len(cases)):
        assert mismatches([rank[index][0] for rank in ranks], reference[0]) == (0, 0)
        counters = ranks[0][index][1]
        assert counters["buckets"] >= NUM_MATRICES - 1  # (1, 12) has one row and moves nowhere
        assert counters["collectives"] <= 20 * 2 * NUM_MATRICES


@pytest.mark.parametrize("masters", [True, False])
def test_bfloat16_weights_are_bit_equal_too(masters, tmp_path):
    options = {"num_steps": 6, "dtype": torch.bfloat16, "master_weights": masters}
    cases = [
        {"args": (BLOCKS, engine), "options": options} for engine in ("ddp", "fsdp1", "fsdp2", "tp")
    ]
    ranks = fork_ranks(train_cases, cases, tmp_path=tmp_path)
    single = train(0, BLOCKS, "single", **options)
    for index in range(len(cases)):
        assert mismatches([rank[index][0] for rank in ranks], single[0]) == (0, 0)


def test_a_gradient_that_only_some_ranks_have_counts_as_zero_on_the_others(tmp_path):
    cases = [
        {"args": (BLOCKS, engine), "options": {"scenario": "lonely", "num_steps": 6}}
        for engine in ("fsdp1", "fsdp2")
    ]
    ranks = fork_ranks(train_cases, cases, tmp_path=tmp_path)
    for index in range(len(cases)):
        pieces = [rank[index][0] for rank in ranks]

        def seen(name, step, grad, pieces=pieces):
            """The whole gradient with zeros where a rank did not have it; None if nobody had."""
            positions = [p[name][0].reshape(-1) for p in pieces]
            blind = [not sharded_work.sees(name, step, "lonely", rank) for rank in range(2)]
            if all(b for b, held in zip(blind, positions, strict=True) if held.size):
                return None
            for is_blind, held in zip(blind, positions, strict=True):
                if is_blind:
                    grad[torch.from_numpy(held)] = 0
            return grad

        single = train(0, BLOCKS, "single", 6, grad_of=seen)
        assert mismatches(pieces, single[0]) == (0, 0)


def test_shards_that_muon_refuses_are_left_to_adamw(tmp_path):
    options = {"num_steps": 3, "predicate": sharded_work.is_plainly_cut_matrix}
    cases = [{"args": (BLOCKS, "fsdp2 and tp"), "options": options}]
    ranks = fork_ranks(train_cases, cases, tmp_path=tmp_path, world_size=4)
    single = train(0, BLOCKS, "single", **options)
    assert mismatches([rank[0][0] for rank in ranks], single[0]) == (0, 0)


def test_hybrid_ranks_end_with_the_same_weights(plain):
    for engine in ("fsdp1:HYBRID_SHARD", "hsdp", "ddp"):
        by_positions = {}
        for pieces, _ in plain[4, engine]:
            for name, (positions, weight, _) in pieces.items():
                key = (name, positions.tobytes())
                assert np.array_equal(by_positions.setdefault(key, weight), weight)
