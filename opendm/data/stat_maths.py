"""Exact order statistics and sums of float32 values that come in blocks, whatever their order.

Order statistics are found by counting: a float32 has 32 bits, so that two counts of 65,536 buckets
each name any of them without sorting. Sums are split into parts that add up without rounding
(Rump, Ogita and Oishi 2008, doi:10.1137/050645671; Demmel and Nguyen 2013,
doi:10.1109/ARITH.2013.9), so that no order of additions can change them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

Blocks = Callable[[], Iterator[np.ndarray]]
"""Each call gives all values again, in blocks of any size and order."""

NUM_PARTS: Final = 3
"""Parts of a split value: about 75 bits of the largest one for 1e8 values."""
HALF_BITS: Final = 16
NUM_BUCKETS: Final = 1 << HALF_BITS
LOW_MASK: Final = np.uint32(NUM_BUCKETS - 1)
QUANTILES: Final = (0.01, 0.99)


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of one dimension."""

    mean: float
    std: float
    q01: float
    q99: float
    min: float
    max: float


class ReproducibleSum:
    """A sum that does not depend on the order of its values.

    Args:
        count: at least as many as there will be values.
        largest: at least the magnitude of every value.
    """

    def __init__(self, count: int, largest: float) -> None:
        self._sigmas = _sigmas(count, largest)
        self._totals = [0.0] * len(self._sigmas)

    def add(self, values: np.ndarray) -> None:
        """Count float64 values ``[n]``."""
        rest = values
        for part, sigma in enumerate(self._sigmas):
            exact = (rest + sigma) - sigma
            self._totals[part] += float(exact.sum())
            rest = rest - exact

    def total(self) -> float:
        """The sum, rounded once."""
        return math.fsum(self._totals)


def _sigmas(count: int, largest: float) -> list[float]:
    """Powers of two: what (x + sigma) - sigma keeps of x adds up exactly."""
    if largest == 0:
        return []
    spare_bits = math.ceil(math.log2(count + 2))
    first = math.frexp(largest)[1] + spare_bits
    return [math.ldexp(1.0, first + part * (spare_bits - 53)) for part in range(NUM_PARTS)]


def mean_and_std(blocks: Blocks, count: int, low: float, high: float) -> tuple[float, float]:
    """Mean and deviation (divided by n) of ``count`` values between ``low`` and ``high``.

    Two passes, because the difference of mean square and squared mean loses all digits of a small
    deviation around a large mean.
    """
    if low == high:
        return low, 0.0
    first = ReproducibleSum(count, max(abs(low), abs(high)))
    for block in blocks():
        first.add(block.astype(np.float64))
    mean = first.total() / count
    second = ReproducibleSum(count, max((low - mean) ** 2, (high - mean) ** 2))
    for block in blocks():
        second.add((block - np.float64(mean)) ** 2)
    return mean, math.sqrt(second.total() / count)


def ordered_keys(values: np.ndarray) -> np.ndarray:
    """Float32 values as uint32 of the same order."""
    bits = values.view(np.uint32)
    flips = (values.view(np.int32) >> 31).view(np.uint32) | np.uint32(1 << 31)
    return bits ^ flips


def values_of_keys(keys: np.ndarray) -> np.ndarray:
    """The inverse of :func:`ordered_keys`."""
    is_positive = keys >> 31 == 1
    return (keys ^ np.where(is_positive, 1 << 31, 0xFFFFFFFF).astype(np.uint32)).view(np.float32)


def order_statistics(blocks: Blocks, ranks: Sequence[int]) -> list[float]:
    """The values at ``ranks`` (0 is the smallest) of all float32 values in sorted order."""
    high = np.zeros(NUM_BUCKETS, np.int64)
    for block in blocks():
        high += np.bincount(ordered_keys(block) >> HALF_BITS, minlength=NUM_BUCKETS)
    ends = np.cumsum(high)
    buckets = np.searchsorted(ends, ranks, side="right")
    low = {int(bucket): np.zeros(NUM_BUCKETS, np.int64) for bucket in buckets}
    for block in blocks():
        keys = ordered_keys(block)
        tops = keys >> HALF_BITS
        for bucket, counts in low.items():
            np.add.at(counts, keys[tops == bucket] & LOW_MASK, 1)
    found = []
    for rank, bucket in zip(ranks, buckets.tolist(), strict=True):
        before = int(ends[bucket] - high[bucket])
        within = int(np.searchsorted(np.cumsum(low[bucket]), rank - before, side="right"))
        found.append(bucket << HALF_BITS | within)
    # a negative zero is the same number as a positive one, and must not differ in the file
    return (values_of_keys(np.array(found, np.uint32)).astype(np.float64) + 0.0).tolist()


def quantile_ranks(count: int, quantile: float) -> tuple[int, int, float]:
    """The two neighbouring ranks of a quantile and the way between them, as numpy's default."""
    position = (count - 1) * quantile
    lower = math.floor(position)
    return lower, min(lower + 1, count - 1), position - lower


def interpolate(lower: float, upper: float, way: float) -> float:
    """Linear interpolation in numpy's order of operations."""
    gap = upper - lower
    return upper - gap * (1 - way) if way >= 0.5 else lower + gap * way


def summarize(blocks: Blocks, count: int) -> Summary:
    """All statistics of one dimension of ``count`` float32 values.

    Raises:
        OverflowError: a value is not finite.
    """
    places = [quantile_ranks(count, quantile) for quantile in QUANTILES]
    ranks = [0, count - 1, *(rank for place in places for rank in place[:2])]
    low, high, *around = order_statistics(blocks, ranks)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise OverflowError(f"values from {low} to {high}")
    mean, std = mean_and_std(blocks, count, low, high)
    q01 = interpolate(around[0], around[1], places[0][2])
    q99 = interpolate(around[2], around[3], places[1][2])
    return Summary(mean, std, q01, q99, low, high)
