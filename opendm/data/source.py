"""``Source``: a dataset of any format, as episodes of frames in the form of a JSONL record."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from opendm.data.index import FrameIndex, IndexedFile
from opendm.errors import DataError

Field = Literal["state", "action"]


def check_unchanged(path: Path, file: IndexedFile, found: os.stat_result) -> None:
    """Compare a file's size and time with those that were indexed.

    Raises:
        DataError: it is another file now; the message names it.
    """
    if (found.st_size, found.st_mtime_ns) != (file.num_bytes, file.mtime_ns):
        raise DataError(
            f"{path} has changed since it was indexed ({file.num_bytes} bytes then, "
            f"{found.st_size} now); start the run again"
        )


class Source(ABC):
    """Frames of a dataset.

    Args:
        root: folder that the index's paths are relative to.
        index: the dataset's index.
    """

    def __init__(self, root: Path, index: FrameIndex) -> None:
        self.root = root
        self.index = index

    @abstractmethod
    def record(self, episode: int, frame: int) -> dict[str, Any]:
        """A frame as a JSONL record: image records, ``state``, ``prompt`` and perhaps ``action``.

        Raises:
            DataError: the file has changed or cannot be read; the message names it.
        """

    @abstractmethod
    def line(self, episode: int, frame: int) -> str:
        """:meth:`record` as JSON text."""

    @abstractmethod
    def location(self, episode: int, frame: int) -> str:
        """Where a frame stands, for messages: ``file:line``, or file, episode and row."""

    def path(self, episode: int) -> Path:
        """The data file of an episode."""
        return self.root / self.index.files[self.index.episode_file[episode]].path

    def frames(self, episode: int) -> "EpisodeFrames":
        """The frames of one episode."""
        return EpisodeFrames(self, episode)


class EpisodeFrames(Sequence[str]):
    """The JSON lines of an episode, each read when it is asked for, and its numbers as arrays."""

    def __init__(self, source: Source, episode: int) -> None:
        self.source = source
        self.episode = episode
        self._rows = source.index.episode_rows(episode)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self.source.line(self.episode, number) for number in numbers]
        return self.source.line(self.episode, numbers)

    def vectors(self, field: Field, start: int, stop: int) -> np.ndarray:
        """Recorded values of frames ``start`` .. ``stop - 1``, float64 ``[stop - start, D]``."""
        index = self.source.index
        table = index.state if field == "state" else index.action
        first = self._rows.start
        return np.asarray(table[first + start : first + stop])
