"""``FrameIndex``: all of a dataset but its pictures, one row per frame, memory-mapped from a cache.

Random access to a chunk of states or actions is a slice, whatever the length of the episode.
"""

import hashlib
import json
from dataclasses import Field, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from opendm.errors import DataError

FORMAT_VERSION: Final = 2
TABLE_FILE: Final = "index.json"
FILE_FIELDS: Final = ("files", "metadata")


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """One data file (JSONL or parquet) as it was when it was read."""

    path: str
    """Relative to the dataset's root, with ``/``."""
    num_bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, slots=True, eq=False)
class FrameIndex:
    """E episodes of N frames in all; frame f of episode e is row ``starts[e] + f``."""

    files: tuple[IndexedFile, ...]
    episodes: tuple[str, ...]
    """Names, ``[E]``: the JSONL file's relative path, or ``episode_000003``."""
    tasks: tuple[str, ...]
    """The different prompts."""
    dropped: tuple[str, ...]
    """One line ``file:line: reason`` per record that skip mode left out."""
    episode_file: np.ndarray
    """int32 ``[E]``: number in ``files``."""
    has_actions: np.ndarray
    """bool ``[E]``: whether the episode records actions."""
    starts: np.ndarray
    """int64 ``[E + 1]``: first row of every episode, and N."""
    state: np.ndarray
    """float64 ``[N, Ds]``, finite, in the recorded units."""
    action: np.ndarray
    """float64 ``[N, Da]``, finite; NaN where an episode has none; ``Da`` 0 where none has any."""
    task: np.ndarray
    """int32 ``[N]``: number in ``tasks``."""
    position: np.ndarray
    """int64 ``[N]``: byte offset of a line in its file, or row of a parquet file."""
    num_bytes: np.ndarray
    """int32 ``[N]``: length of a line without its end; 0 in parquet files."""
    metadata: tuple[IndexedFile, ...] = ()
    """Files that say how the data files are read: of a LeRobot dataset, those of ``meta``."""
    folder: Path | None = None
    """Where the arrays are mapped from; None where they are in memory."""

    @property
    def num_frames(self) -> int:
        """N."""
        return int(self.starts[-1])

    def episode_rows(self, episode: int) -> range:
        """Rows of an episode."""
        return range(int(self.starts[episode]), int(self.starts[episode + 1]))

    def num_samples(self, episode: int) -> int:
        """Frames that have a target: all, or all but the last where the next state is it."""
        return max(0, len(self.episode_rows(episode)) - (not self.has_actions[episode]))

    def fingerprint(self) -> str:
        """Hash of names and contents of all files."""
        digest = hashlib.sha256()
        for file in (*self.files, *self.metadata):
            digest.update(file.path.encode() + b"\0")
            digest.update(bytes.fromhex(file.sha256))
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write ``index.json`` and one ``.npy`` per array into an existing folder."""
        table: dict[str, Any] = {"format_version": FORMAT_VERSION}
        for field in _stored():
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                np.save(folder / f"{field.name}.npy", value, allow_pickle=False)
            else:
                table[field.name] = value
        for name in FILE_FIELDS:
            table[name] = [asdict(file) for file in getattr(self, name)]
        (folder / TABLE_FILE).write_text(json.dumps(table), encoding="utf-8")

    @classmethod
    def open(cls, folder: Path) -> "FrameIndex":
        """Map what :meth:`save` wrote.

        Raises:
            ValueError: the folder holds something else (also KeyError, TypeError, OSError).
        """
        table = json.loads((folder / TABLE_FILE).read_text(encoding="utf-8"))
        if table["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version {table['format_version']}")
        values: dict[str, Any] = {}
        for field in _stored():
            if field.name in FILE_FIELDS:
                values[field.name] = tuple(IndexedFile(**entry) for entry in table[field.name])
            elif field.name in table:
                values[field.name] = tuple(table[field.name])
            else:
                values[field.name] = _map(folder / f"{field.name}.npy")
        index = cls(**values, folder=folder)
        index.check_shapes()
        return index

    def check_shapes(self) -> None:
        """Compare the lengths of all columns.

        Raises:
            ValueError: they are not those of one dataset (also IndexError, TypeError).
        """
        num_frames, num_episodes = self.num_frames, len(self.episodes)
        rows = (self.state, self.action, self.task, self.position, self.num_bytes)
        per_episode = (self.episode_file, self.has_actions, self.starts[1:])
        if {len(column) for column in rows} != {num_frames}:
            raise ValueError("columns of different lengths")
        if {len(column) for column in per_episode} != {num_episodes}:
            raise ValueError("another number of episodes")
        if (self.state.ndim, self.action.ndim) != (2, 2):
            raise ValueError("states and actions are no tables")

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the files again instead of receiving their contents."""
        if self.folder is None:
            return FrameIndex, tuple(getattr(self, field.name) for field in _stored())
        return _reopen, (self.folder, self.fingerprint(), self.num_frames)


def _reopen(folder: Path, fingerprint: str, num_frames: int) -> FrameIndex:
    index = FrameIndex.open(folder)
    if (index.fingerprint(), index.num_frames) != (fingerprint, num_frames):
        raise DataError(f"the dataset behind {folder} has changed during the run; start it again")
    return index


def _stored() -> "list[Field[Any]]":
    return [field for field in fields(FrameIndex) if field.name != "folder"]


def _map(path: Path) -> np.ndarray:
    """A read-only view; a plain array, whose slices are cheaper than those of ``np.memmap``."""
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
