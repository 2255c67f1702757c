"""JSON of strangers: one object, every key once, and no more work than its length is worth."""

import json
from typing import Any

from opendm.infer.limits import (
    MAX_JSON_CONTAINERS,
    MAX_JSON_SEPARATORS,
    MAX_NUMBER_DIGITS,
    RequestError,
)


def parse_object(text: bytes) -> dict[str, Any]:
    """A JSON object. NaN, infinities and numbers beyond float64 come out as such floats.

    They are left to the fields' own checks, which can say where they stand.

    Raises:
        RequestError: not JSON in UTF-8, not an object, a key twice, or nested or split too far.
    """
    value = parse_value(text)
    if not isinstance(value, dict):
        raise RequestError(f"the body is a JSON {json_type(value)}; expected an object")
    return value


def parse_value(text: bytes) -> Any:
    """Any JSON value, with the checks of :func:`parse_object`.

    Raises:
        RequestError: see there.
    """
    if text.count(b",") > MAX_JSON_SEPARATORS:
        raise RequestError(f"the JSON text has more than {MAX_JSON_SEPARATORS} commas", 413)
    if text.count(b"[") + text.count(b"{") > MAX_JSON_CONTAINERS:
        raise RequestError(f"the JSON text has more than {MAX_JSON_CONTAINERS} brackets")
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_integer,
        )
    except UnicodeDecodeError as error:
        raise RequestError(f"the text is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"the text is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise RequestError("the JSON text is nested too deeply") from None


def json_type(value: Any) -> str:
    """JSON's word for the type of a parsed value."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RequestError(f"key {key!r:.60} stands twice in one object")
        found[key] = value
    return found


def _integer(digits: str) -> "int | float":
    return int(digits) if len(digits) <= MAX_NUMBER_DIGITS else float(digits)
