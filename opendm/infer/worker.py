"""The one thread that runs the model: a bounded queue, and batches of what waits in it."""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
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
"""Of the model, one after the other, before the service no longer calls itself ready."""


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
        window_s: how long a batch waits at most, after its first request, for as many as were
            there at once before; a lone client never waits.
    """

    def __init__(
        self, policy: Policy, *, num_steps: int, max_queue: int, max_batch: int, window_s: float
    ) -> None:
        self.policy = policy
        self.num_steps = num_steps
        self.max_batch = max_batch
        self.capacity = max_queue + max_batch
        """Most requests that wait or run."""
        self.window_s = window_s
        self.batch_sizes: dict[int, int] = {}
        """How many batches of each size have run."""
        self._num_active = 1
        """Requests of the last batch and those that had come by its end."""
        self._num_failures = 0
        """Of the model since it last succeeded."""
        self._queue: queue.Queue[_Job | None] = queue.Queue(self.capacity)
        self._thread = threading.Thread(target=self._run, name="policy", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self) -> None:
        """Answer what waits, and stop."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

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
                    self._answer(jobs)
                except BaseException as error:  # noqa: BLE001 - nobody else would tell the clients
                    self._num_failures += 1
                    _fail(jobs, error)

    def _next_batch(self) -> tuple[list[_Job], bool]:
        first = self._queue.get()
        if first is None:
            return [], False
        jobs, deadline = [first], time.monotonic() + self.window_s
        while len(jobs) < self.max_batch:
            left_s = deadline - time.monotonic() if len(jobs) < self._num_active else 0.0
            try:
                job = self._queue.get(timeout=max(0.0, left_s))
            except queue.Empty:
                break
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
                self._num_failures += 1
                ready[0][0].answer.set_exception(error)
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
            job.answer.set_result(Answer(chunk, taken_s))


def _fail(jobs: Sequence[_Job], error: BaseException) -> None:
    for job in jobs:
        if not job.answer.done():
            job.answer.set_exception(error)


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()  # from the operating system; touches no other generator
    else:
        generator.manual_seed(seed)
    return generator
