"""The one thread that runs the model: a bounded queue, and batches of what waits in it."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from opendm.errors import DataError
from opendm.infer.limits import RequestError
from opendm.infer.policy import Policy, Prepared
from opendm.infer.request import Request

logger = logging.getLogger(__name__)


MAX_FAILURES: Final = 5
"""One after the other, before the model is tried and the service may no longer be ready."""
MAX_WAITS: Final = 4
"""Windows that a batch waits in vain for requests that are being checked."""
CLOSE_TIMEOUT_S: Final = 10.0
"""How long the end waits for what the model works on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Actions ``[horizon, dim]`` and the seconds that their batch took."""

    actions: np.ndarray
    model_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    request: Request
    answer: "Future[Answer]"


class PolicyWorker:
    """Acts on requests in the order of their arrival, several at a time.

    Args:
        policy: what acts.
        num_steps: integration steps.
        max_queue: requests that may wait beside a full batch; more are refused.
        max_batch: most requests of a batch.
        window_s: how long a batch waits for each further request, until there are as many as
            were there at once before, and nobody is :meth:`expecting` one more; a lone client
            never waits.
        probe: acts on an observation that worked at the start, and raises if the model fails. It
            tells a broken model from requests that only their senders broke; without it, every
            failure counts as the model's.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        num_steps: int,
        max_queue: int,
        max_batch: int,
        window_s: float,
        probe: Callable[[], object] | None = None,
    ) -> None:
        self.policy = policy
        self.probe = probe
        self.num_steps = num_steps
        self.max_batch = max_batch
        self.capacity = max_queue + max_batch
        """Most requests that wait or run."""
        self.window_s = window_s
        self.batch_sizes: dict[int, int] = {}
        """How many batches of each size have run."""
        self._num_active = 1
        """Requests of the last batch and those that had come by its end."""
        self._num_expected = 0
        """Requests that are being checked."""
        self._lock = threading.Lock()
        self._num_failures = 0
        """In a row, that the model or a request may have caused."""
        self._working: Sequence[_Job] = ()
        """What the model works on."""
        self._queue: queue.Queue[_Job | None] = queue.Queue(self.capacity)
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Answer what waits, and stop; what hangs longer than ``timeout_s`` is given up.

        Requests that are given up get a 503 where somebody still waits for it; the log has their
        number.
        """
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(timeout_s)

    def _give_up(self, timeout_s: float) -> None:
        working, waiting = self._working, self._drain()
        self._queue.put_nowait(None)  # the thread ends when the model comes back
        logger.error(
            "the model still works after %g s; given up: %d requests that it works on and %d that "
            "wait",
            timeout_s,
            len(working),
            len(waiting),
        )
        _fail(
            [*working, *waiting], RequestError("the service ended before the model was done", 503)
        )

    def _drain(self) -> list[_Job]:
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None:
                    found.append(job)
        return found

    def submit(self, request: Request, answer: "Future[Answer]") -> None:
        """Queue a request, whose answer or failure goes into ``answer``.

        Raises:
            RequestError: the queue is full, or the worker has ended (503).
        """
        if not self._thread.is_alive():
            raise RequestError("the model's thread has ended", 503)
        job = _Job(request, answer)
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            raise RequestError("too many requests wait; try again", 503) from None

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """While a request is checked, which will be queued unless it is refused."""
        with self._lock:
            self._num_expected += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_expected -= 1

    def problem(self) -> str | None:
        """Why requests had better go elsewhere, if there is a reason."""
        if not self._thread.is_alive():
            return "the model's thread has ended"
        if self._num_failures >= MAX_FAILURES:
            return f"the model failed {self._num_failures} times in a row"
        return None

    def _run(self) -> None:
        is_open = True
        while is_open:
            jobs, is_open = self._next_batch()
            if jobs:
                self.batch_sizes[len(jobs)] = self.batch_sizes.get(len(jobs), 0) + 1
                try:
                    self._working = jobs
                    self._answer(jobs)
                except BaseException as error:  # noqa: BLE001 - nobody else would tell the clients
                    self._count_failure()
                    _fail(jobs, error)
                finally:
                    self._working = ()

    def _next_batch(self) -> tuple[list[_Job], bool]:
        first = self._queue.get()
        if first is None:
            return [], False
        jobs, num_waits = [first], 0
        while len(jobs) < self.max_batch:
            # after each, as the clients' next requests are read one after the other
            is_early = len(jobs) < self._num_active or self._num_expected > 0
            try:
                job = self._queue.get(timeout=self.window_s if is_early else 0.0)
            except queue.Empty:
                num_waits += 1
                if self._num_expected == 0 or num_waits == MAX_WAITS:
                    break
                continue
            if job is None:
                return jobs, False
            jobs.append(job)
        return jobs, True

    def _answer(self, jobs: Sequence[_Job]) -> None:
        start = time.perf_counter()
        ready: list[tuple[_Job, Prepared]] = []
        for job in jobs:
            if not job.answer.set_running_or_notify_cancel():
                continue
            try:
                ready.append((job, self.policy.prepare(job.request.observation)))
            except DataError as error:
                job.answer.set_exception(RequestError(str(error)))
            except Exception as error:  # noqa: BLE001 - the request's, and the thread must live
                job.answer.set_exception(error)
        if ready:
            self._act(ready, start)

    def _act(self, ready: Sequence[tuple[_Job, Prepared]], start: float) -> None:
        try:
            noise = self.policy.draw_noise([_generator(job.request.seed) for job, _ in ready])
            chunks = self.policy.act_prepared(
                [prepared for _, prepared in ready], num_steps=self.num_steps, noise=noise
            )
        except Exception as error:  # noqa: BLE001 - the request's, and the thread must live
            if len(ready) == 1:
                if isinstance(error, DataError):
                    error = RequestError(str(error))
                else:
                    self._count_failure()
                _fail([ready[0][0]], error)
                return
            logger.warning("a batch of %d failed; its requests run one by one", len(ready))
            for one in ready:
                self._act([one], start)
            return
        self._num_failures = 0
        taken_s = time.perf_counter() - start
        # before the answers, which a quick client follows up at once
        self._num_active = len(ready) + self._queue.qsize()
        for (job, _), chunk in zip(ready, chunks, strict=True):
            with contextlib.suppress(InvalidStateError):  # given up meanwhile
                job.answer.set_result(Answer(chunk, taken_s))

    def _count_failure(self) -> None:
        """One more failure in a row, unless the model still acts on what it can act on."""
        self._num_failures += 1
        if self._num_failures == MAX_FAILURES and self.probe is not None:
            try:
                self.probe()
            except Exception:
                logger.exception("the model fails on the observation of its start, too")
            else:
                self._num_failures = 0


def _fail(jobs: Sequence[_Job], error: BaseException) -> None:
    for job in jobs:
        with contextlib.suppress(InvalidStateError):  # answered, cancelled or given up meanwhile
            job.answer.set_exception(error)


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()  # from the operating system; touches no other generator
    else:
        generator.manual_seed(seed)
    return generator
