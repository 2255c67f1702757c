"""Reading a request's body: never more than allowed, never longer than allowed."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from python_multipart.exceptions import MultipartParseError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from opendm.infer.limits import MAX_FORM_PARTS, Limits, RequestError


class BodyReader:
    """Reads bodies within limits that hold for each and for all together."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.buffered_bytes = 0

    @contextmanager
    def account(self) -> Iterator["BodyAccount"]:
        """Bytes read within are held against the common limit until the block ends."""
        account = BodyAccount(self)
        try:
            yield account
        finally:
            self.buffered_bytes -= account.size


class BodyAccount:
    """What one request holds in memory."""

    def __init__(self, reader: BodyReader) -> None:
        self.reader = reader
        self.size = 0

    async def read(self, request: HttpRequest) -> bytes:
        """The body.

        Raises:
            RequestError: too large (413), too slow (408), or too much is buffered (503).
        """
        limits = self.reader.limits
        length = request.headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal()):
            raise RequestError("Content-Length is not a number")
        if len(length) > 15 or int(length) > limits.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                return await self._read(request)
        except TimeoutError:
            raise RequestError(
                f"the body did not arrive within {limits.body_timeout_s:g} s", 408
            ) from None
        except ClientDisconnect:
            raise RequestError("the connection closed before the body was complete") from None

    async def _read(self, request: HttpRequest) -> bytes:
        body = bytearray()
        async for part in request.stream():
            self.size += len(part)
            self.reader.buffered_bytes += len(part)
            if self.size > self.reader.limits.max_body_bytes:
                raise self._too_large()
            if self.reader.buffered_bytes > self.reader.limits.max_buffered_bytes:
                raise RequestError("too many large requests at once; try again", 503)
            body += part
        return bytes(body)

    def _too_large(self) -> RequestError:
        limit = self.reader.limits.max_body_bytes
        return RequestError(f"the body has more than {limit} bytes", 413)


async def split_form(
    request: HttpRequest, body: bytes
) -> tuple[list[tuple[str, str]], list[tuple[str, bytes]]]:
    """Text fields and files of a ``multipart/form-data`` body, in order.

    Raises:
        RequestError: another content type, a broken form, or too many parts.
    """
    kind = request.headers.get("content-type", "")
    if kind.split(";")[0].strip().lower() != "multipart/form-data":
        raise RequestError("Content-Type must be multipart/form-data", 415)

    async def once() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(
        request.headers,
        once(),
        max_files=MAX_FORM_PARTS,
        max_fields=MAX_FORM_PARTS,
        max_part_size=max(1, len(body)),
    )
    parser.spool_max_size = len(body) + 1  # in memory, where the body is already
    try:
        form = await parser.parse()
    except (MultiPartException, MultipartParseError, UnicodeError, ValueError, KeyError):
        raise RequestError(
            "the form is not valid multipart/form-data, or has too many parts"
        ) from None
    texts: list[tuple[str, str]] = []
    files: list[tuple[str, bytes]] = []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            files.append((name, await value.read()))
        else:
            texts.append((name, value))
    await form.close()
    return texts, files
