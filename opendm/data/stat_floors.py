"""A lower limit of the range between the quantiles, so that noise is never blown up to [-1, 1].

A dimension whose range is under the limit of its group is normalised over all its values instead,
or over the limit where these are closer still. Constants become 0, and what happens in fewer than
1 % of the frames is kept.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from opendm.constants.robot import desc_value
from opendm.data.normalize import NormStats, NormStatsFile, Profile
from opendm.data.stat_columns import Desc

logger = logging.getLogger(__name__)

FLOORS_VERSION: Final = 1
"""Rises when a number below changes, and files with another one are computed again."""
FLOORED_KEY: Final = "floored"
"""Where a file keeps what the quantiles were, below its ``opendm`` key."""

RELATIVE_FLOOR: Final = 1e-2
"""Of the median range of the group's varying dimensions. In T01 (openpi issue 814) a joint of
range 1e-3 stands among joints of range 1: jitter of the sensor became ±1."""
NEGLIGIBLE: Final = 1e-3
"""Of the largest range of the group: what moves less does not count as varying."""
ABSOLUTE_FLOOR: Final = 1e-4
"""Radians, metres or shares: no resolution of a robot is finer."""
STILL_RANGE: Final = 1.0
"""Median of a group in which nothing varies."""
EPSILON: Final = 1e-6
"""What normalisation adds to a range; half of it moves a constant to exactly 0."""

RARE_KIND: Final = "rare"
REASONS: Final = {
    "constant": "constant",
    "near-constant": "almost constant",
    RARE_KIND: "still in 98 % of the values",
}


@dataclass(frozen=True, slots=True)
class Floored:
    """A dimension that was widened, and its quantiles before."""

    dim: int
    kind: str
    """``constant``, ``near-constant`` or ``rare``."""
    q01: float
    q99: float

    def to_json(self) -> dict[str, Any]:
        """The entry of a file."""
        return {"dim": self.dim, "kind": self.kind, "q01": self.q01, "q99": self.q99}


def groups_of(state_desc: Desc | None, num_dims: int) -> list[str]:
    """The group of each dimension: its word in ``state_desc``, or one for all."""
    if state_desc is None or len(state_desc) != num_dims:
        return ["all"] * num_dims
    return [desc_value(desc) for desc in state_desc]


def floors(ranges: np.ndarray, groups: Sequence[str]) -> np.ndarray:
    """The least range of each dimension, ``[D]``, from the ranges of its group."""
    names = np.array(groups)
    limits = np.empty(len(ranges))
    for group in set(groups):
        inside = ranges[names == group]
        varying = inside[inside > NEGLIGIBLE * inside.max()]
        median = float(np.median(varying)) if varying.size else STILL_RANGE
        limits[names == group] = max(RELATIVE_FLOOR * median, ABSOLUTE_FLOOR)
    return limits


def widen(stats: NormStats, groups: Sequence[str]) -> tuple[NormStats, list[Floored]]:
    """Statistics with quantiles that are no closer than the floors; they must have extremes."""
    if stats.min is None or stats.max is None:
        raise ValueError("floors need min and max")
    limits = floors(stats.q99 - stats.q01, groups)
    q01, q99 = stats.q01.copy(), stats.q99.copy()
    found = []
    for dim in np.flatnonzero(stats.q99 - stats.q01 < limits).tolist():
        low, high, limit = float(stats.min[dim]), float(stats.max[dim]), float(limits[dim])
        found.append(
            Floored(dim, _kind(low, high, limit), float(stats.q01[dim]), float(stats.q99[dim]))
        )
        if high - low < limit:
            middle = (low + high) / 2 - (EPSILON / 2 if low == high else 0.0)
            low, high = middle - limit / 2, middle + limit / 2
        q01[dim], q99[dim] = low, high
    return replace(stats, q01=q01, q99=q99), found


def _kind(low: float, high: float, limit: float) -> str:
    if low == high:
        return "constant"
    return "near-constant" if high - low < limit else RARE_KIND


def apply_floors(file: NormStatsFile, descs: Mapping[str | None, Desc | None]) -> NormStatsFile:
    """Widen what is too close, note it in the file's ``opendm`` entry, and warn once.

    Args:
        file: exact statistics with extremes.
        descs: ``state_desc`` of each robot type.
    """
    profiles: dict[str | None, Profile] = {}
    notes: dict[str, dict[str, Any]] = {}
    named: list[str] = []
    for robot, profile in file.profiles.items():
        profiles[robot] = {}
        for key, stats in profile.items():
            groups = groups_of(descs.get(robot), len(stats.mean))
            profiles[robot][key], found = widen(stats, groups)
            if found:
                entries = notes.setdefault(robot or "", {})
                entries[key] = [entry.to_json() for entry in found]
                named.append(f"{robot or 'robot'} {key}: {_sentence(found, groups)}")
    if named:
        logger.warning("statistics widened, so that noise does not become ±1: %s", "; ".join(named))
    opendm = {**file.opendm, FLOORED_KEY: notes} if notes else dict(file.opendm)
    return NormStatsFile(profiles, file.default_robot_type, opendm)


def _sentence(found: Sequence[Floored], groups: Sequence[str]) -> str:
    return ", ".join(
        f"dimension {entry.dim} ({groups[entry.dim]}) is {REASONS[entry.kind]} "
        f"({entry.q01:.6g} to {entry.q99:.6g})"
        for entry in found
    )
