"""Several datasets as one, drawn by weight: a pure function of seed and epoch.

Each epoch draws every group a fixed number of times, its share of the epoch, in one random order.
Within a group no sample is drawn again before all others were, across epochs too, so the passes
over a group need no state: draw number d of a group lies in pass d // size.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np

from opendm.errors import ConfigError


@runtime_checkable
class Samples(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Mixture:
    """The samples of ``parts`` one after another; :meth:`draw_order` says how they are drawn.

    Args:
        parts: the datasets.
        groups: rows that share a weight, each row in one group at most.
        weights: positive, of any scale, one per group.

    Raises:
        ConfigError: a weight is not positive, or a group is empty.
    """

    def __init__(
        self,
        parts: Sequence[Samples],
        groups: Sequence[np.ndarray],
        weights: Sequence[float | int],
    ) -> None:
        if any(not weight > 0 or weight == float("inf") for weight in weights):
            raise ConfigError(f"mixture weights {list(weights)}: each must be a positive number")
        if not all(len(group) for group in groups):
            raise ConfigError("a dataset or task of the mixture has no sample; leave it out")
        self.parts = tuple(parts)
        self._ends = list(accumulate(len(part) for part in parts))
        self.groups = tuple(groups)
        self.counts = draws_per_epoch(len(self), weights)

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, row: int) -> tuple[int, int]:
        """Part and row in it.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"sample {row} of a mixture with {len(self)}")
        part = bisect_right(self._ends, row)
        return part, row - (self._ends[part - 1] if part else 0)

    def __getitem__(self, row: int) -> Any:
        part, index = self.locate(row)
        return self.parts[part][index]

    def draw_order(self, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Passes and rows of the ``len(self)`` draws of an epoch, int64 ``[N]`` each."""
        passes, rows = [], []
        for number, (group, count) in enumerate(zip(self.groups, self.counts, strict=True)):
            first = epoch * count
            for turn in range(first // len(group), (first + count - 1) // len(group) + 1):
                order = np.random.default_rng([seed, number, turn]).permutation(len(group))
                start = max(first - turn * len(group), 0)
                chosen = order[start : first + count - turn * len(group)]
                rows.append(group[chosen])
                passes.append(np.full(len(chosen), turn))
        shuffled = np.random.default_rng([seed, epoch]).permutation(len(self))
        return np.concatenate(passes)[shuffled], np.concatenate(rows)[shuffled]


def draws_per_epoch(num_draws: int, weights: Sequence[float | int]) -> list[int]:
    """Whole numbers in the ratio of ``weights`` that sum to ``num_draws``, none of them 0.

    Largest remainders get the draws that rounding down leaves over.

    Raises:
        ConfigError: fewer draws than groups.
    """
    if num_draws < len(weights):
        raise ConfigError(
            f"{num_draws} samples in all for {len(weights)} weighted datasets or tasks; each "
            "needs a draw per epoch, leave some out"
        )
    exact = np.asarray(weights, dtype=np.float64) / np.sum(weights) * num_draws
    counts = np.floor(exact).astype(np.int64)
    for index in np.argsort(counts - exact, kind="stable")[: num_draws - int(counts.sum())]:
        counts[index] += 1
    for index in np.flatnonzero(counts == 0):
        counts[np.argmax(counts)] -= 1
        counts[index] = 1
    return [int(count) for count in counts]
