"""Start the ranks of one node; end with the exit code and the reason of the first that failed.

They run under torch's elastic agent, as with ``torchrun``, but without its traceback and with time
to save after a signal.
"""

import argparse
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from opendm import runtime
from opendm.errors import ConfigError

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: saved, safe to start again
DEFAULT_MASTER_PORT = 29500
RENDEZVOUS_TIMEOUT_S = 600
NO_REASON = "it recorded no reason; see its output"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class RankEnd(NamedTuple):
    """How a rank ended; a negative status is the signal that killed it."""

    rank: int
    status: int
    reason: str
    moment_s: float


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the ranks and torch's agent need on top of the launcher's environment."""
    return {
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1"),  # torchrun's default
        # torch's handlers raise anywhere, and lose ranks that are just starting; it insists on
        # one signal, and nobody sends this one.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGURG",
    }


def verdict(ended: Sequence[RankEnd], stopped_by: signal.Signals | None) -> tuple[int, str]:
    """The exit code, and the line to print, of ranks that did not end with 0."""
    own = [end for end in ended if end.status > 0]
    if stopped_by is None:
        first = min(ended, key=lambda end: end.moment_s)
        status, verb = first.status, "failed"
    else:  # a rank that could not save decides: the job must not look safe to start again
        first = min(own or ended, key=lambda end: (end.status == PREEMPTED, end.moment_s))
        status, verb = (first.status if own else -stopped_by), f"stopped after {stopped_by.name}"
    code = status if status > 0 else 128 - status
    return code, f"rank {first.rank} {verb} (exit code {code}): {first.reason}"


def run_ranks(spec: Any, grace_s: int) -> tuple[int, str]:
    """Run until every rank has ended; returns the exit code and the line to print, if any."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    class RankAgent(LocalElasticAgent):
        """Overrides what torch documents for subclasses, alike in torch 2.11 and 2.14."""

        asked_by: signal.Signals | None = None
        stopped_by: signal.Signals | None = None
        looks_s = (0.0, 0.0)  # when the ranks were looked at, the last two times
        failed_first: tuple[int, ...] = ()  # local ranks; the agent then stops the others
        alive: tuple[int, ...] = ()  # process groups

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            for signum in STOP_SIGNALS:
                if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup
                    signal.signal(signum, self._note_signal)
            pids = super()._start_workers(worker_group)
            self.alive = tuple(pids.values())
            return pids

        def _note_signal(self, signum: int, _frame: FrameType | None) -> None:
            if self.asked_by is None:  # a second signal does not interrupt the saving
                self.asked_by = signal.Signals(signum)
                _say(f"{self.asked_by.name}: the ranks have {grace_s} s to save and exit")

        def _monitor_workers(self, worker_group: Any) -> Any:
            context: Any = self._pcontext
            processes = {i: h.proc for i, h in context.subprocess_handlers.items()}
            if self.asked_by is not None:
                self.stopped_by = self.asked_by
                context.close(self.stopped_by, grace_s)
            self.looks_s = (self.looks_s[1], time.time())
            self.failed_first = tuple(i for i, process in processes.items() if process.poll())
            result = super()._monitor_workers(worker_group)
            if result.state.name != "HEALTHY":
                _kill_groups(self.alive)  # what a rank leaves behind, such as data loader workers
            self.alive = tuple(p.pid for p in processes.values() if p.returncode is None)
            return result

    with tempfile.TemporaryDirectory(prefix="opendm_launch_") as log_dir:
        agent = RankAgent(spec, DefaultLogsSpecs(log_dir=log_dir))
        ended = [_end(rank, failure, agent) for rank, failure in agent.run().failures.items()]
    return verdict(ended, agent.stopped_by) if ended else (0, "")


def _end(rank: int, failure: Any, agent: Any) -> RankEnd:
    if isinstance(failure.message, dict):
        reason = " ".join(failure.message["message"].split())
        recorded_s = failure.message["extraInfo"].get("time_s", failure.timestamp)
        return RankEnd(rank, failure.exitcode, reason, recorded_s)
    # An abort follows the failure of another rank more often than it causes one.
    moment_s = agent.looks_s[failure.exitcode == -signal.SIGABRT]
    if agent.failed_first and failure.local_rank not in agent.failed_first:
        moment_s = math.inf
    reason = f"killed by {failure.signal_name()}" if failure.exitcode < 0 else NO_REASON
    return RankEnd(rank, failure.exitcode, reason, moment_s)


def _kill_groups(leaders: Sequence[int]) -> None:
    for leader in leaders:
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


def launch(options: argparse.Namespace, grace_s: int) -> int:
    """Meet the other nodes, run the ranks, report."""
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    # Only now, since importing torch takes seconds, in which another job can take the port.
    port = master_port(options.master_port, options.nnodes, options.node_rank)
    node = (options.node_rank, options.nnodes, "opendm", RENDEZVOUS_TIMEOUT_S)
    spec = WorkerSpec(
        role="default",
        local_world_size=options.nproc_per_node,
        rdzv_handler=StaticTCPRendezvous(options.master_addr, port, *node),
        entrypoint=sys.executable,
        args=("-u", options.experiment, *options.arguments),
        max_restarts=0,
        master_addr=options.master_addr,
        master_port=port,
    )
    try:
        code, line = run_ranks(spec, grace_s)
    except DistError as error:
        reason = str(error).splitlines()[0]
        code, line = 1, f"node {options.node_rank} did not meet the others: {reason}"
    if line:
        print(line, file=sys.stderr, flush=True)
    return code


def master_port(given: int | None, num_nodes: int, node_rank: int) -> int:
    """The port where the ranks meet, tried out on the node that opens it."""
    port = DEFAULT_MASTER_PORT if given is None else given
    try:
        return port if node_rank > 0 else _open_once(port)
    except (OSError, OverflowError) as error:
        if given is not None or num_nodes > 1:
            problem = f"--master_port {port} cannot be opened ({error})"
            raise ConfigError(f"{problem}; give another one, the same on every node") from None
    free_port = _open_once(0)
    _say(f"port {port} is busy; the ranks meet at port {free_port} instead")
    return free_port


def _open_once(port: int) -> int:
    with socket.create_server(("", port)) as server:
        return int(server.getsockname()[1])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags in front of the experiment; what follows it is passed on as it is."""
    parser = argparse.ArgumentParser(prog="opendm.launch", allow_abbrev=False)
    for name, default in (("nproc_per_node", 1), ("nnodes", 1), ("node_rank", 0)):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--master_addr", "--master-addr", default="127.0.0.1")
    parser.add_argument("--master_port", "--master-port", type=int)
    parser.add_argument("experiment")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if options.nproc_per_node < 1:
        parser.error(f"--nproc_per_node {options.nproc_per_node}: give at least 1")
    if not 0 <= options.node_rank < options.nnodes:
        given = f"--node_rank {options.node_rank} --nnodes {options.nnodes}"
        parser.error(f"{given}: ranks of nodes go from 0 to the number of nodes - 1")
    if not Path(options.experiment).is_file():
        parser.error(f"the experiment {options.experiment!r} is not a file")
    return options


def _say(text: str) -> None:
    print(f"opendm.launch: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command line; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before ranks run there is nothing to save
    if "LOGLEVEL" not in environ:  # torch's own switch; its warnings repeat what is printed here
        agent_logger = logging.getLogger("torch.distributed.elastic")
        agent_logger.addHandler(logging.NullHandler())
        agent_logger.propagate = False
    grace = environ.get("OPENDM_SHUTDOWN_TIMEOUT_S", "300")
    if not grace.isdecimal():
        _say(f"OPENDM_SHUTDOWN_TIMEOUT_S={grace!r}: give a whole number of seconds")
        return ConfigError.exit_code
    try:
        return launch(parse(argv), int(grace))
    except ConfigError as error:
        _say(str(error))
        return error.exit_code


if __name__ == "__main__":
    os.environ.update(rank_environment(runtime.environment()))  # noqa: TID251 - torch reads it
    raise SystemExit(main(sys.argv[1:], runtime.environment()))
