"""Torch's elastic agent with OpenDM's manners: time to save, quick ends, and who is to blame."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Final

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from opendm.errors import Interrupted
from opendm.failure import EARLY_PHASES, failure_is_consequence, phase_of

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SETTLE_S: Final = 5
"""For ranks to report, once one lost contact; a rank that then still runs hangs."""
STACKS_S: Final = 0.5
"""For a rank that hangs to print its stacks."""
CLOSE_S: Final = 5
"""From asking the other ranks to end, after a failure, to killing them."""


class RankAgent(LocalElasticAgent):
    """Overrides what torch documents for subclasses, alike in torch 2.11 and 2.14.

    Args:
        spec: what to run.
        log_dir: folder of the ranks' error files.
        grace_s: how long the ranks may save after a signal.
        say: prints a line.
    """

    def __init__(
        self, spec: Any, log_dir: str, *, grace_s: int, say: Callable[[str], None]
    ) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=log_dir))
        self.stopped_by: signal.Signals | None = None
        self.looks_s = (0.0, 0.0)
        """When the ranks were looked at, the last two times."""
        self.failed_first: tuple[int, ...] = ()
        """Local ranks that ended by themselves and not with 0."""
        self.silent: Mapping[int, str] = MappingProxyType({})
        """Local ranks that the failed ones lost contact with, and why."""
        self._grace_s = grace_s
        self._say = say
        self._asked_by: signal.Signals | None = None
        self._alive: tuple[int, ...] = ()

    def error_file(self, local_rank: int) -> str:
        """Where a rank records why it exits."""
        context: Any = self._pcontext
        return context.error_files[local_rank]

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        for signum in STOP_SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup
                signal.signal(signum, self._note_signal)
        pids = super()._start_workers(worker_group)
        self._alive = tuple(pids.values())
        return pids

    def _note_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._asked_by is None:  # a second signal does not interrupt the saving
            self._asked_by = signal.Signals(signum)
            self._say(f"{self._asked_by.name}: the ranks have {self._grace_s} s to save and exit")

    def _monitor_workers(self, worker_group: Any) -> Any:
        context: Any = self._pcontext
        processes = {i: h.proc for i, h in context.subprocess_handlers.items()}
        if self._asked_by is not None:
            self.stopped_by = self._asked_by
            context.close(self.stopped_by, self._grace_s)
        self.looks_s = (self.looks_s[1], time.time())
        self.failed_first = _failed(processes)
        if self.failed_first and self.stopped_by is None:
            self._let_the_others_end(processes)
            context.close(signal.SIGTERM, CLOSE_S)
        result = super()._monitor_workers(worker_group)
        if result.state.name != "HEALTHY":
            _kill_groups(self._alive)  # what a rank leaves behind, such as data loader workers
        self._alive = tuple(p.pid for p in processes.values() if p.returncode is None)
        return result

    def _let_the_others_end(self, processes: Mapping[int, Any]) -> None:
        if all(processes[i].returncode == Interrupted.exit_code for i in self.failed_first):
            phases = {phase_of(self.error_file(i)) for i in self.failed_first}
            if not phases <= EARLY_PHASES:  # in these no rank has anything to save
                _wait(processes.values(), self._grace_s)
        elif self._all_lost_another(processes):
            _wait(processes.values(), SETTLE_S)
            self.failed_first = _failed(processes)
            if self._all_lost_another(processes):
                reported = [i for i in processes if Path(self.error_file(i)).exists()]
                self.silent = _silent(processes, reported)

    def _all_lost_another(self, processes: Mapping[int, Any]) -> bool:
        """Whether every failure so far follows from another; NCCL's watchdog then aborts."""
        return all(
            processes[i].returncode == -signal.SIGABRT or failure_is_consequence(self.error_file(i))
            for i in self.failed_first
        )


def _failed(processes: Mapping[int, Any]) -> tuple[int, ...]:
    return tuple(i for i, process in processes.items() if process.poll())


def _silent(processes: Mapping[int, Any], reported: Sequence[int]) -> dict[int, str]:
    left = {i: "it left early" for i, process in processes.items() if process.returncode == 0}
    if left:
        return left
    hung = [i for i, p in processes.items() if p.returncode is None and i not in reported]
    num_aborted = sum(process.returncode == -signal.SIGABRT for process in processes.values())
    if not reported and num_aborted <= len(hung):
        return {}  # an abort by itself, more likely than so many ranks that hang
    for i in hung:
        processes[i].send_signal(signal.SIGUSR2)  # see runtime.show_stacks_on_signal
    _wait([processes[i] for i in hung], STACKS_S)
    for i in hung:
        processes[i].kill()
    return dict.fromkeys(hung, "it hung, and the others waited in vain")


def _wait(processes: Iterable[Any], timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end_s - time.monotonic()))


def _kill_groups(leaders: Sequence[int]) -> None:
    for leader in leaders:
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
