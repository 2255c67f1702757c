"""``scan_piece``: lines of a JSONL file as arrays, up to the first record that is bad.

Whole blocks of lines are parsed and checked at once; only a block in which something is wrong is
read again line by line, to say what.
"""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from opendm.data.episodes import MAX_LINE_BYTES, Sizes, check_record, parse_frame
from opendm.data.jsonl_files import first_line, line_number, open_data
from opendm.errors import DataError

BLOCK_BYTES: Final = 1 << 20
"""Lines that are parsed at once: their objects stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole lines of a file."""

    number: int
    """Of the file in the listing."""
    path: Path
    name: str
    start: int
    stop: int


@dataclass(eq=False, slots=True)
class Scanned:
    """Frames of a piece up to its first bad record."""

    number: int
    has_actions: bool
    state: np.ndarray
    action: np.ndarray
    prompts: list[str]
    """The different ones, in the order of their first frames."""
    task: np.ndarray
    position: np.ndarray
    num_bytes: np.ndarray
    problem: str | None
    """``file:line: reason`` of the first bad record."""
    num_lost: int
    """Frames from that record on."""
    sha256: str | None
    """Of the whole file; the first piece of a file has it."""


def scan_piece(piece: Piece, sizes: Sizes) -> Scanned:
    """Read and check a piece.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open_data(piece.path) as file:
            sha256 = None if piece.start else hashlib.file_digest(file, "sha256").hexdigest()
            has_actions = _records_actions(first_line(piece.path))
            reader = _Reader(piece, sizes, has_actions=has_actions)
            for offset, block in _blocks(file, piece.start, piece.stop):
                reader.add(offset, block)
    except OSError as error:
        raise DataError(f"{piece.path} cannot be read: {error}") from error
    return reader.result(sha256)


def _records_actions(line: bytes) -> bool:
    try:
        return "action" in parse_frame(line, "")
    except DataError:
        return False


class _Reader:
    """Rows of one piece; grows block by block."""

    def __init__(self, piece: Piece, sizes: Sizes, *, has_actions: bool) -> None:
        self.piece = piece
        self.sizes = sizes
        self.has_actions = has_actions
        self.problem: str | None = None
        self.num_lost = 0
        self._action_size = sizes.action if has_actions else 0
        self._ids: dict[str, int] = {}
        self._blocks: list[tuple[np.ndarray, ...]] = []

    def add(self, offset: int, block: bytes) -> None:
        """Read the lines of a block that begins at a byte of the file."""
        lines = block.split(b"\n")
        lengths = np.fromiter(map(len, lines), np.int64, len(lines))
        positions = offset + np.cumsum(lengths + 1) - lengths - 1
        if not all(lines) or any(map(bytes.isspace, lines)):
            kept = [index for index, line in enumerate(lines) if line and not line.isspace()]
            lines = [lines[index] for index in kept]
            lengths, positions = lengths[kept], positions[kept]
        if self.problem is not None:
            self.num_lost += len(lines)
        elif lines:
            fits = lengths.max() <= MAX_LINE_BYTES
            columns = (self._fast(lines) if fits else None) or self._exact(lines, positions)
            count = len(columns[0])
            self._blocks.append((*columns, positions[:count], lengths[:count].astype(np.int32)))

    def _fast(self, lines: list[bytes]) -> tuple[np.ndarray, ...] | None:
        """States, actions and tasks of lines in which nothing is wrong, otherwise None."""
        try:
            frames = list(map(orjson.loads, lines))
            states = [frame["state"] for frame in frames]
            prompts = [frame["prompt"] for frame in frames]
            actions = [frame["action"] for frame in frames] if self.has_actions else []
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return None
        if set(map(type, frames)) != {dict} or set(map(type, prompts)) != {str}:
            return None
        if not self.has_actions and any("action" in frame for frame in frames):
            return None
        state = _rows(states, self.sizes.state)
        action = _rows(actions, self.sizes.action) if actions else np.empty((len(lines), 0))
        if state is None or action is None:
            return None
        return state, action, self._tasks(prompts)

    def _exact(self, lines: list[bytes], positions: np.ndarray) -> tuple[np.ndarray, ...]:
        """States, actions and tasks up to the first bad line, which becomes the problem."""
        frames: list[dict[str, Any]] = []
        for line, position in zip(lines, positions, strict=True):
            try:
                frames.append(self._check(line, int(position)))
            except DataError as error:
                self.problem = str(error)
                self.num_lost = len(lines) - len(frames)
                break
        states = [frame["state"] for frame in frames]
        actions = [frame["action"] if self.has_actions else [] for frame in frames]
        tasks = self._tasks([frame["prompt"] for frame in frames])
        return _table(states, self.sizes.state), _table(actions, self._action_size), tasks

    def _check(self, line: bytes, position: int) -> dict[str, Any]:
        try:
            return check_record(line, "", self.sizes, has_actions=self.has_actions)
        except DataError:
            where = f"{self.piece.name}:{line_number(self.piece.path, position)}"
            return check_record(line, where, self.sizes, has_actions=self.has_actions)

    def _tasks(self, prompts: list[str]) -> np.ndarray:
        ids = self._ids
        return np.fromiter((ids.setdefault(p, len(ids)) for p in prompts), np.int32, len(prompts))

    def result(self, sha256: str | None) -> Scanned:
        """All that was read."""
        empty = (_table([], self.sizes.state), _table([], self._action_size),
                 np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32))  # fmt: skip
        columns = zip(*(self._blocks or [empty]), strict=True)
        state, action, task, position, num_bytes = map(np.concatenate, columns)
        return Scanned(
            self.piece.number, self.has_actions, state, action, list(self._ids), task, position,
            num_bytes, self.problem, self.num_lost, sha256,
        )  # fmt: skip


def _table(lists: list[Any], size: int | None) -> np.ndarray:
    """Checked lists as float64 rows; also where there are none."""
    width = (len(lists[0]) if lists else 0) if size is None else size
    return np.array(lists, np.float64).reshape(len(lists), width)


def _rows(lists: list[Any], size: int | None) -> np.ndarray | None:
    """Lists of numbers, all of one length, as float64 rows; None if they are not that.

    The numbers are finite: orjson refuses NaN, Infinity and what float64 cannot hold.
    """
    if set(map(type, lists)) != {list} or set(map(len, lists)) != {size}:
        return None
    if not set(map(type, chain.from_iterable(lists))) <= {float, int}:
        return None
    values = np.fromiter(chain.from_iterable(lists), np.float64, len(lists) * len(lists[0]))
    return values.reshape(len(lists), -1)


def _blocks(file: io.BufferedReader, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines of a byte range, with the place of the first."""
    file.seek(start)
    rest = b""
    while start + len(rest) < stop:
        data = file.read(min(BLOCK_BYTES, stop - start - len(rest)))
        if not data:
            break  # shorter than it was when it was listed; the next start sees it
        cut = data.rfind(b"\n") + 1
        if cut:
            yield start, rest + data[:cut]
            start += len(rest) + cut
            rest = data[cut:]
        else:
            rest += data
    if rest:
        yield start, rest
