import itertools
import random
import time

import pytest

from opendm.errors import ConfigError
from opendm.optimizer.balance import largest_holder, longest_processing_time, repaired
from opendm.optimizer.newton_schulz import orthogonalization_flops
from opendm.optimizer.shard_plan import Costs, MuonShardPlan

FAST_LINK = Costs(flops_per_s=1.0, bytes_per_s=1e30)
SLOW_LINK = Costs(flops_per_s=1e30, bytes_per_s=1.0)
COSTS = Costs(flops_per_s=5e13, bytes_per_s=5e10)
LAYER = [(2048, 1024), *[(1024, 1024)] * 2, (1024, 2048), *[(4096, 1024)] * 2, (1024, 4096)]


# Ways to cut


def cut(numel, start, stop):
    start, stop = min(max(start, 0), numel), min(max(stop, 0), numel)
    return (start, stop) if start < stop else (0, 0)


def flat(shapes, num_ranks, before=0, after=0):
    """FSDP1: concatenated with other parameters around it, padded, cut into equal pieces."""
    sizes = [rows * cols for rows, cols in shapes]
    piece = -(-(before + sum(sizes) + after) // num_ranks)
    offsets = [before, *(before + total for total in itertools.accumulate(sizes))]
    return [
        [
            cut(size, rank * piece - offset, (rank + 1) * piece - offset)
            for offset, size in zip(offsets, sizes, strict=False)
        ]
        for rank in range(num_ranks)
    ]


def by_rows(shapes, num_ranks):
    """FSDP2: rows as torch.chunk cuts them."""
    return [
        [
            cut(rows * cols, rank * piece * cols, (rank + 1) * piece * cols)
            for rows, cols in shapes
            for piece in [-(-rows // num_ranks)]
        ]
        for rank in range(num_ranks)
    ]


def replicated(shapes, num_ranks):
    return [[(0, rows * cols) for rows, cols in shapes] for _ in range(num_ranks)]


def random_layout(rng, shapes):
    """Intervals and what kind they are."""
    num_ranks = rng.choice([1, 2, 3, 4, 5, 8])
    kind = rng.choice(["flat", "padded flat", "rows", "replicated", "hybrid", "hybrid rows"])
    total = sum(rows * cols for rows, cols in shapes)
    if kind == "flat":
        return kind, flat(shapes, num_ranks)
    if kind == "padded flat":
        around = (rng.randrange(2 * total), rng.randrange(2 * total))
        return kind, flat(shapes, num_ranks, *around)
    if kind == "rows":
        return kind, by_rows(shapes, num_ranks)
    if kind == "replicated":
        return kind, replicated(shapes, num_ranks)
    shards = (flat if kind == "hybrid" else by_rows)(shapes, num_ranks)
    return kind, shards * 2


def random_shapes(rng, most=14):
    side = [1, 2, 3, 5, 8, 16, 30]
    return [(rng.choice(side), rng.choice(side)) for _ in range(rng.randint(1, most))]


def build(shapes, intervals, costs=COSTS, **options):
    names = [f"layers.{i}.weight" for i in range(len(shapes))]
    return MuonShardPlan.build(names, shapes, intervals, costs=costs, **options)


def random_plans(count, **options):
    for seed in range(count):
        rng = random.Random(seed)
        shapes = random_shapes(rng)
        kind, intervals = random_layout(rng, shapes)
        costs = rng.choice([COSTS, FAST_LINK, SLOW_LINK])
        yield kind, shapes, intervals, build(shapes, intervals, costs, **options)


def test_the_random_layouts_contain_the_hard_cases():
    mid_row = empty_rank = empty_piece = several_holders = 0
    for _, shapes, intervals, _ in random_plans(200):
        for row in intervals:
            empty_rank += not any(stop for _, stop in row)
            empty_piece += (0, 0) in row and any(stop for _, stop in row)
            mid_row += any(start % c for (_, c), (start, _) in zip(shapes, row, strict=True))
        several_holders += any(
            len({piece for piece in column if piece[1]}) > 2
            for column in zip(*intervals, strict=True)
        )
    assert min(mid_row, empty_rank, empty_piece, several_holders) > 20


# Exchange


def test_sources_bring_the_owner_every_element_and_destinations_bring_every_holder_its_update():
    for _, shapes, intervals, plan in random_plans(150):
        for matrix, (rows, cols) in enumerate(shapes):
            owner = plan.owners[matrix]
            arrived = [*range(*intervals[owner][matrix])]
            for rank, (start, stop) in plan.sources(matrix):
                assert rank != owner
                assert (start, stop) == intervals[rank][matrix]
                arrived += range(start, stop)
            assert sorted(arrived) == list(range(rows * cols))
            updated = dict(plan.destinations(matrix))
            assert len(updated) == len(plan.destinations(matrix))
            assert owner not in updated
            for rank, row in enumerate(intervals):
                if rank != owner:
                    assert updated.get(rank, (0, 0)) == row[matrix]
            assert plan.is_local(matrix) == (not plan.sources(matrix) and not updated)


def test_a_piece_comes_from_the_replica_nearest_to_the_owner():
    for kind, _, intervals, plan in random_plans(100):
        if not kind.startswith("hybrid"):
            continue
        for matrix, owner in enumerate(plan.owners):
            for source, piece in plan.sources(matrix):
                holders = [r for r, row in enumerate(intervals) if row[matrix] == piece]
                assert abs(source - owner) == min(abs(r - owner) for r in holders)


def test_sent_and_received_bytes_are_those_of_the_pieces():
    for _, shapes, intervals, plan in random_plans(100):
        full = sum(rows * cols for rows, cols in shapes)
        held = sum(stop - start for row in intervals for start, stop in row)
        by_owners = sum(
            intervals[owner][matrix][1] - intervals[owner][matrix][0]
            for matrix, owner in enumerate(plan.owners)
        )
        expected = 4 * (full - by_owners) + 4 * (held - by_owners)
        assert sum(plan.sent_bytes()) == sum(plan.received_bytes()) == expected


def test_bytes_of_a_cut_matrix_by_rank():
    plan = build([(3, 4)], [[(0, 2)], [(2, 11)], [(11, 12)]])
    assert plan.owners == (1,)
    assert plan.sent_bytes() == (8, 12, 4)
    assert plan.received_bytes() == (8, 12, 4)
    seconds = orthogonalization_flops(3, 4, steps=5) / 2 + 12 / 3
    assert plan.modelled_seconds(Costs(2.0, 3.0)) == pytest.approx(seconds)


def test_replicas_send_nothing_to_the_owner():
    plan = build(LAYER * 3, replicated(LAYER * 3, 4))
    assert not any(plan.sources(matrix) for matrix in range(len(LAYER * 3)))
    elements = sum(rows * cols for rows, cols in LAYER * 3)
    assert sum(plan.sent_bytes()) == 4 * 3 * elements


def test_one_rank_keeps_everything_to_itself():
    shapes = LAYER * 2
    plan = build(shapes, replicated(shapes, 1))
    assert all(map(plan.is_local, range(len(shapes))))
    assert (plan.sent_bytes(), plan.received_bytes(), len(plan.buckets)) == ((0,), (0,), 1)
    assert plan.work() == (sum(orthogonalization_flops(*shape, steps=5) for shape in shapes),)


def test_no_matrices_make_no_buckets():
    plan = build([], [[], []])
    assert (plan.owners, plan.buckets, plan.work()) == ((), (), (0, 0))


# Balance


def assignments(num_matrices, num_ranks):
    return itertools.product(range(num_ranks), repeat=num_matrices)


def busiest(owners, work, num_ranks):
    return max(
        sum(w for w, owner in zip(work, owners, strict=True) if owner == rank)
        for rank in range(num_ranks)
    )


@pytest.mark.parametrize("seed", range(12))
def test_busiest_rank_is_within_a_tenth_of_the_mean_or_grahams_bound_of_the_optimum(seed):
    rng = random.Random(seed)
    shapes, num_ranks = random_shapes(rng, most=7), rng.choice([2, 3])
    intervals = flat(shapes, num_ranks, rng.randrange(500), rng.randrange(500))
    plan = build(shapes, intervals, FAST_LINK)
    work = [orthogonalization_flops(*shape, steps=5) for shape in shapes]
    best = min(busiest(o, work, num_ranks) for o in assignments(len(shapes), num_ranks))
    graham = 4 / 3 - 1 / (3 * num_ranks)
    assert sum(plan.work()) == sum(work)
    assert max(plan.work()) <= max(1.1 * sum(work) / num_ranks, graham * best)


@pytest.mark.parametrize("seed", range(12))
def test_largest_holders_move_the_fewest_bytes_of_all_assignments(seed):
    rng = random.Random(seed)
    shapes, num_ranks = random_shapes(rng, most=6), rng.choice([2, 3])
    intervals = flat(shapes, num_ranks, rng.randrange(500), rng.randrange(500))
    held = [
        {rank: stop - start for rank, (start, stop) in enumerate(column) if stop}
        for column in zip(*intervals, strict=True)
    ]

    def moved(owners):
        return sum(
            rows * cols - held[i].get(owner, 0) + sum(n for r, n in held[i].items() if r != owner)
            for i, (owner, (rows, cols)) in enumerate(zip(owners, shapes, strict=True))
        )

    work = [rows * cols for rows, cols in shapes]
    owners = largest_holder(held, work, num_ranks)
    assert moved(owners) == min(map(moved, assignments(len(shapes), num_ranks)))


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("cut_up", [flat, by_rows, replicated])
def test_transformer_layers_are_balanced_however_they_are_cut(num_ranks, cut_up):
    plan = build(LAYER * 34, cut_up(LAYER * 34, num_ranks))
    assert max(plan.work()) <= 1.1 * sum(plan.work()) / num_ranks


def test_matrices_of_one_rank_alone_are_shared_out_where_links_are_fast_and_stay_where_not():
    shapes = LAYER * 8
    intervals = [[(0, rows * cols) for rows, cols in shapes], *[[(0, 0)] * len(shapes)] * 3]
    shared = build(shapes, intervals, FAST_LINK)
    assert max(shared.work()) <= 1.1 * sum(shared.work()) / 4
    kept = build(shapes, intervals, SLOW_LINK)
    assert set(kept.owners) == {0}
    assert sum(kept.sent_bytes()) == 0


def test_no_plan_is_modelled_slower_than_the_one_that_moves_the_least():
    for _, shapes, intervals, plan in random_plans(60):
        held = [
            {rank: stop - start for rank, (start, stop) in enumerate(column) if stop}
            for column in zip(*intervals, strict=True)
        ]
        cheapest = with_owners(plan, largest_holder(held, plan.flops, len(intervals)))
        for costs in (COSTS, FAST_LINK, SLOW_LINK):
            chosen = build(shapes, intervals, costs)
            assert chosen.modelled_seconds(costs) <= cheapest.modelled_seconds(costs)


def test_repair_moves_first_what_costs_the_fewest_bytes_for_its_work():
    # rank 0 has four of five; the third is shared with rank 1, the fourth is heavy for its size
    held = [{0: 8}, {0: 8}, {0: 6, 1: 2}, {0: 6}, {1: 8}]
    assert repaired([0, 0, 0, 0, 1], held, [4, 4, 4, 4, 4], 3, 1.3) == [0, 0, 1, 2, 1]
    assert repaired([0, 0, 0, 0, 1], held, [4, 4, 4, 8, 4], 3, 1.6) == [0, 0, 0, 2, 1]


def test_repair_reaches_ranks_that_hold_nothing():
    assert sorted(repaired([0] * 6, [{0: 8}] * 6, [5] * 6, 3, 1.0)) == [0, 0, 1, 1, 2, 2]


def test_repair_never_makes_the_busiest_rank_busier():
    for seed in range(200):
        rng = random.Random(seed)
        num_ranks = rng.choice([2, 3, 5, 8])
        work = [rng.choice([0, 1, 3, 5, 8, 20]) for _ in range(rng.randint(1, 30))]
        held = [{rng.randrange(num_ranks): rng.randint(1, 9)} for _ in work]
        owners = largest_holder(held, work, num_ranks)
        even = repaired(owners, held, work, num_ranks, 1.0)
        assert busiest(even, work, num_ranks) <= busiest(owners, work, num_ranks)
        assert busiest(even, work, num_ranks) <= sum(work) / num_ranks + max(work)


def test_few_matrices_on_many_ranks_are_as_even_as_the_blind_rule_makes_them():
    for seed in range(120):
        rng = random.Random(seed)
        num_ranks = rng.choice([4, 8])
        shapes = [(rng.randint(20, 60),) * 2 for _ in range(rng.randint(num_ranks, 24))]
        holders = [rng.randrange(num_ranks) for _ in shapes]
        intervals = [
            [(0, rows * cols) if holder == rank else (0, 0)
             for holder, (rows, cols) in zip(holders, shapes, strict=True)]
            for rank in range(num_ranks)
        ]  # fmt: skip
        plan = build(shapes, intervals, FAST_LINK)
        blind = longest_processing_time(plan.flops, num_ranks)
        limit = max(1.1 * sum(plan.flops) / num_ranks, busiest(blind, plan.flops, num_ranks))
        assert max(plan.work()) <= limit


def with_owners(plan, owners):
    return MuonShardPlan(
        plan.names, plan.shapes, plan.intervals, plan.flops, tuple(owners), plan.buckets
    )


@pytest.mark.parametrize("cut_up", [flat, by_rows, replicated])
def test_order_of_the_matrices_does_not_matter_to_the_balance(cut_up):
    shapes = LAYER * 6
    intervals = cut_up(shapes, 5)
    order = random.Random(0).sample(range(len(shapes)), len(shapes))
    shuffled = build([shapes[i] for i in order], [[row[i] for i in order] for row in intervals])
    plain = build(shapes, intervals)
    for plan in (plain, shuffled):
        assert max(plan.work()) <= 1.1 * sum(plan.work()) / 5
    if cut_up is replicated:
        assert sorted(plain.work()) == sorted(shuffled.work())


def test_the_same_input_gives_the_same_plan():
    for _, shapes, intervals, plan in random_plans(30):
        again = [list(row) for row in intervals]
        assert plan in [build(shapes, again, costs) for costs in (COSTS, FAST_LINK, SLOW_LINK)]


# Buckets


def alive_by_rank(plan, bucket):
    """Counted piece by piece, each stage of the exchange in turn."""
    alive = []
    for rank in range(len(plan.intervals)):
        stages = [0, 0, 0, 0]
        for matrix in bucket:
            is_owner = plan.owners[matrix] == rank
            for source, (start, stop) in plan.sources(matrix):
                stages[0] += 4 * (stop - start) * (source == rank)
                stages[1] += 4 * (stop - start) * is_owner
            for target, (start, stop) in plan.destinations(matrix):
                stages[2] += 4 * (stop - start) * is_owner
                stages[3] += 4 * (stop - start) * (target == rank)
        alive.append(max(a + b for a, b in itertools.pairwise(stages)))
    return alive


@pytest.mark.parametrize("bucket_bytes", [1, 2000, 20_000, 1 << 20])
def test_buckets_partition_the_matrices_and_two_of_them_fit(bucket_bytes):
    for _, shapes, _, plan in random_plans(80, bucket_bytes=bucket_bytes):
        assert sorted(itertools.chain(*plan.buckets)) == list(range(len(shapes)))
        assert all(plan.buckets)
        for bucket in plan.buckets:
            moved = [matrix for matrix in bucket if not plan.is_local(matrix)]
            assert len(moved) < 2 or 2 * max(alive_by_rank(plan, bucket)) <= bucket_bytes


def test_no_bucket_could_take_in_the_next_matrix():
    for _, _, _, plan in random_plans(80, bucket_bytes=4000):
        for bucket, following in itertools.pairwise(plan.buckets):
            grown = [*bucket, following[0]]
            assert 2 * max(alive_by_rank(plan, grown)) > 4000


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_bucket_gives_every_owner_about_equal_work(num_ranks):
    shapes = LAYER * 34
    plan = build(shapes, by_rows(shapes, num_ranks), bucket_bytes=256 << 20)
    assert len(plan.buckets) > 3
    in_step = sum(max(loads(plan, bucket)) for bucket in plan.buckets)
    assert in_step <= 1.1 * sum(plan.work()) / num_ranks


def loads(plan, bucket):
    work = [0] * len(plan.intervals)
    for matrix in bucket:
        work[plan.owners[matrix]] += plan.flops[matrix]
    return work


def test_work_that_needs_no_transfer_is_spread_over_the_buckets_of_its_rank():
    # 8 matrices cut in halves, then 8 that rank 0 has whole and 8 that rank 1 has whole
    shapes = [(64, 64)] * 24
    half, full, none = (0, 2048), (0, 4096), (0, 0)
    rest = (2048, 4096)
    intervals = [[half] * 8 + [full] * 8 + [none] * 8, [rest] * 8 + [none] * 8 + [full] * 8]
    plan = build(shapes, intervals, bucket_bytes=4 * 4 * 4096)
    assert len(plan.buckets) == 2
    assert [loads(plan, bucket) for bucket in plan.buckets] == [[plan.work()[0] // 2] * 2] * 2
    assert all(sum(map(plan.is_local, bucket)) == 8 for bucket in plan.buckets)


# Refusals


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 5), (6, 12)],
        [(0, 7), (5, 12)],
        [(0, 6), (6, 13)],
        [(0, 6), (0, 0)],
        [(0, 0), (0, 0)],
        [(0, 12), (0, 6)],
        [(0, 6), (12, 6)],
        [(0, 6), (6, 6), (6, 12)],
        [(-1, 6), (6, 12)],
    ],
    ids=["gap", "overlap", "beyond the end", "part is missing", "nobody has any", "nested",
         "reversed", "empty but not at zero", "before the start"],
)  # fmt: skip
def test_pieces_that_do_not_tile_a_matrix_are_refused(pieces):
    good = [(0, 4), *[(0, 0)] * (len(pieces) - 1)]
    intervals = [[first, piece] for first, piece in zip(good, pieces, strict=True)]
    with pytest.raises(ConfigError) as refusal:
        build([(2, 2), (3, 4)], intervals)
    message = str(refusal.value)
    for part in ("layers.1.weight", "3x4", "FSDP2", "AdamW"):
        assert part in message
    for rank, (start, stop) in enumerate(pieces):
        assert f"rank {rank}: [{start}, {stop})" in message


def test_planning_the_released_size_on_32_ranks_takes_below_0_3_s():
    shapes = LAYER * 34
    intervals = by_rows(shapes, 32)
    seconds = []
    for _ in range(3):
        started = time.process_time()
        build(shapes, intervals)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.3
