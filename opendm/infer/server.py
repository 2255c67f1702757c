"""The HTTP routes: from a request's bytes to a reply, with nothing of the model in between."""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from opendm.infer.body import BodyReader, split_form
from opendm.infer.limits import RequestError
from opendm.infer.reply import chunk_reply, error_reply, internal_error, json_reply, refusal
from opendm.infer.request import FORM_FIELDS, Contract, Request, parse_form, parse_infer
from opendm.infer.worker import Answer, PolicyWorker

logger = logging.getLogger(__name__)

PARSER_THREADS = 2
FILE_FIELDS = frozenset({"image", "history_images"})
TEXT_FIELDS = frozenset(FORM_FIELDS) - FILE_FIELDS

ENDING = RequestError("the service is ending", 503)

Endpoint = Callable[[HttpRequest], Awaitable[Response]]


@dataclass(eq=False)
class Service:
    """What the routes share."""

    worker: PolicyWorker
    contract: Contract
    metadata: dict[str, Any]
    token: str | None = None
    is_draining: bool = False
    """Set when the service is about to end: it is no longer ready."""
    num_open: int = 0
    """Requests between the end of their body and their reply."""
    num_dropped: int = 0
    """Requests that the end of the service left without an answer."""
    warned: bool = False
    """Whether an unknown field of a form was reported already."""
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(PARSER_THREADS, thread_name_prefix="parse")
    )

    def __post_init__(self) -> None:
        self.bodies = BodyReader(self.contract.limits)

    @contextmanager
    def slot(self) -> Iterator[None]:
        """A place among the requests that are worked on, taken before one is parsed.

        Raises:
            RequestError: there is none left (503).
        """
        if self.num_open >= self.worker.capacity:
            raise RequestError("too many requests wait; try again", 503)
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    async def answer(self, parse: Callable[[], Request]) -> Answer:
        """Check a request off the event loop, then wait for the model.

        The thread that checks also queues: the event loop is woken once, by the answer.
        """
        answer: Future[Answer] = Future()
        self.pool.submit(self._check_and_queue, parse, answer)
        return await asyncio.wrap_future(answer)

    def _check_and_queue(self, parse: Callable[[], Request], answer: "Future[Answer]") -> None:
        try:
            with self.worker.expecting():
                self.worker.submit(parse(), answer)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)

    def authorize(self, request: HttpRequest) -> None:
        """Refuse a client without the token.

        Raises:
            RequestError: 401.
        """
        if self.token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_known = hmac.compare_digest(given.strip().encode(), self.token.encode())
        if scheme.lower() != "bearer" or not is_known:
            raise RequestError("send the service's token as Authorization: Bearer TOKEN", 401)

    async def infer(self, request: HttpRequest) -> Response:
        """``POST /v1/infer``."""
        with self.bodies.account() as account:
            body = await account.read(request)
            with self.slot():
                answer = await self.answer(lambda: parse_infer(body, self.contract))
        latency_ms = round(1000 * answer.model_s, 3)
        return chunk_reply("actions", answer.actions, {"metadata": {"latency_ms": latency_ms}})

    async def process_frame(self, request: HttpRequest) -> Response:
        """``POST /process_frame``, for clients of the public framework's first service."""
        with self.bodies.account() as account:
            body = await account.read(request)
            with self.slot():
                texts, files = await split_form(request, body)
                self._check_form(texts, files)
                images = [file for name, file in files if name == "image"]
                history = [file for name, file in files if name == "history_images"]
                answer = await self.answer(
                    lambda: parse_form(dict(texts), images, history, self.contract)
                )
        latency_ms = round(1000 * answer.model_s, 3)
        return chunk_reply("response", answer.actions, {"model_latency_ms": latency_ms})

    def _check_form(
        self, texts: Sequence[tuple[str, str]], files: Sequence[tuple[str, bytes]]
    ) -> None:
        names = [name for name, _ in texts]
        for name in FORM_FIELDS:
            if names.count(name) > 1:
                raise RequestError(f"field {name!r} stands twice in the form")
        if FILE_FIELDS & set(names):
            raise RequestError("image and history_images must be files of the form")
        if TEXT_FIELDS & {name for name, _ in files}:
            raise RequestError("states and text must be plain fields of the form")
        unknown = [name for name, _ in (*texts, *files) if name not in FORM_FIELDS]
        if unknown and not self.warned:
            self.warned = True
            logger.warning("/process_frame: unknown fields such as %.40r are ignored", unknown[0])

    async def show_metadata(self, _request: HttpRequest) -> Response:
        """``GET /metadata``."""
        return json_reply(self.metadata)

    async def healthz(self, _request: HttpRequest) -> Response:
        """``GET /healthz``: the process answers."""
        return json_reply({"status": "ok"})

    async def readyz(self, _request: HttpRequest) -> Response:
        """``GET /readyz``: requests are served."""
        if self.is_draining:
            return refusal(ENDING)
        if problem := self.worker.problem():
            return error_reply(problem, 503)
        return json_reply({"status": "ready"})


def build_app(service: Service) -> Starlette:
    """The ASGI application; it neither starts nor stops the worker."""

    def guarded(endpoint: Endpoint, *, is_open: bool = False) -> Endpoint:
        async def run(request: HttpRequest) -> Response:
            try:
                if not is_open:
                    service.authorize(request)
                return await endpoint(request)
            except RequestError as error:
                return refusal(error)
            except asyncio.CancelledError:  # the time to end in order is over
                if not service.is_draining:
                    raise
                service.num_dropped += 1
                return refusal(ENDING)
            except Exception as error:  # noqa: BLE001 - the edge: whatever it is, it is a reply
                return internal_error(error)

        return run

    async def http_error(_request: HttpRequest, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return internal_error(error)
        headers = dict(error.headers or {})
        return error_reply(error.detail, error.status_code, headers)

    app = Starlette(
        routes=[
            Route("/v1/infer", guarded(service.infer), methods=["POST"]),
            Route("/process_frame", guarded(service.process_frame), methods=["POST"]),
            Route("/metadata", guarded(service.show_metadata), methods=["GET"]),
            Route("/healthz", guarded(service.healthz, is_open=True), methods=["GET"]),
            Route("/readyz", guarded(service.readyz, is_open=True), methods=["GET"]),
        ],
        exception_handlers={HTTPException: http_error, Exception: http_error},
    )
    app.router.redirect_slashes = False  # a redirect is no JSON
    return app
