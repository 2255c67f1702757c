"""A rank that dies, hangs or leaves takes the job down in time, and is the one that is named."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("rank_program.py")
PHASES = ("statistics", "loading", "step", "optimizer", "saving")
TIMEOUT_S = 4  # of collectives
ALLOWED_S = TIMEOUT_S + 15

ENDS = {
    "kill": (137, "killed by SIGKILL"),
    "segv": (139, "killed by SIGSEGV"),
    "abort": (134, "killed by SIGABRT"),
    "term": (143, "killed by SIGTERM"),
    "raise": (1, "ValueError: broken"),
    "data": (3, "no such frame"),
    "memory": (1, "MemoryError: no more"),
    "exit 0": (1, "it left early"),
    "exit 3": (3, "it recorded no reason; see its output"),
    "stop": (137, "it hung, and the others waited in vain"),
    "sleep": (137, "it hung, and the others waited in vain"),
    "busy": (137, "it hung, and the others waited in vain"),
}
"""Exit code and reason by fault."""


@dataclass
class Run:
    """How a job with a fault went."""

    code: int
    error: str
    seconds: float
    """From the fault to the end of the launcher."""
    pids: list[int]

    @property
    def verdicts(self) -> list[str]:
        return [line for line in self.error.splitlines() if line.startswith("rank ")]


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def start(
    folder: Path, where: str, who: int, fault: str, num_nodes: int = 1
) -> list[subprocess.Popen[str]]:
    """Start a job of two ranks; the launcher of each node."""
    folder.mkdir()
    words = [sys.executable, "-m", "opendm.launch", "--master_port", str(free_port())]
    words += ["--nproc_per_node", str(2 // num_nodes), "--nnodes", str(num_nodes), "--node_rank"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    environ |= {"OPENDM_COLLECTIVE_TIMEOUT_S": str(TIMEOUT_S), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [*words, str(node), PROGRAM, folder, where, str(who), fault],
            cwd=REPOSITORY,
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(num_nodes)
    ]


def play(folder: Path, where: str, who: int, fault: str, num_nodes: int = 1) -> list[Run]:
    """Run a job of two ranks; what each node's launcher did."""
    runs = []
    for node in start(folder, where, who, fault, num_nodes):
        error = node.communicate(timeout=120)[1]
        seconds = time.time() - float((folder / "moment").read_text())
        pids = [int(file.read_text()) for file in folder.glob("pid-*")]
        runs.append(Run(node.returncode, error, seconds, pids))
    return runs


def check(run: Run, where: str, who: int, fault: str) -> None:
    code, reason = ENDS[fault]
    assert run.verdicts == [f"rank {who} failed during {where} (exit code {code}): {reason}"], (
        run.error
    )
    assert run.code == code
    assert len(run.pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in run.pids)
    assert run.seconds <= ALLOWED_S


SHORT = (
    ("stop", "step", 0),
    ("raise", "statistics", 1),
    ("exit 0", "saving", 1),
)


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory) -> Iterator[dict[str, Future[list[Run]]]]:
    root = tmp_path_factory.mktemp("ranks")
    with ThreadPoolExecutor(len(SHORT) + 1) as pool:
        runs = {
            fault: pool.submit(play, root / fault.replace(" ", "_"), where, who, fault)
            for fault, where, who in SHORT
        }
        yield runs | {"two nodes": pool.submit(play, root / "two_nodes", "step", 1, "kill", 2)}


@pytest.mark.parametrize(("fault", "where", "who"), SHORT)
def test_a_lost_rank_ends_the_job_in_time_and_is_named(short_runs, fault, where, who):
    (run,) = short_runs[fault].result()
    print(f"{fault} of rank {who} during {where}: gone after {run.seconds:.1f} s")
    check(run, where, who, fault)


def test_a_killed_rank_ends_the_launcher_of_every_node_and_its_own_names_it(short_runs):
    without_it, with_it = short_runs["two nodes"].result()
    print(f"two nodes: gone after {without_it.seconds:.1f} and {with_it.seconds:.1f} s")
    check(with_it, "step", 1, "kill")
    assert without_it.code == 1
    assert "rank 0 failed during step" in without_it.verdicts[0]
    assert "lost contact with another rank" in without_it.verdicts[0]


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path):
    (launcher,) = start(tmp_path / "run", "step", 0, "sleep")
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "moment").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = [int(file.read_text()) for file in (tmp_path / "run").glob("pid-*")]
    begun = time.monotonic()
    launcher.kill()
    launcher.communicate(timeout=60)  # ends when nobody can write any more
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < begun + TIMEOUT_S - 1  # before the collectives time out
        time.sleep(0.01)
    print(f"SIGKILL of the launcher: {len(pids)} ranks gone after {time.monotonic() - begun:.2f} s")
    assert len(pids) == 2


def _runs(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.soak
@pytest.mark.parametrize("where", PHASES)
@pytest.mark.parametrize("fault", sorted(ENDS))
def test_every_fault_of_a_rank_in_every_phase(tmp_path, fault, where):
    who = (sorted(ENDS).index(fault) + PHASES.index(where)) % 2
    (run,) = play(tmp_path / "run", where, who, fault)
    print(f"{fault} of rank {who} during {where}: gone after {run.seconds:.1f} s")
    check(run, where, who, fault)
    if fault == "sleep":  # it was asked where it hangs
        assert "rank_program.py" in run.error.split("Current thread")[1]
