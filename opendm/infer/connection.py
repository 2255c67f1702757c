"""An HTTP connection that waits for a request's head for so long and no longer."""

import asyncio
import contextlib
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 10.0
"""For a new connection, and from the first byte of a later head; idle ones have uvicorn's timer."""


class TimedConnection(H11Protocol):
    """uvicorn's connection with a deadline for heads, and errors in JSON."""

    head_timeout_s = HEAD_TIMEOUT_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start to wait for the first head."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self.head_timeout_s, self._expire)

    def data_received(self, data: bytes) -> None:
        """Wait on, unless this completes a head."""
        super().data_received(data)
        if self._is_waiting():
            if self._deadline is None:
                self._deadline = self.loop.call_later(self.head_timeout_s, self._expire)
        elif self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        body = json.dumps({"error": msg}).encode("ascii")
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events = [
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        with contextlib.suppress(h11.LocalProtocolError):  # a reply is on its way already
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _is_waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expire(self) -> None:
        self._deadline = None
        if self._is_waiting() and not self.transport.is_closing():
            self.transport.close()
