"""Normalisation by a robot's statistics: one affine map per dimension, and its inverse."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from opendm.data.dataset import Sample
from opendm.data.normalize import NormStats, NormStatsFile
from opendm.errors import DataError

EPSILON: Final = 1e-6
"""Added to ranges and deviations, as released policies were trained."""


def scale_and_offset(stats: NormStats, *, use_quantiles: bool) -> tuple[np.ndarray, np.ndarray]:
    """``(scale, offset)`` with normalised = (x - offset) / scale + shift, see :func:`normalize`."""
    if use_quantiles:
        return stats.q99 - stats.q01 + EPSILON, stats.q01
    return stats.std + EPSILON, stats.mean


def _is_erased(stats: NormStats) -> np.ndarray:
    return (stats.q01 == 0) & (stats.q99 == 0)


def normalize(
    x: np.ndarray, stats: NormStats, *, use_quantiles: bool = True, clip_to_bounds: bool = True
) -> np.ndarray:
    """Map [q01, q99] to [-1, 1], or to zero mean and unit deviation, per last axis; float32.

    A dimension whose quantiles are both zero becomes 0.
    """
    x = np.asarray(x, dtype=np.float64)
    scale, offset = scale_and_offset(stats, use_quantiles=use_quantiles)
    if not use_quantiles:
        return ((x - offset) / scale).astype(np.float32)
    if clip_to_bounds:
        x = np.clip(x, stats.q01, stats.q99)
    scaled = (x - offset) / scale * 2.0 - 1.0
    return np.where(_is_erased(stats), 0.0, scaled).astype(np.float32)


def denormalize(x: np.ndarray, stats: NormStats, *, use_quantiles: bool = True) -> np.ndarray:
    """The inverse of :func:`normalize` (of what was not clipped); float32."""
    x = np.asarray(x, dtype=np.float64)
    scale, offset = scale_and_offset(stats, use_quantiles=use_quantiles)
    if not use_quantiles:
        return (x * scale + offset).astype(np.float32)
    raw = (x + 1.0) / 2.0 * scale + offset
    return np.where(_is_erased(stats), 0.0, raw).astype(np.float32)


class _ByRobot:
    """What both directions share: keys, and the statistics of the sample's robot."""

    def __init__(
        self,
        norm_stats_path: "str | Path | None",
        norm_keys: Sequence[str],
        use_quantiles: bool = True,  # noqa: FBT001, FBT002 - public signature
        norm_stats_file: NormStatsFile | None = None,
    ) -> None:
        if norm_stats_file is None:
            if norm_stats_path is None:
                raise DataError("give norm_stats_path or norm_stats_file")
            norm_stats_file = NormStatsFile.load(norm_stats_path)
        self.norm_keys = tuple(norm_keys)
        self.use_quantiles = use_quantiles
        self.norm_stats_file = norm_stats_file

    def stats_for(self, sample: Sample) -> dict[str, NormStats]:
        """Statistics of the keys that the sample has.

        Raises:
            DataError: a vector has another length than its statistics.
        """
        profile = self.norm_stats_file.select(sample["meta_data"].get("robot_type"))
        found = {}
        for key in self.norm_keys:
            if key in profile and sample.get(key) is not None:
                size = np.asarray(sample[key]).shape[-1]
                if size != len(profile[key].mean):
                    raise DataError(
                        f"{key} has {size} values, the statistics have {len(profile[key].mean)}; "
                        "they were made for other data, recompute them"
                    )
                found[key] = profile[key]
        return found


class Normalize(_ByRobot):
    """Normalise a sample's vectors for the model.

    Args:
        norm_stats_path: statistics file, unless ``norm_stats_file`` is given.
        norm_keys: fields of a sample; one without statistics stays as it is.
        use_quantiles: map quantiles to [-1, 1] instead of using mean and deviation.
        norm_stats_file: the statistics.
        clip_to_bounds: clip to the quantiles first.
        required: fields that must have statistics.

    Raises:
        DataError: the file cannot be read, or a required field has no statistics.
    """

    def __init__(
        self,
        norm_stats_path: "str | Path | None",
        norm_keys: Sequence[str],
        use_quantiles: bool = True,  # noqa: FBT001, FBT002 - public signature
        norm_stats_file: NormStatsFile | None = None,
        clip_to_bounds: bool = True,  # noqa: FBT001, FBT002 - public signature
        *,
        required: Sequence[str] = (),
    ) -> None:
        super().__init__(norm_stats_path, norm_keys, use_quantiles, norm_stats_file)
        self.clip_to_bounds = clip_to_bounds
        for robot, profile in self.norm_stats_file.profiles.items():
            missing = [key for key in required if key not in profile]
            if missing:
                of_robot = "" if robot is None else f" of robot type {robot!r}"
                raise DataError(
                    f"statistics {norm_stats_path}{of_robot} have no {missing[0]!r}, which would "
                    "reach the model as it was recorded; compute them again"
                )

    def __call__(self, sample: Sample) -> Sample:
        for key, stats in self.stats_for(sample).items():
            sample[key] = normalize(
                sample[key],
                stats,
                use_quantiles=self.use_quantiles,
                clip_to_bounds=self.clip_to_bounds,
            )
        return sample


class Denormalize(_ByRobot):
    """Bring a policy's vectors back to the robot's units."""

    def __call__(self, sample: Sample) -> Sample:
        for key, stats in self.stats_for(sample).items():
            sample[key] = denormalize(sample[key], stats, use_quantiles=self.use_quantiles)
        return sample
