"""In which order matrices are exchanged, and how many of them at a time."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

Traffic = tuple[int, int, int, int]
"""Bytes that one rank sends and receives in the gather, then sends and receives in the return."""


SIZES: Final = tuple(2**exponent << 20 for exponent in range(6, 12))
"""What the exchange may hold, in bytes, where nobody says: 64 MiB, doubled up to 2 GiB."""
MAX_IDLE: Final = 0.1
"""Share of its time that the busiest owner may wait for others, before buckets are doubled."""


def choose_buckets(
    owners: Sequence[int], work: Sequence[int], traffic: Sequence[Mapping[int, Traffic]]
) -> tuple[tuple[int, ...], ...]:
    """The smallest usual buckets in which owners hardly wait for each other.

    Where many ranks hold copies, a bucket must hold an update from every owner at once, or the
    owners work one after another.
    """
    buckets: tuple[tuple[int, ...], ...] = ()
    for size in SIZES:
        buckets = fill_buckets(owners, work, traffic, size // 2)
        if lockstep(buckets, owners, work) <= 1 + MAX_IDLE:
            break
    return buckets


def lockstep(buckets: Sequence[Sequence[int]], owners: Sequence[int], work: Sequence[int]) -> float:
    """Work of each bucket's busiest owner, summed, over that of the busiest owner of all."""
    total = _loads((matrix for bucket in buckets for matrix in bucket), owners, work)
    in_step = sum(max(_loads(bucket, owners, work).values()) for bucket in buckets)
    return in_step / max(total.values(), default=1)


def _loads(matrices: Iterable[int], owners: Sequence[int], work: Sequence[int]) -> dict[int, int]:
    loads: dict[int, int] = {}
    for matrix in matrices:
        loads[owners[matrix]] = loads.get(owners[matrix], 0) + work[matrix]
    return loads


def fill_buckets(
    owners: Sequence[int], work: Sequence[int], traffic: Sequence[Mapping[int, Traffic]], limit: int
) -> tuple[tuple[int, ...], ...]:
    """Matrices in groups that are exchanged at once; every matrix is in exactly one.

    All owners advance together, so that none waits for a bucket in which it has nothing to do.
    Matrices that do not move are spread evenly: their work hides the exchange.

    Args:
        owners: the rank that orthogonalises each matrix.
        work: FLOPs of each matrix.
        traffic: of each matrix, by rank; empty where nothing moves.
        limit: bytes that a bucket may keep alive on any rank, unless it is a single matrix.
    """
    buckets: list[list[int]] = []
    alive: dict[int, Traffic] = {}
    moved = [matrix for matrix, by_rank in enumerate(traffic) if by_rank]
    for matrix in _by_progress(moved, owners, work):
        grown = {**alive, **_sums(alive, traffic[matrix])}
        if buckets and alive_bytes(grown.values()) <= limit:
            buckets[-1].append(matrix)
            alive = grown
        else:
            buckets.append([matrix])
            alive = dict(traffic[matrix])
    local = [matrix for matrix, by_rank in enumerate(traffic) if not by_rank]
    return _with_local(buckets, local, owners, work)


def alive_bytes(traffic: Iterable[Traffic]) -> int:
    """Bytes that the busiest rank keeps alive at once, in two neighbouring stages of the exchange.

    The stages are the four of ``Traffic``. The first two are never the largest pair: who sends a
    piece gets it back, and who collects pieces returns at least as much.
    """
    return max(
        return_out + max(gather_in, return_in) for _, gather_in, return_out, return_in in traffic
    )


def _sums(total: Mapping[int, Traffic], more: Mapping[int, Traffic]) -> dict[int, Traffic]:
    sums = {}
    for rank, (a, b, c, d) in more.items():
        e, f, g, h = total.get(rank, (0, 0, 0, 0))
        sums[rank] = (a + e, b + f, c + g, d + h)
    return sums


def _by_progress(matrices: Sequence[int], owners: Sequence[int], work: Sequence[int]) -> list[int]:
    """Every owner's matrices, largest first, merged by the share of its work that is done."""
    done: dict[int, int] = {}
    middle: dict[int, int] = {}
    for matrix in _largest_first(matrices, work):
        before = done.get(owners[matrix], 0)
        done[owners[matrix]] = before + work[matrix]
        middle[matrix] = 2 * before + work[matrix]
    return sorted(matrices, key=lambda i: (middle[i] / max(1, done[owners[i]]), owners[i], i))


def _with_local(
    buckets: list[list[int]], local: Sequence[int], owners: Sequence[int], work: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    if local and not buckets:
        buckets = [[]]
    loads = [_loads(bucket, owners, work) for bucket in buckets]
    for matrix in _largest_first(local, work):
        owner = owners[matrix]
        lightest = min(range(len(buckets)), key=lambda b: (loads[b].get(owner, 0), b))
        buckets[lightest].append(matrix)
        loads[lightest][owner] = loads[lightest].get(owner, 0) + work[matrix]
    return tuple(map(tuple, buckets))


def _largest_first(matrices: Iterable[int], work: Sequence[int]) -> list[int]:
    return sorted(matrices, key=lambda matrix: (-work[matrix], matrix))
