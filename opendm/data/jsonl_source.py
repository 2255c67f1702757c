"""``JsonlSource``: frames of JSONL episodes, each read where the index says that its line lies."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import orjson

from opendm.data.episodes import parse_frame
from opendm.data.index import FrameIndex
from opendm.data.jsonl_files import line_number
from opendm.data.jsonl_scan import scan_jsonl
from opendm.data.source import Source, check_unchanged
from opendm.errors import DataError

__all__ = ["JsonlSource", "scan_jsonl"]

MAX_OPEN_FILES: Final = 256
"""Of a source in one process."""


class JsonlSource(Source):
    """A folder of JSONL episodes.

    Args:
        root: the folder.
        index: what :func:`scan_jsonl` gave for it.
    """

    def __init__(self, root: Path, index: FrameIndex) -> None:
        super().__init__(root, index)
        self._open_files = OpenFiles()

    def record(self, episode: int, frame: int) -> dict[str, Any]:
        """A frame as it was recorded.

        Raises:
            DataError: the file has changed or cannot be read.
        """
        line = self._read(episode, frame)
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError:  # NaN in a field that nobody reads
            return parse_frame(line, self.location(episode, frame))

    def line(self, episode: int, frame: int) -> str:
        """The text of a frame."""
        return self._read(episode, frame).decode("utf-8").rstrip("\r")

    def location(self, episode: int, frame: int) -> str:
        """``file:line``, as editors count lines."""
        position = self.index.position[self.index.starts[episode] + frame]
        path = self.path(episode)
        return f"{path}:{line_number(path, int(position))}"

    def _read(self, episode: int, frame: int) -> bytes:
        index = self.index
        row = int(index.starts[episode]) + frame
        file = index.files[index.episode_file[episode]]
        path = self.root / file.path
        descriptor = self._open_files.get(path)
        check_unchanged(path, file, os.fstat(descriptor))
        return os.pread(descriptor, int(index.num_bytes[row]), int(index.position[row]))


class OpenFiles:
    """Descriptors of the files that were read last; another process opens its own."""

    def __init__(self) -> None:
        self._descriptors: OrderedDict[Path, int] = OrderedDict()

    def get(self, path: Path) -> int:
        """A descriptor to read with ``os.pread``, which needs no position of its own.

        Raises:
            DataError: the file cannot be opened.
        """
        found = self._descriptors.get(path)
        if found is not None:
            self._descriptors.move_to_end(path)
            return found
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        self._descriptors[path] = descriptor
        if len(self._descriptors) > MAX_OPEN_FILES:
            os.close(self._descriptors.popitem(last=False)[1])
        return descriptor

    def close(self) -> None:
        """Close all."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenFiles, ()

    def __del__(self) -> None:
        self.close()
