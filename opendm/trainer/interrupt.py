"""Stop a run on SIGTERM, SIGINT or SIGHUP: between two steps, with a checkpoint, on all ranks."""

import multiprocessing
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

from opendm.errors import Interrupted, OpenDMError

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HINT: Final = b"\nstopping after this step; press Ctrl-C once more to stop without saving\n"


class StopRequest:
    """Handles the signals that end a run, inside ``with``.

    Until ``finish_steps`` a signal raises ``Interrupted`` at once: nothing is lost then. After it,
    a signal is remembered, and ``agreed`` tells every rank of it at the same step. A second SIGINT
    raises ``KeyboardInterrupt``; other repetitions change nothing.

    Args:
        announce: whether the first SIGINT writes a line to standard error.
    """

    def __init__(self, *, announce: bool = False) -> None:
        self.asked_by: signal.Signals | None = None
        """The signal; after ``agreed`` returned True it is the same on all ranks."""
        self._announce = announce
        self._remembers = False
        self._finish_steps = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        for signum in SIGNALS:
            # nohup ignores SIGHUP so that the run outlives its terminal
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the earlier handlers back.

        Raises:
            Interrupted: instead of an error that a signal before the first step brought about, such
                as the lost connection to a rank that the signal ended a moment earlier.
        """
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()
        is_ours = isinstance(error, OpenDMError) or not isinstance(error, Exception)
        if self.asked_by is not None and not self._finish_steps and not is_ours:
            raise self._before_steps() from error

    def finish_steps(self, device: torch.device) -> None:
        """From here on a signal waits for the end of the step; every rank must call this.

        Args:
            device: where the backend of the process group wants its tensors.

        Raises:
            Interrupted: a rank was asked to stop already; on every rank, so that none begins a step
                whose others have left.
        """
        self._remembers = True
        if self.agreed(device):
            raise self._before_steps()
        self._finish_steps = True

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked to stop: a collective, once per step on every rank.

        Args:
            device: where the backend of the process group wants its tensors.
        """
        if not dist.is_initialized():
            return self.asked_by is not None
        highest = torch.tensor(self.asked_by or 0, dtype=torch.int32, device=device)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        signum = int(highest)
        if signum:
            self.asked_by = signal.Signals(signum)
        return signum != 0

    def stop(self, saved: str) -> NoReturn:
        """End the run after ``agreed``.

        Args:
            saved: what a later start continues from, such as "checkpoint-7".

        Raises:
            Interrupted: always.
        """
        name = "a signal" if self.asked_by is None else self.asked_by.name
        raise Interrupted(f"stopped by {name} after saving {saved}; start again to continue")

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if self.asked_by is not None:
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.asked_by = signal.Signals(signum)
        if not self._remembers:
            raise self._before_steps()
        if signum == signal.SIGINT and self._announce:
            os.write(2, HINT)  # a stream may be in the middle of a write of its own

    def _before_steps(self) -> Interrupted:
        name = "a signal" if self.asked_by is None else self.asked_by.name
        return Interrupted(f"stopped by {name} before the first step; start again")


def outlive_signals(_worker: int) -> None:
    """Let a data loader's worker end when its rank ends it, and by no signal that asks to stop.

    A signal to the whole process group reaches the workers, too; without them the rank could not
    finish its step. For ``worker_init_fn``.
    """
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    # A handler does not learn who sent the signal, and torch's own ends the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    rank = multiprocessing.parent_process()  # the parent of the process may be a fork server
    if rank is not None:
        threading.Thread(target=_exit_when_asked_by, args=(rank.pid,), daemon=True).start()


def _exit_when_asked_by(rank_pid: int | None) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank_pid:
        pass
    os._exit(0)  # as torch's handler does; the main thread may wait for ever
