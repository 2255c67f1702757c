"""Confidence of a success rate."""

import math
from dataclasses import dataclass
from typing import Final

Z_95: Final = 1.959964
"""Standard normal quantile of a two-sided 95 % interval."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Successes among trials."""

    num_successes: int
    num_trials: int

    @property
    def value(self) -> float:
        """The share of successes."""
        return self.num_successes / self.num_trials

    def interval(self, z: float = Z_95) -> tuple[float, float]:
        """Wilson's score interval (1927, doi:10.1080/01621459.1927.10502953).

        The rates p for which the share lies within z standard errors.
        """
        n, share = self.num_trials, self.value
        scale = 1 + z * z / n
        centre = (share + z * z / (2 * n)) / scale
        half = z / scale * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.num_successes}/{self.num_trials} [{low:.2f}, {high:.2f}]"
