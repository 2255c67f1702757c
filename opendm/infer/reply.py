"""Replies: strict JSON, and errors that say nothing about the machine."""

import json
import logging
import uuid
from typing import Any, Final

import numpy as np
import orjson
from starlette.responses import Response

from opendm.infer.limits import RequestError

logger = logging.getLogger(__name__)

MAX_ERROR_CHARS: Final = 400


def json_reply(
    content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A reply whose body is JSON in the narrow sense: NaN and infinities raise ValueError."""
    body = json.dumps(content, allow_nan=False).encode("ascii")
    return Response(body, status, headers, media_type="application/json")


def error_reply(message: str, status: int, headers: dict[str, str] | None = None) -> Response:
    """``{"error": message}``, short and printable."""
    shown = "".join(char if char.isprintable() else "?" for char in message[:MAX_ERROR_CHARS])
    return json_reply({"error": shown}, status, headers)


def refusal(error: RequestError) -> Response:
    """The reply to a request that is wrong."""
    headers = {}
    if error.status == 503:
        headers["Retry-After"] = "1"
    if error.status in {408, 413}:
        headers["Connection"] = "close"  # the rest of the body is not read
    return error_reply(str(error), error.status, headers)


def internal_error(error: BaseException) -> Response:
    """A reply that names an entry of the log and nothing else."""
    number = uuid.uuid4().hex[:12]
    logger.error("request failed, id %s", number, exc_info=error)
    return json_reply(
        {"error": "internal error; its id is in the service's log", "id": number}, 500
    )


def chunk_reply(name: str, actions: np.ndarray, rest: dict[str, Any]) -> Response:
    """Actions ``[horizon, dim]`` as arrays under ``name``; float32 values survive exactly.

    Written by orjson, which takes a tenth of the time but would write NaN as null.

    Raises:
        ValueError: an action is not finite.
    """
    if not np.isfinite(actions).all():
        raise ValueError("actions that are not finite are no JSON")
    body = orjson.dumps({name: actions.tolist(), **rest})
    return Response(body, media_type="application/json")
