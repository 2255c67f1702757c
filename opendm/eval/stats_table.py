"""Statistics files as text: a table per robot and key, and what differs between two files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from opendm.constants.robot import ActionMode
from opendm.data.config import DM05DataConfig
from opendm.data.normalize import EXTREMES, VECTORS, NormStats, NormStatsFile
from opendm.data.stat_floors import FLOORED_KEY, RARE_KIND, floors, groups_of
from opendm.data.stat_origin import differences
from opendm.errors import ConfigError, DataError

CHECKPOINT_FILE: Final = "norm_stats.json"
OUTLIER_RANGES: Final = 3.0
"""Extremes this many ranges beyond the quantiles are outliers."""
COLUMNS: Final = ("min", "q01", "mean", "std", "q99", "max")

Row = Sequence[str]


def find_files(target: str, root: str) -> list[Path]:
    """The statistics files that ``target`` stands for.

    Args:
        target: a file, the folder of a checkpoint, or the name or folder of a dataset.
        root: where the files of datasets are.

    Raises:
        DataError: there is none.
    """
    path = Path(target)
    if path.is_file():
        return [path]
    if (path / CHECKPOINT_FILE).is_file():
        return [path / CHECKPOINT_FILE]
    name = path.resolve().name if path.is_dir() else target
    named = f"{name}_{'[0-9a-f]' * 16}"
    endings = (".json", f"_{'[0-9a-f]' * 12}.json")  # the second of settings of one's own
    found = sorted(path for ending in endings for path in Path(root).glob(named + ending))
    if not found:
        raise DataError(
            f"no statistics of {target!r}: it is no file and no checkpoint folder, and {root} has "
            f"none for a dataset of this name; make them with: opendm stats compute "
            f"--dataset-name {target}"
        )
    return found


def describe(path: Path) -> str:
    """Settings and tables of a file.

    Raises:
        DataError: the file is malformed.
    """
    file = NormStatsFile.load(path)
    lines = [str(path)]
    lines += [f"  {key}: {value}" for key, value in file.opendm.items() if key != FLOORED_KEY]
    for robot, profile in file.profiles.items():
        for key, stats in profile.items():
            default = " (default)" if robot is not None and robot == file.default_robot_type else ""
            lines += ["", f"{robot or 'any robot'}{default}: {key}"]
            lines += _align(_table(stats, _groups(file, stats), _notes(file, robot, key)))
    return "\n".join(lines)


def _groups(file: NormStatsFile, stats: NormStats) -> list[str]:
    return groups_of(file.opendm.get("state_desc"), len(stats.mean))


def _notes(file: NormStatsFile, robot: str | None, key: str) -> dict[int, dict[str, Any]]:
    entries = file.opendm.get(FLOORED_KEY, {}).get(robot or "", {}).get(key, [])
    return {entry["dim"]: entry for entry in entries}


def _table(
    stats: NormStats, groups: Sequence[str], notes: dict[int, dict[str, Any]]
) -> Iterator[Row]:
    yield ("dim", "kind", *COLUMNS, "flags")
    limits = floors(stats.q99 - stats.q01, groups)
    values = stats.to_json()
    for dim, group in enumerate(groups):
        numbers = [f"{values[name][dim]:.5g}" if name in values else "-" for name in COLUMNS]
        flags = _flags(stats, dim, float(limits[dim]), notes.get(dim))
        yield (str(dim), group, *numbers, " ".join(flags))


def _flags(stats: NormStats, dim: int, limit: float, note: dict[str, Any] | None) -> list[str]:
    low, high = float(stats.q01[dim]), float(stats.q99[dim])
    flags = []
    if note is not None:
        low, high = note["q01"], note["q99"]
        flags += [note["kind"], "floored"]
    elif high - low < limit:
        flags.append(_kind_without_note(low, high, float(stats.std[dim])))
    if stats.min is not None and stats.max is not None and high > low:
        beyond = max(low - float(stats.min[dim]), float(stats.max[dim]) - high)
        if beyond > OUTLIER_RANGES * (high - low):
            flags.append("outliers")
    return flags


def _kind_without_note(low: float, high: float, std: float) -> str:
    if low != high:
        return "near-constant"
    return "constant" if std == 0 else RARE_KIND


def _align(rows: Iterator[Row]) -> list[str]:
    table = list(rows)
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if place in (1, last) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def compare(left: Path, right: Path) -> list[str]:
    """What differs between two files, as lines; none where nothing does.

    Raises:
        DataError: a file is malformed.
    """
    first, second = NormStatsFile.load(left), NormStatsFile.load(right)
    lines = [
        f"{key}: {old} -> {new}"
        for key, (old, new) in differences(first.opendm, second.opendm).items()
    ]
    if first.default_robot_type != second.default_robot_type:
        lines.append(
            f"default_robot_type: {first.default_robot_type} -> {second.default_robot_type}"
        )
    tables = [
        {
            (robot, key): stats
            for robot, entry in file.profiles.items()
            for key, stats in entry.items()
        }
        for file in (first, second)
    ]
    for robot, key in sorted({*tables[0], *tables[1]}, key=str):
        name = f"{robot or 'any robot'}: {key}"
        pair = [table.get((robot, key)) for table in tables]
        if pair[0] is None or pair[1] is None:
            lines.append(f"{name} only in {left if pair[1] is None else right}")
        else:
            lines += _compare_one(name, pair[0], pair[1], _groups(first, pair[0]))
    return lines


def _compare_one(name: str, old: NormStats, new: NormStats, groups: Sequence[str]) -> list[str]:
    if len(old.mean) != len(new.mean):
        return [f"{name}: {len(old.mean)} dimensions -> {len(new.mean)}"]
    before, after = old.to_json(), new.to_json()
    fields = [field for field in (*VECTORS, *EXTREMES) if field in before and field in after]
    ranges = np.maximum(old.q99 - old.q01, new.q99 - new.q01)
    rows = [("dim", "kind", "most in", "old", "new", "share of the range")]
    for dim, group in enumerate(groups):
        gaps = [abs(after[field][dim] - before[field][dim]) for field in fields]
        most = int(np.argmax(gaps))
        if gaps[most] == 0:
            continue
        field, scale = fields[most], float(ranges[dim])
        share = f"{gaps[most] / scale:.3g}" if scale else "-"
        numbers = f"{before[field][dim]:.6g}", f"{after[field][dim]:.6g}"
        rows.append((str(dim), group, field, *numbers, share))
    return [name, *_align(iter(rows))] if len(rows) > 1 else []


def run_show(target: str, root: str) -> int:
    """Print the files that ``target`` stands for."""
    print("\n\n".join(describe(path) for path in find_files(target, root)))
    return 0


def run_compute(dataset: str, mode: ActionMode, chunk_size: int, **settings: Any) -> int:
    """Compute the statistics of a dataset as a training run would, and print them."""
    config = DM05DataConfig(dataset_name=dataset, action_mode=mode, **settings)
    config.validate()
    print(describe(config.compute_norm_stats(chunk_size)))
    return 0


def run_diff(left: str, right: str, root: str) -> int:
    """Print what differs; 0 if nothing does, otherwise 1."""
    pair = [find_files(target, root) for target in (left, right)]
    for target, files in zip((left, right), pair, strict=True):
        if len(files) > 1:
            raise ConfigError(
                f"{target!r} has several statistics files; give one of "
                f"{[str(file) for file in files]}"
            )
    lines = compare(pair[0][0], pair[1][0])
    print("\n".join(lines) if lines else "no difference")
    return int(bool(lines))
