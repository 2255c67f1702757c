"""Start the ranks of one node; end with the exit code and the reason of the first that failed.

They run under torch's elastic agent, as with ``torchrun``, but without its traceback, with time to
save after a signal, and with the rank named at which a failure began.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from opendm import runtime
from opendm.errors import ConfigError, Interrupted
from opendm.failure import phase_of

if TYPE_CHECKING:
    from opendm.rank_agent import RankAgent

PREEMPTED = Interrupted.exit_code
DEFAULT_MASTER_PORT = 29500
RENDEZVOUS_TIMEOUT_S = 600
NO_REASON = "it recorded no reason; see its output"


class RankEnd(NamedTuple):
    """How a rank ended; a negative status is the signal that killed it."""

    rank: int
    status: int
    reason: str
    moment_s: float
    phase: str = ""
    is_consequence: bool = False  # of another rank's end


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the ranks and torch's agent need on top of the launcher's environment."""
    return {
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1"),  # torchrun's default
        # torch's handlers raise anywhere, and lose ranks that are just starting; it insists on
        # one signal, and nobody sends this one.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGURG",
        runtime.LAUNCHER_PID_VARIABLE: str(os.getpid()),
    }


def verdict(ended: Sequence[RankEnd], stopped_by: signal.Signals | None) -> tuple[int, str]:
    """The exit code, and the line to print, of ranks that did not end with 0."""
    own = [end for end in ended if end.status > 0]
    if stopped_by is None:
        first = min(ended, key=_order)
        status, verb = first.status, "stopped" if first.status == PREEMPTED else "failed"
    else:  # a rank that could not save decides: the job must not look safe to start again
        first = min(own or ended, key=lambda end: (end.status == PREEMPTED, *_order(end)))
        status, verb = (first.status if own else -stopped_by), f"stopped after {stopped_by.name}"
    code = (status or 1) if status >= 0 else 128 - status
    during = f" during {first.phase}" if first.phase else ""
    return code, f"rank {first.rank} {verb}{during} (exit code {code}): {first.reason}"


def _order(end: RankEnd) -> tuple[bool, float]:
    return end.is_consequence, end.moment_s


def run_ranks(spec: Any, grace_s: int) -> tuple[int, str]:
    """Run until every rank has ended; returns the exit code and the line to print, if any."""
    from opendm.rank_agent import RankAgent

    with tempfile.TemporaryDirectory(prefix="opendm_launch_") as log_dir:
        agent = RankAgent(spec, log_dir, grace_s=grace_s, say=_say)
        failures = agent.run().failures
        ended = [_end(rank, failure, agent) for rank, failure in failures.items()]
        for i, reason in agent.silent.items():
            rank = agent.get_worker_group().workers[i].global_rank
            if rank not in failures:
                ended.append(RankEnd(rank, 0, reason, agent.looks_s[0], _phase(i, agent)))
    return verdict(ended, agent.stopped_by) if ended else (0, "")


def _phase(local_rank: int, agent: "RankAgent") -> str:
    return phase_of(agent.error_file(local_rank))


def _end(rank: int, failure: Any, agent: "RankAgent") -> RankEnd:
    i, status, phase = failure.local_rank, failure.exitcode, _phase(failure.local_rank, agent)
    if isinstance(failure.message, dict):
        reason = " ".join(failure.message["message"].split())
        details = failure.message["extraInfo"]
        recorded_s = details.get("time_s", failure.timestamp)
        code = failure.message.get("errorCode", status)
        return RankEnd(rank, code, reason, recorded_s, phase, details.get("lost_contact", False))
    if i in agent.silent:
        return RankEnd(rank, status, agent.silent[i], agent.looks_s[0], phase)
    # An abort follows the failure of another rank more often than it causes one.
    moment_s = agent.looks_s[status == -signal.SIGABRT]
    reason = f"killed by {failure.signal_name()}" if status < 0 else NO_REASON
    we_stopped_it = bool(agent.failed_first) and i not in agent.failed_first
    return RankEnd(rank, status, reason, moment_s, phase, we_stopped_it)


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
