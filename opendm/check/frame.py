"""One line of an episode: everything that is wrong with it, not only the first thing."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from opendm.check.problem import RECORD

MAX_PROMPT_CHARACTERS: Final = 8192
"""A task is a sentence or two; a longer text was put there by mistake."""
PICTURE_TYPES: Final = ("image", "video")
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
KEY: Final = re.compile(rb'"[ \t\r]*:')
"""Found at every key of a line, and perhaps inside texts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with one field of a line."""

    field: str
    reason: str
    code: str


class _Object(dict[str, Any]):
    """A JSON object that remembers which of its keys came twice."""

    repeated: tuple[str, ...] = ()

    @classmethod
    def from_pairs(cls, pairs: list[tuple[str, Any]]) -> "_Object":
        found = cls(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            found.repeated = tuple(name for name in found if names.count(name) > 1)
        return found


def parse(line: bytes, *, is_cut: bool) -> tuple[dict[str, Any] | None, list[Finding]]:
    """A line as a record, or None, and what is wrong with its text.

    Args:
        line: the bytes without the line end.
        is_cut: whether the file ends without a line end, here.
    """
    try:
        frame = orjson.loads(line)
        if type(frame) is dict and len(KEY.findall(line)) == _num_keys(frame):
            return frame, []
        refusal = ""
    except orjson.JSONDecodeError as error:
        refusal = str(error)
    findings: list[Finding] = []
    if line.startswith(BYTE_ORDER_MARK):
        line = line.removeprefix(BYTE_ORDER_MARK)
        refusal = ""
        findings.append(Finding(RECORD, "begins with a byte order mark; save as UTF-8 without it",
                                "byte_order_mark"))  # fmt: skip
    parsed, wrong = _parse_slowly(line, is_cut=is_cut)
    findings += wrong
    if not isinstance(parsed, _Object):
        return None, findings
    findings += [
        Finding(name, "appears twice; JSON readers keep one of the two", "duplicate_key")
        for name in _repeated(parsed)
    ]
    if refusal and not findings and not _has_constants(parsed):
        findings.append(Finding(RECORD, f"is not valid JSON ({refusal})", "json"))
    return parsed, findings


def _num_keys(frame: dict[str, Any]) -> int:
    """Keys of an object and of the objects in it; deeper ones make the count too small."""
    return len(frame) + sum(len(value) for value in frame.values() if type(value) is dict)


def _parse_slowly(line: bytes, *, is_cut: bool) -> tuple[Any, list[Finding]]:
    try:
        parsed = json.loads(line.decode("utf-8"), object_pairs_hook=_Object.from_pairs)
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 text ({error.reason} at byte {error.start + 1} of the line)"
        return None, [Finding(RECORD, reason, "encoding")]
    except json.JSONDecodeError as error:
        if is_cut:
            reason = f"ends in the middle (column {error.colno}); the recorder was stopped here"
            return None, [Finding(RECORD, reason, "cut_line")]
        reason = f"is not valid JSON ({error.msg} at column {error.colno})"
        return None, [Finding(RECORD, reason, "json")]
    except (ValueError, RecursionError) as error:
        return None, [Finding(RECORD, f"is not valid JSON ({error})", "json")]
    if not isinstance(parsed, _Object):
        kind = type(parsed).__name__
        return None, [Finding(RECORD, f"is a {kind}; expected one JSON object", "not_an_object")]
    return parsed, []


def _repeated(parsed: _Object) -> list[str]:
    inner = [
        f"{key}.{name}"
        for key, value in parsed.items()
        if isinstance(value, _Object)
        for name in value.repeated
    ]
    return [*parsed.repeated, *inner]


def _has_constants(parsed: dict[str, Any]) -> bool:
    """Whether state or action hold what float64 cannot, which is reported with its place."""
    vectors = [parsed.get(name) for name in ("state", "action")]
    return any(isinstance(vector, list) and not _all_finite(vector) for vector in vectors)


def check_frame(frame: dict[str, Any], image_keys: Sequence[str]) -> list[Finding]:
    """What is wrong with a record's fields; lengths are compared once all are known."""
    findings = [*check_vector(frame, "state"), *check_prompt(frame)]
    if "action" in frame:
        findings += check_vector(frame, "action")
    for key in image_keys:
        findings += check_picture(frame, key)
    return findings


def check_vector(frame: dict[str, Any], field: str) -> Iterator[Finding]:
    """A field that must be a list of finite numbers."""
    if field not in frame:
        yield Finding(field, "is missing; every frame needs it", f"{field}_missing")
        return
    values = frame[field]
    if type(values) is not list:
        yield Finding(field, f"is {values!r:.60}; expected a list of numbers", "vector_type")
    elif not values:
        yield Finding(field, "is empty; expected a list of numbers", "vector_empty")
    elif not _all_finite(values):
        bad = [index for index, value in enumerate(values) if not _all_finite([value])]
        more = f" ({len(bad)} such values in the list)" if len(bad) > 1 else ""
        reason = f"is {values[bad[0]]!r:.40}; expected a finite number{more}"
        yield Finding(f"{field}[{bad[0]}]", reason, "vector_value")


def _all_finite(values: list[Any]) -> bool:
    """Whether all are numbers that float64 holds."""
    if not set(map(type, values)) <= {float, int}:
        return False
    try:
        return all(map(math.isfinite, values))
    except OverflowError:
        return False


def check_prompt(frame: dict[str, Any]) -> Iterator[Finding]:
    """The task."""
    if "prompt" not in frame:
        yield Finding("prompt", "is missing; every frame needs it", "prompt_missing")
        return
    prompt = frame["prompt"]
    if not isinstance(prompt, str):
        yield Finding("prompt", f"is {prompt!r:.60}; expected a text", "prompt_type")
    elif not prompt or prompt.isspace():
        yield Finding("prompt", "is empty; write the task", "prompt_empty")
    elif len(prompt) > MAX_PROMPT_CHARACTERS:
        reason = f"has {len(prompt)} characters; at most {MAX_PROMPT_CHARACTERS} are a task"
        yield Finding("prompt", reason, "prompt_long")


def check_picture(frame: dict[str, Any], key: str) -> Iterator[Finding]:
    """The reference to one camera's picture."""
    picture = frame.get(key)
    if key not in frame:
        yield Finding(key, "is missing; the registration expects this camera", "camera_missing")
        return
    if not isinstance(picture, dict):
        reason = f'is {picture!r:.60}; expected {{"type": "image", "url": "path"}}'
        yield Finding(key, reason, "picture_type")
        return
    url, kind = picture.get("url"), picture.get("type", "image")
    if not isinstance(url, str) or not url:
        given = f"{url!r:.40}" if "url" in picture else "missing"
        yield Finding(f"{key}.url", f"is {given}; expected a path", "picture_url")
    if kind not in PICTURE_TYPES:
        allowed = " or ".join(PICTURE_TYPES)
        yield Finding(f"{key}.type", f"is {kind!r:.40}; expected {allowed}", "picture_kind")
    if kind == "video":
        number = picture.get("frame_idx")
        if type(number) is not int or number < 0:
            given = f"{number!r:.40}" if "frame_idx" in picture else "missing"
            reason = f"is {given}; expected a whole number of 0 or more"
            yield Finding(f"{key}.frame_idx", reason, "frame_number")
