"""Which rank orthogonalises which matrix: little to move, and nobody much busier than the mean.

Moving matrix ``i`` to owner ``o`` and its update back costs ``full + total - 2 * held[o]``
elements, where ``total`` sums what all ranks hold. So the bytes of an assignment differ from those
of another only by what the owners hold, and the whole problem is a generalised assignment: let the
owners hold as much as possible under a cap on the load of each rank.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

Held = Sequence[Mapping[int, int]]
"""For each matrix, the number of elements of every rank that holds some."""

MAX_LOAD: Final = 1.1
"""The busiest rank's work may exceed the mean by this factor."""
TIGHTER_LOADS: Final = (1.05, 1.02, 1.0)
"""Caps that are also tried: they pay where links are fast and arithmetic is slow."""


def largest_holder(held: Held, work: Sequence[int], num_ranks: int) -> list[int]:
    """Owners that move the fewest bytes: the rank with the largest part of each matrix.

    Ties go to the least loaded rank, heavy matrices first; where everybody holds everything this
    is the longest-processing-time rule (Graham 1969, doi:10.1137/0117039).
    """
    everybody = dict.fromkeys(range(num_ranks), 0)
    owners, loads = [0] * len(work), [0] * num_ranks
    for matrix in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        parts = held[matrix] or everybody
        largest = max(parts.values())
        ties = (rank for rank, part in parts.items() if part == largest)
        owners[matrix] = min(ties, key=lambda rank: (loads[rank], rank))
        loads[owners[matrix]] += work[matrix]
    return owners


def longest_processing_time(work: Sequence[int], num_ranks: int) -> list[int]:
    """Owners by the longest-processing-time rule over all ranks, blind to bytes."""
    return largest_holder([{}] * len(work), work, num_ranks)


def repaired(
    owners: Sequence[int], held: Held, work: Sequence[int], num_ranks: int, max_load: float
) -> list[int]:
    """Owners with matrices moved off the busiest rank until it is within ``max_load`` of the mean.

    Each move is the one with the fewest extra bytes per FLOP, to a holder or to the idlest rank,
    among those that leave the receiver below the busiest rank: the loads only become more even,
    so the loop ends.
    """
    owners, loads = list(owners), [0] * num_ranks
    owned: list[set[int]] = [set() for _ in range(num_ranks)]
    for matrix, owner in enumerate(owners):
        loads[owner] += work[matrix]
        owned[owner].add(matrix)
    cap = max_load * sum(work) / num_ranks
    while max(loads) > cap:
        busiest, idlest = loads.index(max(loads)), loads.index(min(loads))
        moves = (
            (
                (held[matrix].get(busiest, 0) - held[matrix].get(target, 0)) / work[matrix],
                matrix,
                target,
            )
            for matrix in owned[busiest]
            for target in (*held[matrix], idlest)
            if loads[target] + work[matrix] < loads[busiest] and work[matrix]
        )
        best = min(moves, default=None)
        if best is None:
            break
        _, matrix, target = best
        owners[matrix] = target
        for rank, change in ((busiest, -work[matrix]), (target, work[matrix])):
            loads[rank] += change
            owned[rank] ^= {matrix}
    return owners


def candidate_owners(held: Held, work: Sequence[int], num_ranks: int) -> Iterator[list[int]]:
    """Assignments to choose from; the first moves the fewest bytes, whatever its balance.

    The last is blind to bytes. It is there for the few matrices on many ranks that single moves
    do not balance; elsewhere it would buy a hundredth of the time with up to half more bytes.
    """
    owners = largest_holder(held, work, num_ranks)
    yield owners
    for max_load in (MAX_LOAD, *TIGHTER_LOADS):
        owners = repaired(owners, held, work, num_ranks, max_load)
        yield owners
    if _busiest_load(owners, work) * num_ranks > MAX_LOAD * sum(work):
        yield longest_processing_time(work, num_ranks)


def _busiest_load(owners: Sequence[int], work: Sequence[int]) -> int:
    loads = Counter[int]()
    for owner, load in zip(owners, work, strict=True):
        loads[owner] += load
    return max(loads.values(), default=0)
