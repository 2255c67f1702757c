"""The statistics file of a run against its data, and what the first batch looks like under it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from opendm.check.episodes import spread_rows
from opendm.check.problem import Problem
from opendm.data.config import DM05DataConfig
from opendm.data.normalize import NormStatsFile
from opendm.data.sanity import find_scale_problems
from opendm.data.stat_origin import differences
from opendm.data.transforms.normalization import Normalize
from opendm.errors import ConfigError, DataError

NUM_SAMPLES: Final = 64
OUTSIDE_SHARE: Final = 0.25
"""Of the values of a dimension, beyond the quantiles; 0.02 are there by their definition."""


def check_statistics(data: DM05DataConfig, chunk_size: int) -> Iterator[Problem]:
    """Whether the file that lies there can be read, is of this data, and makes sane values of it.

    Where none lies there, training computes it, and there is nothing to say.
    """
    path = data.norm_stats_path(chunk_size)
    if not path.is_file() and data.norm_stats_file is None:
        return
    try:
        file = NormStatsFile.load(path)
    except DataError as error:
        yield Problem(str(path), "statistics", str(error), code="statistics")
        return
    if data.norm_stats_file is not None:
        try:
            data.compute_norm_stats(chunk_size)
        except (ConfigError, DataError) as error:
            yield Problem(str(path), "statistics", str(error), code="stale_statistics")
            return
    elif changed := _changed(data, chunk_size, file):
        reason = f"have another {', '.join(changed)} than this run; they are computed again"
        yield Problem(str(path), "statistics", reason, "warning", "stale_statistics")
        return
    for part in data.parts():
        yield from check_scale(part, chunk_size, file, path)


def _changed(data: DM05DataConfig, chunk_size: int, file: NormStatsFile) -> list[str]:
    """Keys of the file's origin that differ; none where it has no origin."""
    if not file.opendm:
        return []
    origin = data._norm_stats_origin(chunk_size)  # noqa: SLF001 - what the file is compared with
    return list(differences(file.opendm, origin))


def check_scale(
    data: DM05DataConfig, chunk_size: int, file: NormStatsFile, path: Path
) -> Iterator[Problem]:
    """Samples from all over the dataset, normalised without clipping (T08, lerobot issue 2255)."""
    samples = data.build_norm_stats_dataset(chunk_size)
    normalise = Normalize(None, ("state", "action"), norm_stats_file=file, clip_to_bounds=False)
    rows: dict[str, list[np.ndarray]] = {"state": [], "action": []}
    try:
        for number in spread_rows(len(samples), NUM_SAMPLES):
            sample = normalise(samples[number])
            is_real = np.asarray(sample["action_mask"]).any(axis=-1)
            rows["state"].append(np.asarray(sample["state"])[None])
            rows["action"].append(np.asarray(sample["action"])[is_real])
    except DataError as error:
        yield Problem(str(path), "statistics", str(error), code="statistics_size")
        return
    for key, parts in rows.items():
        values = np.concatenate(parts)
        found = find_scale_problems(values, name=key)
        for line in found:
            yield Problem(str(path), key, f"{line}; wrong statistics?", "warning", "scale")
        if found:
            continue
        outside = (np.abs(values) > 1 + 1e-3).mean(axis=0)
        for dim in np.flatnonzero(outside > OUTSIDE_SHARE).tolist():
            reason = (
                f"lies outside q01 .. q99 in {outside[dim]:.0%} of the sampled values, where 2 % "
                "are expected; statistics of other data?"
            )
            yield Problem(str(path), f"{key}[{dim}]", reason, "warning", "scale")
