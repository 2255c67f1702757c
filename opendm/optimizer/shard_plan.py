"""``MuonShardPlan``: who orthogonalises each matrix, and what moves when.

Every rank of a process group holds one contiguous interval of each flattened matrix. Flat shards,
row shards, replicas and mixtures are all this one case. The plan is a pure function of these
intervals, so every rank computes the same one and nothing needs to be agreed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from opendm.errors import ConfigError
from opendm.optimizer.balance import MAX_LOAD, candidate_owners
from opendm.optimizer.buckets import Traffic, choose_buckets, fill_buckets
from opendm.optimizer.newton_schulz import orthogonalization_flops

Interval = tuple[int, int]

BYTES_PER_ELEMENT: Final = 4
"""Directions and updates travel in float32."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a rank can do."""

    flops_per_s: float
    """FLOP/s of the orthogonalisation."""
    bytes_per_s: float
    """Bytes/s of one rank's link in one direction."""


@dataclass(frozen=True, slots=True)
class MuonShardPlan:
    """Owners and exchanges of one process group."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    intervals: tuple[tuple[Interval, ...], ...]
    """``[rank][matrix]``: the elements ``start <= k < stop`` of the flattened matrix; (0, 0) is
    nothing."""
    flops: tuple[int, ...]
    """FLOPs to orthogonalise each matrix."""
    owners: tuple[int, ...]
    """The rank that orthogonalises each matrix."""
    buckets: tuple[tuple[int, ...], ...]
    """Matrices in the order of the exchange; each is in exactly one bucket."""

    @classmethod
    def build(
        cls,
        names: Sequence[str],
        shapes: Sequence[tuple[int, int]],
        intervals: Sequence[Sequence[Interval]],
        *,
        costs: Costs,
        steps: int = 5,
        bucket_bytes: int | None = None,
    ) -> "MuonShardPlan":
        """The plan with the smallest modelled time among the balanced and the cheapest ones.

        Args:
            names: of the matrices, for messages.
            shapes: of the whole matrices.
            intervals: ``[rank][matrix]``; what each rank holds of the flattened matrix, (0, 0) if
                nothing. The distinct ones tile the matrix; equal ones are replicas.
            costs: the speed of arithmetic and links.
            steps: Newton-Schulz iterations.
            bucket_bytes: what the exchange may hold at a time on any rank, two buckets together.
                A matrix that is larger by itself gets its own bucket. None: 64 MiB, or up to
                2 GiB where less would make owners wait for each other.

        Raises:
            ConfigError: the intervals do not tile a matrix; the same message on every rank.
        """
        plan = cls(
            tuple(names),
            tuple((rows, cols) for rows, cols in shapes),
            tuple(tuple((start, stop) for start, stop in row) for row in intervals),
            tuple(orthogonalization_flops(rows, cols, steps=steps) for rows, cols in shapes),
            owners=(),
            buckets=(),
        )
        for name, shape, held in zip(
            plan.names, plan.shapes, zip(*plan.intervals, strict=True), strict=True
        ):
            _check_tiling(name, shape, held)
        plan = _with_best_owners(plan, costs)
        traffic = [plan.traffic(matrix) for matrix in range(len(plan.names))]
        if bucket_bytes is None:
            return replace(plan, buckets=choose_buckets(plan.owners, plan.flops, traffic))
        buckets = fill_buckets(plan.owners, plan.flops, traffic, bucket_bytes // 2)
        return replace(plan, buckets=buckets)

    # What moves

    def sources(self, matrix: int) -> tuple[tuple[int, Interval], ...]:
        """Ranks and intervals that tile the matrix together with what its owner holds.

        The owner is not among them. Of replicas, the one nearest to the owner's rank is taken.
        """
        owner = self.owners[matrix]
        nearest = {self.intervals[owner][matrix]: owner}
        for rank, row in enumerate(self.intervals):
            best = nearest.setdefault(row[matrix], rank)
            if abs(rank - owner) < abs(best - owner):
                nearest[row[matrix]] = rank
        return tuple(
            (rank, interval)
            for interval, rank in sorted(nearest.items())
            if rank != owner and interval[1] > interval[0]
        )

    def destinations(self, matrix: int) -> tuple[tuple[int, Interval], ...]:
        """All ranks but the owner that hold a part and so need their part of the update."""
        owner = self.owners[matrix]
        held = enumerate(row[matrix] for row in self.intervals)
        return tuple((r, (start, stop)) for r, (start, stop) in held if r != owner and stop > start)

    def is_local(self, matrix: int) -> bool:
        """Whether nothing of the matrix moves."""
        return not self.destinations(matrix)

    # What it costs

    def work(self) -> tuple[int, ...]:
        """FLOPs of the orthogonalisation, by rank."""
        work = [0] * len(self.intervals)
        for owner, flops in zip(self.owners, self.flops, strict=True):
            work[owner] += flops
        return tuple(work)

    def traffic(self, matrix: int) -> dict[int, Traffic]:
        """Bytes of one matrix by rank; empty where nothing moves."""
        size = BYTES_PER_ELEMENT
        gathered = {rank: size * (stop - start) for rank, (start, stop) in self.sources(matrix)}
        returned = {r: size * (stop - start) for r, (start, stop) in self.destinations(matrix)}
        traffic: dict[int, Traffic] = {
            rank: (gathered.get(rank, 0), 0, 0, amount) for rank, amount in returned.items()
        }
        if traffic:
            owner = self.owners[matrix]
            traffic[owner] = (0, sum(gathered.values()), sum(returned.values()), 0)
        return traffic

    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank sends in one step, gather and return."""
        return tuple(gather + update for gather, _, update, _ in self._total_traffic())

    def received_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank receives in one step, gather and return."""
        return tuple(gather + update for _, gather, _, update in self._total_traffic())

    def modelled_seconds(self, costs: Costs) -> float:
        """Time of the slowest rank: its arithmetic, then the busier direction of its link."""
        return max(
            flops / costs.flops_per_s + max(a + c, b + d) / costs.bytes_per_s
            for flops, (a, b, c, d) in zip(self.work(), self._total_traffic(), strict=True)
        )

    def _total_traffic(self) -> list[list[int]]:
        total = [[0, 0, 0, 0] for _ in self.intervals]
        for matrix in range(len(self.names)):
            for rank, by_kind in self.traffic(matrix).items():
                total[rank] = [a + b for a, b in zip(total[rank], by_kind, strict=True)]
        return total


def _check_tiling(name: str, shape: tuple[int, int], held: Sequence[Interval]) -> None:
    full = shape[0] * shape[1]
    end, fits = 0, True
    for start, stop in sorted(set(held) - {(0, 0)}):
        fits = fits and start == end < stop
        end = stop
    if fits and end == full:
        return
    listed = ", ".join(f"rank {rank}: [{start}, {stop})" for rank, (start, stop) in enumerate(held))
    raise ConfigError(
        f"{name} ({shape[0]}x{shape[1]}, {full} elements) cannot be put together from what the "
        f"ranks hold of it: {listed}. Their intervals must be equal or disjoint and cover every "
        "element. Shard it by DDP, FSDP1, FSDP2 or HSDP, or leave it to AdamW by the predicate "
        "of mark_muon_parameters"
    )


def _with_best_owners(plan: MuonShardPlan, costs: Costs) -> MuonShardPlan:
    """The fastest by the model of the balanced assignments and the one that moves the least.

    Where no assignment is balanced, the most even one counts as such.
    """
    num_ranks = len(plan.intervals)
    held = [
        {rank: stop - start for rank, (start, stop) in enumerate(parts) if stop > start}
        for parts in zip(*plan.intervals, strict=True)
    ]
    found = dict.fromkeys(map(tuple, candidate_owners(held, plan.flops, num_ranks)))
    candidates = [replace(plan, owners=owners) for owners in found]
    busiest = [max(candidate.work()) for candidate in candidates]
    limit = max(MAX_LOAD * sum(plan.flops) / num_ranks, min(busiest))
    allowed = [
        (candidate.modelled_seconds(costs), load, index)
        for index, (candidate, load) in enumerate(zip(candidates, busiest, strict=True))
        if index == 0 or load <= limit
    ]
    return candidates[min(allowed)[-1]]
