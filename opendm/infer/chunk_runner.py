"""``ActionChunkRunner``: a slow policy beside a fast control loop that never waits for it."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from opendm.errors import DataError

logger = logging.getLogger(__name__)

Seen = TypeVar("Seen")
Act = Callable[[Seen, np.ndarray], np.ndarray]
"""From an observation and the given beginning ``[K, dim]`` of its chunk to ``[horizon, dim]``."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What the robot shall do in one tick."""

    action: np.ndarray | None
    """``[dim]``; None before the first chunk exists."""
    is_held: bool
    """Whether the plan has run out, so that this repeats its last action."""


class ActionChunkRunner(Generic[Seen]):
    """Executes chunks tick by tick while a thread computes the next one.

    The loop calls :meth:`tick` with what it sees and gets an action at once. A new chunk is asked
    for when the thread is idle and at least ``replan_every`` ticks of the present one are done.
    The chunk's row 0 belongs to the tick of its observation; rows that passed while it was computed
    are skipped. The next ``num_given`` actions of the present chunk are handed to the policy as the
    beginning of the new one, which :func:`opendm.infer.real_time.act_from` continues.

    A policy that fails, or whose chunk is none (:func:`check_chunk`), leaves the present chunk in
    force; the error is in :attr:`error` until a call succeeds, and the next tick tries again.

    Args:
        act: the policy; called in the thread only.
        replan_every: ticks between two observations that are acted on.
        num_given: actions that the policy is given; at least the ticks that it takes.
    """

    def __init__(self, act: "Act[Seen]", *, replan_every: int = 1, num_given: int = 0) -> None:
        self.error: Exception | None = None
        self._act = act
        self._replan_every = replan_every
        self._num_given = num_given
        self._now = -1
        self._planned_at = -replan_every
        self._chunk: np.ndarray | None = None
        self._starts_at = 0
        self._order: tuple[int, Seen, np.ndarray] | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="chunks", daemon=True)
        self._thread.start()

    def tick(self, observation: "Seen") -> Step:
        """The action of this tick; waits for nothing but a few assignments of the thread."""
        with self._changed:
            self._now += 1
            if self._order is None and self._now - self._planned_at >= self._replan_every:
                self._planned_at = self._now
                self._order = (self._now, observation, self._rest())
                self._changed.notify()
            if self._chunk is None:
                return Step(None, is_held=False)
            row = self._now - self._starts_at
            last = len(self._chunk) - 1
            return Step(self._chunk[min(row, last)].copy(), is_held=row > last)

    def close(self) -> None:
        """Stop; a call in progress is waited for."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _rest(self) -> np.ndarray:
        """The next actions of the present chunk, for the new one to begin with."""
        if self._chunk is None:
            return np.zeros((0, 0), np.float32)
        row = self._now - self._starts_at
        return self._chunk[row : row + self._num_given].copy()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._order is not None or self._is_closed)
                if self._is_closed or self._order is None:
                    return
                starts_at, observation, given = self._order
            try:
                chunk = np.array(self._act(observation, given), dtype=np.float32)
                check_chunk(chunk, self._chunk)
            except Exception as error:  # the robot's loop must go on
                logger.warning("the policy failed; the present chunk stays in force", exc_info=True)
                with self._changed:
                    self.error, self._order = error, None
            else:
                with self._changed:
                    self.error, self._order = None, None
                    self._chunk, self._starts_at = chunk, starts_at


def check_chunk(chunk: np.ndarray, present: np.ndarray | None) -> None:
    """Refuse what no robot can execute.

    Raises:
        DataError: not finite ``[horizon, dim]`` with rows, or another dim than the present chunk.
    """
    dim = "dim" if present is None else present.shape[1]
    if chunk.ndim != 2 or 0 in chunk.shape or dim not in ("dim", chunk.shape[1]):
        raise DataError(f"the chunk has shape {list(chunk.shape)}; expected [horizon, {dim}]")
    if not np.isfinite(chunk).all():
        raise DataError("the chunk is not finite")
