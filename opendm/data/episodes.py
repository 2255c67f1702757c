"""One frame of an episode as text: what a record must hold, and errors that name what it lacks."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from opendm.errors import DataError

MAX_LINE_BYTES: Final = 64 << 20
"""A frame refers to its pictures; a longer line is no frame."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths that all states and all actions of a dataset have; None where not known yet."""

    state: int | None = None
    action: int | None = None


def location(path: "str | Path", frame_index: int) -> str:
    """``file:line`` of a frame, as editors count lines (blank lines included)."""
    wanted = frame_index
    if not Path(path).is_file():
        return f"{path}, frame {frame_index}"
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                if wanted == 0:
                    return f"{path}:{number}"
                wanted -= 1
    return f"{path}"


def parse_frame(line: "str | bytes", where: str) -> dict[str, Any]:
    """One frame.

    Args:
        line: the text.
        where: ``file:line`` for the message.

    Raises:
        DataError: the line is not a JSON object.
    """
    try:
        frame = json.loads(line if isinstance(line, str) else line.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not valid JSON ({error.msg} at column {error.colno}); expected one JSON "
            "object per line. Correct or remove the line"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 text ({error.reason} at byte {error.start + 1} of the line); "
            "correct or remove the line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON ({error}); correct the line") from error
    if not isinstance(frame, dict):
        raise DataError(
            f"{where} holds a {type(frame).__name__}; expected a JSON object with state, prompt "
            "and images"
        )
    return frame


def check_record(
    line: bytes, where: str, sizes: Sizes, *, has_actions: bool | None
) -> dict[str, Any]:
    """A frame whose state, action and prompt are what every frame's must be.

    Args:
        line: the text.
        where: ``file:line`` for the message.
        sizes: lengths that are expected.
        has_actions: whether the episode records actions; None where this is its first frame.

    Raises:
        DataError: says what is wrong.
    """
    if len(line) > MAX_LINE_BYTES:
        raise DataError(
            f"{where}: the line has {len(line)} bytes; a frame has at most {MAX_LINE_BYTES}. "
            "Is a line end missing, or a picture inside?"
        )
    frame = parse_frame(line, where)
    check_vector(frame, "state", sizes.state, where)
    if has_actions or (has_actions is None and "action" in frame):
        check_vector(frame, "action", sizes.action, where)
    elif "action" in frame:
        raise DataError(
            f"{where}: action is recorded here and not in the episode's first frame; record it in "
            "every frame of an episode, or in none"
        )
    if "prompt" not in frame:
        raise DataError(f"{where}: field 'prompt' is missing; every frame of an episode needs it")
    if not isinstance(frame["prompt"], str):
        raise DataError(f"{where}: prompt is {frame['prompt']!r:.60}; expected a text")
    check_text(frame["prompt"], f"{where}: prompt")
    return frame


def check_text(text: str, where: str) -> None:
    """Refuse what JSON can hold and no tokenizer reads.

    Raises:
        DataError: half of a surrogate pair, as programs leave that cut texts of UTF-16.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} {text!r:.60} holds {text[error.start]!r}, half of a character (a lone "
            "surrogate); correct the text"
        ) from error


def check_vector(frame: Mapping[str, Any], field: str, size: int | None, where: str) -> list[Any]:
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
        if not _is_finite(value):
            raise DataError(f"{where}: {field}[{index}] is {value!r:.40}; expected a finite number")
    if size is not None and len(values) != size:
        raise DataError(
            f"{where}: {field} has {len(values)} values, expected {size} (as in the frames before "
            "and in state_desc of the registration). Correct the line"
        )
    return values


def _is_finite(value: object) -> bool:
    """Whether a value is a number that float64 can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
