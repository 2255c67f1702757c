"""What the ``meta`` folder of a LeRobot dataset (v2.0, v2.1, v3.0) says about it.

Layouts: https://huggingface.co/docs/lerobot/lerobot-dataset-v3, and for v2 the templates that every
``info.json`` carries itself.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from opendm.data.episodes import check_text
from opendm.errors import DataError

SUPPORTED_VERSIONS: Final = ("v2.0", "v2.1", "v3.0")
INFO_FILE: Final = "meta/info.json"
EPISODES_FOLDER: Final = "meta/episodes"


@dataclass(frozen=True, slots=True)
class LeRobotMeta:
    """``meta/info.json``."""

    root: Path
    version: str
    fps: int | float
    robot_type: str | None
    features: dict[str, dict[str, Any]]
    """Name to ``dtype``, ``shape`` and ``names``, in the order of the file."""
    chunks_size: int
    """Episodes per folder in v2."""
    data_path: str
    """Template of the parquet files."""
    video_path: str
    """Template of the videos; empty where there is none."""

    @property
    def is_v3(self) -> bool:
        """Whether a file holds many episodes."""
        return self.version.startswith("v3")

    def of_dtype(self, *dtypes: str) -> list[str]:
        """Names of the features of some dtypes."""
        return [name for name, entry in self.features.items() if entry.get("dtype") in dtypes]

    @property
    def cameras(self) -> list[str]:
        """Names of the cameras."""
        return self.of_dtype("video", "image")

    def size(self, feature: str) -> int:
        """Numbers of a feature per frame."""
        return math.prod(self.features[feature]["shape"])

    def data_file(self, chunk: int, file: int) -> str:
        """Relative path of a parquet file."""
        return _fill(self.data_path, chunk, file)

    def video_file(self, camera: str, chunk: int, file: int) -> str:
        """Relative path of a video."""
        return _fill(self.video_path, chunk, file, camera)

    def files(self) -> list[str]:
        """Relative paths of the files of ``meta`` that are read, in a fixed order."""
        if not self.is_v3:
            return [INFO_FILE, "meta/tasks.jsonl", "meta/episodes.jsonl"]
        episodes = sorted((self.root / EPISODES_FOLDER).rglob("*.parquet"))
        names = [path.relative_to(self.root).as_posix() for path in episodes]
        return [INFO_FILE, "meta/tasks.parquet", *names]


def _fill(template: str, chunk: int, file: int, video_key: str = "") -> str:
    try:
        return template.format(
            episode_chunk=chunk,
            chunk_index=chunk,
            episode_index=file,
            file_index=file,
            video_key=video_key,
        )
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise DataError(f"path template {template!r} in {INFO_FILE} has {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeTable:
    """Where the E episodes lie, in the order of their numbers."""

    number: np.ndarray
    """int64 ``[E]``."""
    length: np.ndarray
    """int64 ``[E]``: frames."""
    data: np.ndarray
    """int64 ``[E, 2]``: chunk and file (v2: chunk and episode) of the parquet file."""
    videos: dict[str, np.ndarray]
    """Per camera int64 ``[E, 3]``: chunk, file and the video's frame that is the first."""


def read_meta(folder: "str | Path") -> LeRobotMeta:
    """Read ``info.json``.

    Raises:
        DataError: it is missing or broken, or its version is unknown.
    """
    root = Path(folder)
    info = _read_info(root)
    version = info.get("codebase_version")
    if version not in SUPPORTED_VERSIONS:
        raise DataError(
            f"{root / INFO_FILE}: codebase_version is {version!r}; supported: "
            f"{', '.join(SUPPORTED_VERSIONS)}; convert the dataset with the tools of lerobot"
        )
    try:
        features = {name: dict(entry) for name, entry in info["features"].items()}
        meta = LeRobotMeta(
            root,
            version,
            info["fps"],
            info.get("robot_type"),
            features,
            int(info.get("chunks_size") or 1000),
            info["data_path"],
            info.get("video_path") or "",
        )
        wrong = [name for name in features if not _is_shape(features[name].get("shape"))]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{root / INFO_FILE} is incomplete ({type(error).__name__}: {error}); it needs fps, "
            "features and data_path"
        ) from error
    if wrong or not _is_rate(meta.fps):
        raise DataError(
            f"{root / INFO_FILE}: fps is {meta.fps!r} (expected a positive number), features "
            f"without a shape: {wrong}"
        )
    if meta.of_dtype("video") and not meta.video_path:
        raise DataError(f"{root / INFO_FILE} has video features but no video_path")
    return meta


def _read_info(root: Path) -> dict[str, Any]:
    path = root / INFO_FILE
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; a LeRobot dataset has it") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(info, dict):
        raise DataError(f"{path} holds a {type(info).__name__}; expected a JSON object")
    return info


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list | tuple) and all(isinstance(n, int) and n > 0 for n in shape)


def _is_rate(fps: Any) -> bool:
    return isinstance(fps, int | float) and math.isfinite(fps) and fps > 0


def read_tasks(meta: LeRobotMeta) -> dict[int, str]:
    """Task texts by ``task_index``, in its order.

    Raises:
        DataError: the file is missing or broken.
    """
    path = meta.root / "meta" / ("tasks.parquet" if meta.is_v3 else "tasks.jsonl")
    if meta.is_v3:
        table = read_columns(path, None)
        # pandas writes an index without a name under the second one
        text = "task" if "task" in table.column_names else "__index_level_0__"
        rows: Iterable[dict[str, Any]] = (
            {"task_index": row.get("task_index"), "task": row.get(text)}
            for row in table.to_pylist()
        )
    else:
        rows = _read_lines(path)
    try:
        tasks = dict(sorted((int(row["task_index"]), str(row["task"])) for row in rows))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} has a row without task_index and task ({error})") from error
    for text in tasks.values():
        check_text(text, f"{path}: task")
    return tasks


def read_episodes(meta: LeRobotMeta) -> EpisodeTable:
    """Lengths and places of all episodes.

    Raises:
        DataError: a file of ``meta`` is missing or broken.
    """
    if meta.is_v3:
        return _read_episodes_v3(meta)
    path = meta.root / "meta" / "episodes.jsonl"
    try:
        rows = sorted((int(row["episode_index"]), int(row["length"])) for row in _read_lines(path))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} has a row without episode_index and length ({error})") from error
    number, length = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    data = np.stack([number // meta.chunks_size, number], axis=1)
    first = np.pad(data, ((0, 0), (0, 1)))
    return EpisodeTable(number, length, data, dict.fromkeys(meta.of_dtype("video"), first))


def _read_episodes_v3(meta: LeRobotMeta) -> EpisodeTable:
    folder = meta.root / EPISODES_FOLDER
    files = sorted(folder.rglob("*.parquet"))
    if not files:
        raise DataError(f"{folder} has no *.parquet; a v3.0 dataset lists its episodes there")
    place = ("chunk_index", "file_index")
    data_names = [f"data/{name}" for name in place]
    names = ["episode_index", "length", *data_names]
    videos = {
        key: [f"videos/{key}/{name}" for name in (*place, "from_timestamp")]
        for key in meta.of_dtype("video")
    }
    names += [name for columns in videos.values() for name in columns]
    table = pa.concat_tables(read_columns(file, names) for file in files)
    values = {name: table[name].to_numpy() for name in names}
    order = np.argsort(values["episode_index"], kind="stable")

    def stack(columns: list[str]) -> np.ndarray:
        return np.stack([values[name][order] for name in columns], axis=1)

    for key, columns in videos.items():
        # recorders add up the lengths in floating point, so a frame's time is not exact
        values[columns[-1]] = np.rint(values[columns[-1]] * meta.fps)
        if not np.isfinite(stack(columns)).all():
            raise DataError(f"{folder}: videos/{key} has missing values; write the episodes again")
    return EpisodeTable(
        values["episode_index"][order].astype(np.int64),
        values["length"][order].astype(np.int64),
        stack(data_names).astype(np.int64),
        {key: stack(columns).astype(np.int64) for key, columns in videos.items()},
    )


def read_columns(path: Path, names: list[str] | None) -> pa.Table:
    """Some columns of a parquet file, or all.

    Raises:
        DataError: the file is missing, cut or has no such column.
    """
    try:
        with parquet.ParquetFile(path) as file:
            missing = set(names or ()) - set(file.schema_arrow.names)
            if not missing:
                return file.read(columns=names)
            columns = file.schema_arrow.names
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; a LeRobot dataset has it") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is not a whole parquet file ({error}); an interrupted recording leaves such "
            "files, so record or download it again"
        ) from error
    raise DataError(f"{path} has no column {', '.join(sorted(missing))}; it has {columns}")


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; a LeRobot v2 dataset has it") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip():
                rows.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}:{number} is not valid JSON: {error}") from error
    return rows
