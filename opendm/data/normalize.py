"""Statistics of a robot's states and actions: computed exactly, kept in one JSON file."""

import json
import logging
import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from opendm.data.stat_maths import QUANTILES, mean_and_std
from opendm.errors import DataError

logger = logging.getLogger(__name__)

VECTORS: Final = ("mean", "std", "q01", "q99")
EXTREMES: Final = ("min", "max")
REMEDY: Final = "correct the file or delete it, and it is computed again"

Profile = dict[str, "NormStats"]


@dataclass(frozen=True, slots=True, eq=False)
class NormStats:
    """Mean, standard deviation, 1 % and 99 % quantiles and extremes, float64 ``[D]`` each.

    Files of the public framework have no extremes.
    """

    mean: np.ndarray
    std: np.ndarray
    q01: np.ndarray
    q99: np.ndarray
    min: np.ndarray | None = None
    max: np.ndarray | None = None

    @classmethod
    def from_json(cls, entry: Any, where: str) -> "NormStats":
        """Read one entry of a file; ``min`` and ``max`` count where both are there.

        Raises:
            DataError: the entry is incomplete or holds impossible numbers.
        """
        if not isinstance(entry, dict):
            raise DataError(f"{where} is {entry!r:.40}; expected an object with {VECTORS}")
        has_extremes = all(entry.get(name) is not None for name in EXTREMES)
        names = (*VECTORS, *EXTREMES) if has_extremes else VECTORS
        vectors = {name: _vector(entry, name, where) for name in names}
        sizes = {name: len(vector) for name, vector in vectors.items()}
        if len(set(sizes.values())) != 1:
            raise DataError(f"{where} has vectors of lengths {sizes}; expected one; {REMEDY}")
        if (vectors["std"] < 0).any():
            raise DataError(f"{where}.std has negative values; {REMEDY}")
        if (vectors["q01"] > vectors["q99"]).any():
            index = int(np.argmax(vectors["q01"] > vectors["q99"]))
            raise DataError(f"{where}: q01 exceeds q99 in dimension {index}; {REMEDY}")
        return cls(**vectors)

    def to_json(self) -> dict[str, list[float]]:
        """The entry of a file."""
        vectors = {name: getattr(self, name) for name in (*VECTORS, *EXTREMES)}
        return {name: vector.tolist() for name, vector in vectors.items() if vector is not None}


def _vector(entry: dict[str, Any], name: str, where: str) -> np.ndarray:
    values = entry.get(name)
    if not isinstance(values, list) or not values:
        given = f"{values!r:.40}" if name in entry else "missing"
        raise DataError(f"{where}.{name} is {given}; expected a list of numbers; {REMEDY}")
    for index, value in enumerate(values):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise DataError(
                f"{where}.{name}[{index}] is {value!r:.40}; expected a finite number; {REMEDY}"
            )
    return np.asarray(values, dtype=np.float64)


@dataclass
class NormStatsFile:
    """Statistics per robot type; a file without robot types has the single profile ``None``."""

    profiles: dict[str | None, Profile]
    default_robot_type: str | None = None
    opendm: dict[str, Any] = field(default_factory=dict)
    _has_warned: bool = field(default=False, init=False, repr=False, compare=False)

    @classmethod
    def load(cls, path: "str | Path") -> "NormStatsFile":
        """Read and check a file.

        Raises:
            DataError: the file is missing or malformed; the message names file and key.
        """
        content = _read_object(Path(path))
        default = content.get("default_robot_type")
        by_robot = content.get("norm_stats_by_robot")
        opendm = content.get("opendm", {})
        if not isinstance(opendm, dict):
            raise DataError(f"{path}: opendm is {opendm!r:.40}; expected an object; {REMEDY}")
        top = _read_profile(content.get("norm_stats"), f"{path}: norm_stats")
        if by_robot is None and default is None:
            return cls({None: top}, None, opendm)
        if not isinstance(by_robot, dict) or not by_robot:
            raise DataError(
                f"{path}: norm_stats_by_robot is {by_robot!r:.40}; expected an object with one "
                f"entry per robot type; {REMEDY}"
            )
        if default not in by_robot:
            raise DataError(
                f"{path}: default_robot_type is {default!r}; allowed: {sorted(by_robot)}; {REMEDY}"
            )
        profiles: dict[str | None, Profile] = {
            robot: _read_profile(profile, f"{path}: norm_stats_by_robot[{robot!r}]")
            for robot, profile in by_robot.items()
        }
        if _profile_json(top) != _profile_json(profiles[default]):
            raise DataError(
                f"{path}: norm_stats differs from norm_stats_by_robot[{default!r}], the profile "
                f"of default_robot_type; they must be equal; {REMEDY}"
            )
        return cls(profiles, default, opendm)

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        content: dict[str, Any] = {}
        if self.default_robot_type is not None:
            content["default_robot_type"] = self.default_robot_type
        content["norm_stats"] = _profile_json(self.profiles[self.default_robot_type])
        if self.default_robot_type is not None:
            content["norm_stats_by_robot"] = {
                str(robot): _profile_json(profile) for robot, profile in self.profiles.items()
            }
        if self.opendm:
            content["opendm"] = self.opendm
        return content

    def save(self, path: "str | Path") -> None:
        """Write the file so that a reader sees the old content or the new, never a part."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def select(self, robot_type: str | None, control_mode: str | None = None) -> Profile:  # noqa: ARG002 - public signature
        """The statistics of a robot.

        Args:
            robot_type: None stands for the file's default. A file without robot types serves any.
            control_mode: accepted for callers of the public framework; files do not differ by it.

        Raises:
            DataError: the file has robot types, but not this one.
        """
        if None in self.profiles:
            if robot_type is not None and not self._has_warned:
                self._has_warned = True
                logger.warning("statistics have no robot types; %r uses the only ones", robot_type)
            return self.profiles[None]
        robot = self.default_robot_type if robot_type is None else robot_type
        if robot not in self.profiles:
            raise DataError(
                f"no statistics for robot type {robot!r}; the file has "
                f"{sorted(map(str, self.profiles))}; correct robot_type or recompute them"
            )
        return self.profiles[robot]


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"statistics file {path} does not exist; compute it or check the path")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"statistics file {path} cannot be read: {error}; {REMEDY}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; expected an object; {REMEDY}")
    return content


def _read_profile(profile: Any, where: str) -> Profile:
    if not isinstance(profile, dict) or "action" not in profile:
        given = sorted(profile) if isinstance(profile, dict) else f"{profile!r:.40}"
        raise DataError(f"{where} has {given}; expected an object with 'action'; {REMEDY}")
    return {key: NormStats.from_json(entry, f"{where}.{key}") for key, entry in profile.items()}


def _profile_json(profile: Profile) -> dict[str, dict[str, list[float]]]:
    return {key: stats.to_json() for key, stats in profile.items()}


class RunningStats:
    """Statistics over all rows given so far, exact and independent of the rows' order."""

    def __init__(self) -> None:
        self._batches: list[np.ndarray] = []

    def update(self, batch: np.ndarray) -> None:
        """Count the rows of ``batch`` ``[n, D]``.

        Raises:
            DataError: the rows have another length than those before.
        """
        batch = np.asarray(batch)
        size = self._batches[0].shape[1] if self._batches else batch.shape[-1]
        if batch.ndim != 2 or batch.shape[1] != size:
            raise DataError(
                f"rows of shape {batch.shape} for statistics of {size} values; all frames of a "
                "robot type need vectors of one length"
            )
        self._batches.append(batch.copy())

    @property
    def count(self) -> int:
        """Rows so far."""
        return sum(len(batch) for batch in self._batches)

    def get(self) -> NormStats:
        """The statistics.

        Raises:
            DataError: fewer than two rows.
        """
        if self.count < 2:
            raise DataError(f"statistics of {self.count} rows; at least 2 are needed, add episodes")
        rows = np.concatenate(self._batches).astype(np.float64)
        columns = [np.sort(rows[:, dim]) + 0.0 for dim in range(rows.shape[1])]
        means = [_mean_and_std(column) for column in columns]
        quantiles = np.array([np.quantile(column, QUANTILES) for column in columns])
        return NormStats(
            mean=np.array([mean for mean, _ in means]),
            std=np.array([std for _, std in means]),
            q01=quantiles[:, 0],
            q99=quantiles[:, 1],
            min=np.array([column[0] for column in columns]),
            max=np.array([column[-1] for column in columns]),
        )


def _mean_and_std(column: np.ndarray) -> tuple[float, float]:
    low, high = float(column[0]), float(column[-1])
    return mean_and_std(lambda: iter([column]), len(column), low, high)
