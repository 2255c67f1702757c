"""The exact statistics of everything that training counts, per robot type."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Final

import numpy as np

from opendm.constants.robot import desc_value
from opendm.data.dataset import JsonlDataset
from opendm.data.norm_stats_job import (
    ActionDataset,
    collect_rows,
    default_robot,
    robot_name,
    used_indices,
)
from opendm.data.normalize import EXTREMES, VECTORS, NormStats, NormStatsFile, Profile
from opendm.data.stat_columns import (
    Columns,
    Desc,
    Part,
    RowColumns,
    SampledPart,
    StatisticsPart,
    part_columns,
    standard_plan,
)
from opendm.data.stat_floors import apply_floors
from opendm.data.stat_maths import Summary, summarize
from opendm.errors import ConfigError, DataError

NUM_THREADS: Final = 2
"""Dimensions computed at a time; numpy releases the interpreter's lock."""

Tables = dict[str | None, dict[str, list[Columns]]]


def compute_statistics(
    parts: Sequence[Part],
    *,
    default_robot_type: str | None = None,
    max_batches: int | None = None,
    num_threads: int = NUM_THREADS,
) -> NormStatsFile:
    """Count the state of every used frame and every real action of its chunk, all parts together.

    Nothing depends on the order of parts and episodes, nor on the number of threads. Quantiles are
    widened where ``stat_floors`` says so; one warning names the dimensions.

    Args:
        parts: the data, each with its own robot type and action transform.
        default_robot_type: who stands for a request without a type, where there are several.
        max_batches: count this many batches of 128 samples of all, spread at random; None for all.
        num_threads: dimensions computed at a time.

    Raises:
        ConfigError: robot types are mixed with none, or there are several and no default; or the
            parts of a robot differ in ``state_desc``.
        DataError: fewer than two rows, vectors of several lengths, or values beyond float32.
    """
    tables, descs = _gather(parts, max_batches)
    default = default_robot(list(tables), default_robot_type)
    profiles: dict[str | None, Profile] = {}
    with ThreadPoolExecutor(num_threads) as pool:
        for robot in sorted(tables, key=str):
            profiles[robot] = {
                key: _norm_stats(pool, columns, key) for key, columns in tables[robot].items()
            }
    return apply_floors(NormStatsFile(profiles, default), descs)


def part_of_dataset(dataset: ActionDataset, state_desc: Desc | None) -> Part:
    """A dataset as a part: from its index where its samples are the standard ones."""
    if type(dataset) is not JsonlDataset:
        return SampledPart(dataset, state_desc)
    transform = dataset.transforms
    if transform is None or standard_plan(transform) is None:
        return SampledPart(dataset, state_desc)
    episodes = [episode.number for episode in dataset.episodes]
    robot = robot_name(dataset.meta_data.get("robot_type"))
    angles = dataset.meta_data.get("angle_dims") or ()
    return StatisticsPart(dataset.source.index, episodes, robot, transform, state_desc, angles)


def _gather(
    parts: Sequence[Part], max_batches: int | None
) -> tuple[Tables, dict[str | None, Desc | None]]:
    sizes = [part.num_samples for part in parts]
    used = used_indices(sum(sizes), max_batches)
    is_capped = len(used) < sum(sizes)
    tables: Tables = {}
    descs: dict[str | None, Desc | None] = {}
    first = 0
    for part, size in zip(parts, sizes, strict=True):
        chosen = None
        if is_capped:
            numbers = np.asarray(used, np.int64)
            chosen = numbers[(numbers >= first) & (numbers < first + size)] - first
        first += size
        if size == 0 or (chosen is not None and not len(chosen)):
            continue
        for robot, found in _columns(part, chosen).items():
            _check_description(descs, robot, part.state_desc)
            for key, columns in found.items():
                tables.setdefault(robot, {}).setdefault(key, []).append(columns)
    return tables, descs


def _columns(part: Part, chosen: np.ndarray | None) -> dict[str | None, dict[str, Columns]]:
    if isinstance(part, SampledPart):
        numbers = range(len(part.samples)) if chosen is None else chosen.tolist()
        return {
            robot: {key: RowColumns(np.concatenate(rows)) for key, rows in entry.items()}
            for robot, entry in collect_rows(part.samples, numbers).items()
        }
    plan = standard_plan(part.action_transform)
    if plan is None:
        raise ConfigError(
            f"action transform {part.action_transform!r} is not the standard one; give its samples "
            "as a SampledPart"
        )
    return {part.robot_type: part_columns(part, plan, chosen)}


def _check_description(
    descs: dict[str | None, Desc | None], robot: str | None, desc: Desc | None
) -> None:
    given = None if desc is None else tuple(desc_value(part) for part in desc)
    if descs.setdefault(robot, given) != given:
        raise ConfigError(
            f"datasets of robot type {robot!r} have different state_desc: {descs[robot]} and "
            f"{given}; correct one, or give them robot types of their own"
        )


def _norm_stats(pool: ThreadPoolExecutor, columns: Sequence[Columns], key: str) -> NormStats:
    sizes = sorted({part.num_dims for part in columns})
    count = sum(part.num_rows for part in columns)
    if len(sizes) != 1:
        raise DataError(
            f"{key} has vectors of {sizes} values; all frames of a robot type need one length"
        )
    if count < 2:
        raise DataError(f"statistics of {count} rows; at least 2 are needed, add episodes")

    def one(dim: int) -> Summary:
        sources = [part.blocks(dim) for part in columns]

        def blocks() -> Iterator[np.ndarray]:
            return chain.from_iterable(source() for source in sources)

        try:
            return summarize(blocks, count)
        except OverflowError as error:
            raise DataError(f"{key} dimension {dim} goes beyond float32: {error}") from error

    dims = list(pool.map(one, range(sizes[0])))
    fields = (*VECTORS, *EXTREMES)
    vectors = zip(*((d.mean, d.std, d.q01, d.q99, d.min, d.max) for d in dims), strict=True)
    return NormStats(
        **{field: np.array(values) for field, values in zip(fields, vectors, strict=True)}
    )
