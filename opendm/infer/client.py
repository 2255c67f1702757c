"""A client of the inference service: numpy arrays in, numpy arrays out, no other dependency.

client = PolicyClient("http://127.0.0.1:7891")
actions = client.infer([front, wrist], state, "Pick up the cube")
"""

import base64
import http.client
import io
import json
import urllib.parse
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from PIL import Image

from opendm.errors import OpenDMError

CLOSED = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError)
"""What using a connection raises that the service closed for being idle."""


class ServiceError(OpenDMError):
    """The service answered with an error, or not at all; ``status`` is 0 then."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class PolicyClient:
    """One connection, kept open between requests and opened again when it was closed.

    Args:
        url: ``http://host:port`` of the service.
        token: of the service, where it has one.
        timeout_s: longest wait for a reply.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 30.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ServiceError(f"{url!r} is no http://host:port", 0)
        self._connection = http.client.HTTPConnection(
            parts.hostname, parts.port or 80, timeout=timeout_s
        )
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def __enter__(self) -> "PolicyClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def infer(
        self,
        images: "Sequence[np.ndarray | bytes]",
        state: Sequence[float] | np.ndarray,
        prompt: str,
        *,
        seed: int | None = None,
        history_images: "Sequence[np.ndarray | bytes]" = (),
        **words: str,
    ) -> np.ndarray:
        """Actions ``[horizon, dim]`` in the robot's units, float32.

        Args:
            images: one per camera, in the checkpoint's order: uint8 ``[height, width, 3]`` or the
                bytes of a JPEG, PNG or WebP file.
            state: in the robot's units.
            prompt: the task.
            seed: of the noise; the same request with the same seed gives the same actions.
            history_images: earlier pictures of the first camera, oldest first.
            words: ``robot_type``, ``speed`` or ``control_mode``.

        Raises:
            ServiceError: with the service's message and status.
        """
        observation: dict[str, Any] = {
            "prompt": prompt,
            "state": np.asarray(state, dtype=np.float64).tolist(),
            "images": {str(i): encode_picture(one) for i, one in enumerate(images, start=1)},
            **words,
        }
        if history_images:
            observation["history_images"] = [encode_picture(one) for one in history_images]
        sampling = {} if seed is None else {"seed": seed}
        reply = self._call("POST", "/v1/infer", {"observation": observation, "sampling": sampling})
        return np.asarray(reply["actions"], dtype=np.float32)

    def metadata(self) -> Mapping[str, Any]:
        """What the service says of its checkpoint.

        Raises:
            ServiceError: with the service's message and status.
        """
        return self._call("GET", "/metadata", None)

    def _call(self, method: str, path: str, content: "Mapping[str, Any] | None") -> dict[str, Any]:
        body = None if content is None else json.dumps(content, allow_nan=False).encode()
        is_open = self._connection.sock is not None
        try:
            return self._once(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # half a reply may be on its way; http.client opens another
            if not (is_open and isinstance(error, CLOSED)):
                raise ServiceError(f"no reply: {str(error) or type(error).__name__}", 0) from error
        return self._call(method, path, content)

    def _once(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        headers = {**self._headers, "Content-Type": "application/json"}
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        text = response.read()
        try:
            reply = json.loads(text)
        except ValueError:
            reply = {"error": f"the reply is not JSON: {text[:60]!r}"}
        if response.status != 200:
            raise ServiceError(str(reply.get("error", reply)), response.status)
        return reply


def encode_picture(picture: "np.ndarray | bytes") -> str:
    """Base64 of a picture file; arrays become PNG, which loses nothing."""
    if isinstance(picture, np.ndarray):
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "PNG", compress_level=1)
        picture = buffer.getvalue()
    return base64.b64encode(picture).decode("ascii")
