"""A rank that dies, hangs or leaves takes the job down in time, and is the one that is named."""

import os
import socket
import subprocess
import sys
import time
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


def play(folder: Path, where: str, who: int, fault: str) -> Run:
    folder.mkdir()
    words = ["--nproc_per_node", "2", "--master_port", str(free_port())]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    environ |= {"OPENDM_COLLECTIVE_TIMEOUT_S": str(TIMEOUT_S), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-m", "opendm.launch", *words, PROGRAM, folder, where, str(who), fault],
        cwd=REPOSITORY,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    moment = folder / "moment"
    assert moment.exists(), finished.stderr
    seconds = time.time() - float(moment.read_text())
    pids = [int(file.read_text()) for file in folder.glob("pid-*")]
    return Run(finished.returncode, finished.stderr, seconds, pids)


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
    ("kill", "step", 0),
    ("raise", "statistics", 1),
    ("exit 0", "saving", 1),
)


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory) -> dict[str, Future[Run]]:
    root = tmp_path_factory.mktemp("ranks")
    with ThreadPoolExecutor(len(SHORT)) as pool:
        yield {
            fault: pool.submit(play, root / fault.replace(" ", "_"), where, who, fault)
            for fault, where, who in SHORT
        }


@pytest.mark.parametrize(("fault", "where", "who"), SHORT)
def test_a_lost_rank_ends_the_job_in_time_and_is_named(short_runs, fault, where, who):
    run = short_runs[fault].result()
    print(f"{fault} of rank {who} during {where}: gone after {run.seconds:.1f} s")
    check(run, where, who, fault)


@pytest.mark.soak
@pytest.mark.parametrize("where", PHASES)
@pytest.mark.parametrize("fault", sorted(ENDS))
def test_every_fault_of_a_rank_in_every_phase(tmp_path, fault, where):
    who = (sorted(ENDS).index(fault) + PHASES.index(where)) % 2
    run = play(tmp_path / "run", where, who, fault)
    print(f"{fault} of rank {who} during {where}: gone after {run.seconds:.1f} s")
    check(run, where, who, fault)
    if fault == "sleep":  # it was asked where it hangs
        assert "rank_program.py" in run.error.split("Current thread")[1]
