"""One pass over the parquet files of a LeRobot dataset: all numbers into a ``FrameIndex``."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from opendm.data.index import FrameIndex, IndexedFile
from opendm.data.lerobot_fields import Columns, Fields, find_fields
from opendm.data.lerobot_meta import (
    EpisodeTable,
    LeRobotMeta,
    read_columns,
    read_episodes,
    read_meta,
    read_tasks,
)
from opendm.data.paths import check_inside, resolve_path
from opendm.errors import DataError

SCAN_THREADS: Final = 2
PLACE_COLUMNS: Final = ("episode_index", "frame_index", "task_index")


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """A whole episode."""

    number: int
    file: str
    state: np.ndarray
    action: np.ndarray
    task: np.ndarray
    start: int
    """Its first row in the file."""


@dataclass(frozen=True, slots=True)
class _File:
    """What one parquet file gave."""

    file: IndexedFile | None
    episodes: list[_Rows]
    problems: list[str]


def episode_name(number: int) -> str:
    """Name of an episode in the index."""
    return f"episode_{number:06d}"


def scan_lerobot(root: Path, columns: Columns | None = None, *, skip_bad: bool) -> FrameIndex:
    """Read and check the numbers of every frame; no picture and no video is opened.

    Args:
        root: the dataset's folder.
        columns: names of features, as in :func:`~opendm.data.lerobot_fields.find_fields`.
        skip_bad: leave out bad episodes (``dropped`` says which, and how many frames) instead of
            refusing the dataset.

    Raises:
        DataError: metadata or files are wrong; one message has all files and episodes.
    """
    meta = read_meta(root)
    scan = _Scan(meta, find_fields(meta, columns), read_episodes(meta), set(read_tasks(meta)))
    with ThreadPoolExecutor(SCAN_THREADS) as pool:
        files = list(pool.map(scan.read_file, *zip(*scan.files(), strict=True)))
    problems = tuple(problem for file in files for problem in file.problems)
    if problems and not skip_bad:
        advice = f"{root}: correct or remove these episodes, or skip them"
        raise DataError("\n".join([*problems, advice]))
    episodes = [episode for file in files for episode in file.episodes]
    if not episodes:
        raise DataError(f"{root}: none of {len(scan.table.number)} episodes is usable")
    return _join(meta, files, sorted(episodes, key=lambda e: e.number), problems)


def _join(
    meta: LeRobotMeta, files: list[_File], episodes: list[_Rows], dropped: tuple[str, ...]
) -> FrameIndex:
    used = {episode.file for episode in episodes}
    kept = [file.file for file in files if file.file is not None and file.file.path in used]
    file_number = {file.path: number for number, file in enumerate(kept)}
    task_index = np.concatenate([episode.task for episode in episodes])
    texts = read_tasks(meta)
    present = [number for number in texts if number in set(np.unique(task_index).tolist())]
    tasks = tuple(dict.fromkeys(texts[number] for number in present))
    to_task = {number: tasks.index(texts[number]) for number in present}
    lookup, place = np.unique(task_index, return_inverse=True)
    lengths = [len(episode.state) for episode in episodes]
    action = np.concatenate([episode.action for episode in episodes])
    return FrameIndex(
        files=tuple(kept),
        episodes=tuple(episode_name(episode.number) for episode in episodes),
        tasks=tasks,
        dropped=dropped,
        episode_file=np.array([file_number[episode.file] for episode in episodes], np.int32),
        has_actions=np.full(len(episodes), action.shape[1] > 0),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        state=np.concatenate([episode.state for episode in episodes]),
        action=action,
        task=np.array([to_task[number] for number in lookup.tolist()], np.int32)[place],
        position=np.concatenate([e.start + np.arange(len(e.state)) for e in episodes]),
        num_bytes=np.zeros(sum(lengths), np.int32),
        metadata=tuple(_indexed(meta.root, name) for name in meta.files()),
    )


def _indexed(root: Path, name: str) -> IndexedFile:
    path = root / name
    status = path.stat()
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return IndexedFile(name, status.st_size, status.st_mtime_ns, digest)


@dataclass(frozen=True, slots=True, eq=False)
class _Scan:
    meta: LeRobotMeta
    fields: Fields
    table: EpisodeTable
    tasks: set[int]

    def files(self) -> Iterator[tuple[str, list[int]]]:
        """Every parquet file with its episodes, as rows of the table."""
        if not len(self.table.number):
            raise DataError(f"{self.meta.root} lists no episode")
        by_file: dict[tuple[int, int], list[int]] = {}
        for row, (chunk, file) in enumerate(self.table.data.tolist()):
            by_file.setdefault((chunk, file), []).append(row)
        for (chunk, file), rows in by_file.items():
            yield self.meta.data_file(chunk, file), rows

    def read_file(self, name: str, rows: list[int]) -> _File:
        """One file; problems of single episodes do not touch the others."""
        path = self.meta.root / name
        try:
            path = resolve_path(name, str(self.meta.root))
            check_inside(path, str(self.meta.root))
            columns = [self.fields.state, *([self.fields.action] if self.fields.action else [])]
            data = read_columns(path, [*PLACE_COLUMNS, *columns])
            file = _indexed(self.meta.root, name)
            place = {key: _integers(data, key) for key in PLACE_COLUMNS}
            values = [vectors(data[key], key, self.meta.size(key)) for key in columns]
        except (DataError, OSError) as error:
            return _File(None, [], [f"{path}, {self._name(rows)}: {error}"])
        if self.fields.action is None:
            values.append(np.empty((len(values[0]), 0)))
        episodes, problems = [], []
        for row in rows:
            try:
                start = self._check_rows(row, place)
                part = slice(start, start + int(self.table.length[row]))
                state, action = (value[part] for value in values)
                _check_finite(self.fields, state, action, start)
            except DataError as error:
                problems.append(f"{path}, {self._name([row])}: {error}")
                continue
            task = place["task_index"][part]
            number = int(self.table.number[row])
            episodes.append(_Rows(number, name, state, action, task, start))
        return _File(file, episodes, problems)

    def _name(self, rows: list[int]) -> str:
        numbers = self.table.number[rows].tolist()
        frames = f"({self.table.length[rows].sum()} frames)"
        if len(numbers) == 1:
            return f"episode {numbers[0]} {frames}"
        if numbers[-1] - numbers[0] == len(numbers) - 1:
            return f"episodes {numbers[0]} to {numbers[-1]} {frames}"
        return f"episodes {', '.join(map(str, numbers))} {frames}"

    def _check_rows(self, row: int, place: dict[str, np.ndarray]) -> int:
        """The first of the episode's rows, which must follow each other without a gap."""
        found = np.flatnonzero(place["episode_index"] == self.table.number[row])
        length = int(self.table.length[row])
        if len(found) != length or not length:
            raise DataError(f"{len(found)} rows in the file; its length in meta is {length}")
        start = int(found[0])
        if found[-1] - start != length - 1:
            raise DataError("its rows do not follow each other")
        frames = place["frame_index"][start : start + length]
        if not np.array_equal(frames, np.arange(length)):
            wrong = int(np.argmax(frames != np.arange(length)))
            raise DataError(f"row {start + wrong}: frame_index {frames[wrong]}, expected {wrong}")
        unknown = set(np.unique(place["task_index"][start : start + length]).tolist()) - self.tasks
        if unknown:
            raise DataError(f"task_index {sorted(unknown)} is not in the tasks file of meta")
        return start


def _check_finite(fields: Fields, state: np.ndarray, action: np.ndarray, start: int) -> None:
    for name, values in ((fields.state, state), (fields.action, action)):
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            row, dim = bad[0].tolist()
            raise DataError(
                f"row {start + row}: {name}[{dim}] is {values[row, dim]}; expected a finite number "
                f"({len(bad)} such values in the episode)"
            )


def _integers(data: pa.Table, name: str) -> np.ndarray:
    column = data[name]
    if not pa.types.is_integer(column.type) or column.null_count:
        raise DataError(f"column {name} is {column.type} with {column.null_count} nulls; expected "
                        "integers")  # fmt: skip
    return column.to_numpy()


def vectors(column: pa.ChunkedArray, name: str, size: int) -> np.ndarray:
    """A numeric column or a column of lists as float64 ``[N, size]``; nulls are NaN.

    Raises:
        DataError: other types, or a row of another length.
    """
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    kind = array.type
    is_list = isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)
    number = kind.value_type if is_list else kind
    if not (pa.types.is_integer(number) or pa.types.is_floating(number)):
        raise DataError(f"column {name} is {kind}; expected numbers or lists of numbers")
    if is_list:
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
        wrong = np.flatnonzero(lengths != size)
        if len(wrong):
            raise DataError(
                f"row {wrong[0]}: {name} has {lengths[wrong[0]]} values, expected {size} as in "
                "meta/info.json"
            )
        array = array.flatten()
    elif size != 1:
        raise DataError(f"column {name} has one value a row, expected {size} as in meta/info.json")
    return pc.cast(array, pa.float64()).to_numpy(zero_copy_only=False).reshape(-1, size)
