"""JSONL episodes on disk: one file an episode, one line a frame, and errors that name both."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from opendm.errors import DataError

MAX_OPEN_EPISODES: Final = 16
"""Episodes whose lines a process keeps in memory."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One file and what of it can be sampled."""

    path: Path
    num_frames: int
    has_actions: bool

    @property
    def num_samples(self) -> int:
        """Frames that have a target: all, or all but the last where the next state is it."""
        return self.num_frames if self.has_actions else self.num_frames - 1


def find_episodes(jsonl_dir: str) -> list[Episode]:
    """All episodes below a folder, in the order of their paths.

    Raises:
        DataError: the folder is missing, or holds no frame that could be trained on.
    """
    root = Path(jsonl_dir)
    if not root.is_dir():
        raise DataError(
            f"dataset folder {jsonl_dir!r} does not exist; check jsonl_dir of the registration or "
            "give --data-config.jsonl-dir"
        )
    episodes = [_open_episode(path) for path in sorted(root.rglob("*.jsonl"))]
    if not any(episode.num_samples > 0 for episode in episodes):
        raise DataError(
            f"{jsonl_dir}: {len(episodes)} *.jsonl files without a usable frame; an episode has "
            "one JSON object per line, and at least two lines where no action is recorded"
        )
    return [episode for episode in episodes if episode.num_samples > 0]


def _open_episode(path: Path) -> Episode:
    lines = read_lines(str(path))
    has_actions = bool(lines) and "action" in parse_frame(lines[0], path, 0)
    return Episode(path, len(lines), has_actions)


@lru_cache(maxsize=MAX_OPEN_EPISODES)
def read_lines(path: str) -> Sequence[str]:
    """The non-blank lines of a file.

    Raises:
        DataError: the file cannot be read as text.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return tuple(line for line in text.split("\n") if line.strip())


def location(path: "str | Path", frame_index: int) -> str:
    """``file:line`` of a frame, as editors count lines (blank lines included)."""
    wanted = frame_index
    if not Path(path).is_file():
        return f"{path}, frame {frame_index}"
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                if wanted == 0:
                    return f"{path}:{number}"
                wanted -= 1
    return f"{path}"


def parse_frame(line: str, path: "str | Path", frame_index: int) -> dict[str, Any]:
    """One frame.

    Raises:
        DataError: the line is not a JSON object; the message names file and line.
    """
    try:
        frame = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{location(path, frame_index)} is not valid JSON ({error.msg} at column "
            f"{error.colno}); expected one JSON object per line. Correct or remove the line"
        ) from error
    if not isinstance(frame, dict):
        raise DataError(
            f"{location(path, frame_index)} holds a {type(frame).__name__}; expected a JSON object "
            "with state, prompt and images"
        )
    return frame


def check_vector(frame: dict[str, Any], field: str, size: int | None, where: str) -> list[float]:
    """A field of a frame as finite numbers.

    Args:
        frame: the parsed line.
        field: ``state`` or ``action``.
        size: the length that is expected, None for any.
        where: ``file:line`` for the message.

    Raises:
        DataError: the field is missing, not a list of finite numbers, or of another length.
    """
    if field not in frame:
        raise DataError(f"{where}: field {field!r} is missing; every frame of an episode needs it")
    values = frame[field]
    if not isinstance(values, list) or not values:
        raise DataError(f"{where}: {field} is {values!r:.60}; expected a list of numbers")
    for index, value in enumerate(values):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise DataError(f"{where}: {field}[{index}] is {value!r:.40}; expected a finite number")
    if size is not None and len(values) != size:
        raise DataError(
            f"{where}: {field} has {len(values)} values, expected {size} (as in the frames before "
            "and in state_desc of the registration). Correct the line"
        )
    return values


def iterate_frames(episode: Episode) -> Iterator[tuple[int, dict[str, Any]]]:
    """Index and content of every frame of an episode."""
    for index, line in enumerate(read_lines(str(episode.path))):
        yield index, parse_frame(line, episode.path, index)


def fingerprint(jsonl_dir: str) -> str:
    """Hash of names and contents of all episode files of a folder."""
    digest = hashlib.sha256()
    root = Path(jsonl_dir)
    for path in sorted(root.rglob("*.jsonl")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
