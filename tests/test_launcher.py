"""The launcher: its command line, exit codes, the one line that explains them, and signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError

from opendm.failure import (
    failure_is_consequence,
    phase,
    phase_of,
    record_exception,
    record_failure,
)
from opendm.launch import PREEMPTED, RankEnd, verdict

REPOSITORY = Path(__file__).resolve().parents[1]
LAUNCHER = REPOSITORY / "script" / "dm05_launcher.sh"
DEFAULT_EXPERIMENT = REPOSITORY / "playground" / "dm05_sft_demo.py"

# An experiment that needs no torch. `--do RANK ACTION ARGUMENT` says what a rank does.
EXPERIMENT = """
import os, signal, subprocess, sys, time
from pathlib import Path

from opendm.failure import record_failure

folder = Path(__file__).parent
if os.environ.get("OPENDM_VALIDATE_ONLY") == "1":
    (folder / "validated").open("a").write("once\\n")
    if "--hang" in sys.argv:
        (folder / "checking").write_text(str(os.getpid()))
        time.sleep(60)
    if "--bad-config" in sys.argv:
        print("bad config", file=sys.stderr)
    sys.exit(7 if "--bad-config" in sys.argv else 0)

rank = int(os.environ["RANK"])
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")

def say(*words):
    # one write: ranks share the pipe, and unbuffered printing writes word by word
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

say("env", *[f"{name}={os.environ[name]}" for name in names])

def act(action, argument):
    if action == "exit":
        sys.exit(int(argument))
    if action == "record":
        code, message = argument.split(":")
        record_failure(message, int(code), os.environ)
        assert "torch" not in sys.modules, "recording a failure must not import torch"
        sys.exit(int(code))
    if action == "raise":
        raise ValueError(argument)
    if action == "kill":
        os.kill(os.getpid(), int(argument))
    if action == "child":
        say("child", subprocess.Popen(["sleep", "60"]).pid)
        os.kill(os.getpid(), int(argument))
    if action == "args":
        say("args", sys.argv[1:])
    if action in ("save", "deaf", "wait"):
        def stop(signum, frame):
            if action == "save":
                time.sleep(3)
                (folder / f"saved-{rank}").write_text(signal.Signals(signum).name)
                os._exit(int(argument))
        if action != "wait":
            for signum in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, stop)
        (folder / f"ready-{rank}").write_text(str(os.getpid()))
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.05)
        sys.exit(99)

for i, word in enumerate(sys.argv):
    if word == "--do" and int(sys.argv[i + 1]) in (rank, -1):
        act(sys.argv[i + 2], sys.argv[i + 3])
"""

STUB_PYTHON = """\
#!/bin/sh
# Stands in for Python: says how it was called.
printf 'validate=%s' "${OPENDM_VALIDATE_ONLY-}"
printf '|%s' "$@"
printf '\\nenv %s %s %s %s\\n' "$OMP_NUM_THREADS" "$TORCH_NCCL_ASYNC_ERROR_HANDLING" \
  "$NCCL_IB_TIMEOUT" "$PYTHONPATH"
"""


def launcher_environment(**changes: str) -> dict[str, str]:
    drop = ("OMP_", "NCCL_", "TORCH", "OPENDM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "LOG")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    return {**kept, **changes}


# --- the command line, with a stub in place of Python ---


@dataclass
class Calls:
    """What the launcher asked Python to do."""

    code: int
    error: str
    arguments: list[list[str]]
    validated: list[bool]
    environment: list[list[str]]
    output: str


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., Calls]:
    stub = tmp_path / "stub-python"
    stub.write_text(STUB_PYTHON)
    stub.chmod(0o755)
    (tmp_path / "here.py").touch()

    def run(*flags: str, launcher: Path = LAUNCHER, cwd: Path = tmp_path, **env: str) -> Calls:
        process = subprocess.run(
            [launcher, *flags],
            cwd=cwd,
            env=launcher_environment(OPENDM_PYTHON=str(stub), **env),
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        lines = process.stdout.splitlines()
        calls = [line.split("|") for line in lines if line.startswith("validate=")]
        return Calls(
            process.returncode,
            process.stderr,
            [words[1:] for words in calls],
            [words[0] == "validate=1" for words in calls],
            [line.split(" ")[1:] for line in lines if line.startswith("env ")],
            process.stdout,
        )

    return run


def launch_words(exp: str, *rest: str, **changed: str) -> list[str]:
    flags = {"nproc_per_node": "8", "nnodes": "1", "node_rank": "0", "master_addr": "127.0.0.1"}
    pairs = [(f"--{name}", value) for name, value in {**flags, **changed}.items()]
    return ["-m", "opendm.launch", *[word for pair in pairs for word in pair], exp, *rest]


def test_the_configuration_is_checked_once_before_the_ranks_start(call):
    calls = call("--exp", "here.py", "--lr", "1")
    assert calls.code == 0
    assert calls.validated == [True, False]
    assert calls.arguments == [["here.py", "--lr", "1"], launch_words("here.py", "--lr", "1")]


def test_every_launcher_flag_reaches_the_launch_module(call):
    given = {"nproc_per_node": "2", "nnodes": "3", "node_rank": "1", "master_addr": "host"}
    given["master_port"] = "1234"
    expected = launch_words("here.py", **given)
    underscores = [word for name, value in given.items() for word in (f"--{name}", value)]
    dashes = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    assert call("--exp", "here.py", *underscores).arguments[-1] == expected
    assert call("--exp=here.py", *dashes).arguments[-1] == expected


def test_other_flags_and_all_after_the_dashes_go_to_the_experiment_unchanged(call):
    mine = ["--lr=1", "pos", "--text", "two words *", "--", "--nnodes", "5", "--", "--exp", "x"]
    calls = call("--exp", "here.py", *mine)
    theirs = ["--lr=1", "pos", "--text", "two words *", "--nnodes", "5", "--", "--exp", "x"]
    assert calls.arguments == [["here.py", *theirs], launch_words("here.py", *theirs)]


@pytest.mark.parametrize("task", [["--task", "inference"], ["--task=inference"], ["--", "--help"]])
def test_inference_and_help_of_the_experiment_run_one_process(call, task):
    calls = call("--exp", "here.py", "--port", "1", *task)
    words = [word for word in task if word != "--"]
    assert calls.validated == [False]
    assert calls.arguments == [["here.py", "--port", "1", *words]]


def test_another_task_or_the_words_inside_one_argument_train(call):
    for words in (["--task", "train"], ["--text", "a --task inference b"]):
        assert call("--exp", "here.py", *words).validated == [True, False]


@pytest.mark.parametrize(
    "flag", ["exp", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port"]
)
@pytest.mark.parametrize("form", ["--{}", "--{}=", "--{} --lr"])
def test_a_flag_without_a_value_is_a_usage_error(call, flag, form):
    calls = call(*form.format(flag).split())
    assert calls.code == 2
    assert f"--{flag} needs a value" in calls.error
    assert calls.arguments == []


@pytest.mark.parametrize("flag", ["nproc_per_node", "nnodes", "node-rank", "master_port"])
@pytest.mark.parametrize("value", ["two", "1.5", "-1", "08", "1 2"])
def test_a_number_that_is_none_is_a_usage_error(call, flag, value):
    calls = call("--exp", "here.py", f"--{flag}", value)
    assert calls.code == 2
    assert f"--{flag} {value}" in calls.error
    assert calls.arguments == []


def test_zero_ranks_and_zero_nodes_are_usage_errors(call):
    assert [call("--exp", "here.py", f"--{n}", "0").code for n in ("nproc_per_node", "nnodes")] == [
        2,
        2,
    ]


def test_help_shows_the_flags(call):
    calls = call("--help")
    assert calls.code == 0
    assert "--nproc_per_node" in calls.output
    assert calls.arguments == []


def test_a_missing_experiment_is_named(call, tmp_path):
    calls = call("--exp", "nowhere.py")
    assert calls.code == 2
    assert "nowhere.py" in calls.error
    assert call("--exp", str(tmp_path)).code == 2


def test_an_experiment_is_looked_up_here_and_then_in_the_repository(call, tmp_path):
    in_repository = call("--exp", "tests/test_launcher.py").arguments[0]
    assert in_repository == [str(REPOSITORY / "tests" / "test_launcher.py")]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_launcher.py").touch()
    assert call("--exp", "tests/test_launcher.py").arguments[0] == ["tests/test_launcher.py"]


def test_the_default_experiment_is_the_repositorys_from_any_folder_and_link(call, tmp_path):
    (tmp_path / "playground").mkdir()
    (tmp_path / "playground" / DEFAULT_EXPERIMENT.name).touch()
    link = tmp_path / "launch"
    link.symlink_to(LAUNCHER)
    calls = call(launcher=link)
    if DEFAULT_EXPERIMENT.exists():
        assert calls.arguments[0] == [str(DEFAULT_EXPERIMENT)]
    else:
        assert f"no file playground/{DEFAULT_EXPERIMENT.name}" in calls.error


def test_the_environment_is_set_where_it_was_not(call):
    cores = len(os.sched_getaffinity(0))
    threads, handling, ib_timeout, path = call("--exp", "here.py").environment[-1]
    assert (handling, ib_timeout) == ("1", "24")
    assert path.split(":")[0] == str(REPOSITORY)
    assert threads == str(max(1, min(4, cores // 8)))
    one = call("--exp", "here.py", "--nproc_per_node", "1").environment[-1]
    assert one[0] == str(max(1, min(4, cores)))


def test_the_environment_of_the_user_wins(call):
    given = {
        "OMP_NUM_THREADS": "3",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "NCCL_IB_TIMEOUT": "20",
        "PYTHONPATH": "/mine",
    }
    seen = call("--exp", "here.py", **given).environment[-1]
    assert seen == ["3", "0", "20", f"{REPOSITORY}:/mine"]


# --- which rank is to blame ---


def test_the_first_failure_decides():
    ended = [RankEnd(0, 1, "lost rank 1", 10.2), RankEnd(1, 3, "no such episode", 10.1)]
    assert verdict(ended, None) == (3, "rank 1 failed (exit code 3): no such episode")


def test_a_killed_rank_gives_128_plus_the_signal():
    assert verdict([RankEnd(0, -9, "killed by SIGKILL", 1.0)], None)[0] == 137


def test_after_a_signal_a_rank_that_could_not_save_outweighs_those_that_did():
    ended = [RankEnd(0, PREEMPTED, "saved", 1.0), RankEnd(1, 5, "disk full", 2.0)]
    assert verdict(ended, signal.SIGTERM)[0] == 5
    assert verdict(ended[:1], signal.SIGTERM)[0] == PREEMPTED


def test_after_a_signal_ranks_without_a_code_of_their_own_give_that_signals():
    ended = [RankEnd(0, -9, "killed by SIGKILL", 1.0), RankEnd(1, -15, "", 1.0)]
    assert verdict(ended, signal.SIGTERM)[0] == 143
    assert verdict(ended, signal.SIGINT)[0] == 130


def test_the_rank_that_others_lost_contact_with_is_to_blame_and_its_phase_is_named():
    lost = RankEnd(0, 1, "lost contact with another rank", 9.0, "step", is_consequence=True)
    hung = RankEnd(1, -9, "it hung", 10.0, "saving")
    assert verdict([lost, hung], None) == (
        137,
        "rank 1 failed during saving (exit code 137): it hung",
    )
    left = RankEnd(1, 0, "it left early", 10.0)
    assert verdict([lost, left], None) == (1, "rank 1 failed (exit code 1): it left early")
    assert verdict([lost], None)[1].startswith("rank 0 failed during step")


def test_ranks_that_agreed_to_stop_did_not_fail():
    assert verdict([RankEnd(0, PREEMPTED, "saved", 1.0)], None) == (
        75,
        "rank 0 stopped (exit code 75): saved",
    )


def test_an_error_about_another_rank_is_recorded_as_a_consequence(tmp_path):
    environ = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    for error, lost in (
        (ValueError("broken\nmore"), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"), True),
        (DistNetworkError("closed"), True),
        (RuntimeError(""), False),
    ):
        record_exception(error, environ)
        message = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
        assert message.startswith("lost contact with another rank: ") == lost
        assert f"{type(error).__name__}: {str(error).split(chr(10))[0]}" in message
        assert failure_is_consequence(str(tmp_path / "error.json")) == lost
    assert not failure_is_consequence(str(tmp_path / "none.json"))


def test_the_launcher_sees_the_innermost_phase_and_the_one_that_failed(tmp_path):
    file = str(tmp_path / "error.json")
    environ = {"TORCHELASTIC_ERROR_FILE": file}
    seen = [phase_of(file)]
    with phase("training", environ):
        with phase("saving", environ):
            seen.append(phase_of(file))
        seen.append(phase_of(file))
    seen.append(phase_of(file))
    assert seen == ["", "saving", "training", ""]
    with suppress(ValueError), phase("x" * 200, environ):
        raise ValueError
    assert phase_of(file) == "x" * 80


def test_a_record_is_what_torch_reads_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "error.json"
    record_failure("no such episode", 3, {"TORCHELASTIC_ERROR_FILE": str(path)})
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "no such episode"
    assert message["errorCode"] == 3
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 5
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_launcher_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record_failure("message", 3, {})
    record_failure("message", 3, {"TORCHELASTIC_ERROR_FILE": ""})
    with phase("saving", {}):
        pass
    assert list(tmp_path.iterdir()) == []


# --- real launches: all of them start at once, in the background, and each test reads its own ---


@dataclass
class Run:
    """How one launch went."""

    code: int
    output: str
    error: str
    folder: Path
    seconds: float

    @property
    def verdicts(self) -> list[str]:
        """The lines about ranks on standard error."""
        return [line for line in self.error.splitlines() if line.startswith("rank ")]

    @property
    def ranks(self) -> list[dict[str, str]]:
        """The environment that each rank printed, in order of rank."""
        lines = [line.split()[1:] for line in self.output.splitlines() if line.startswith("env ")]
        found = [dict(word.split("=") for word in words) for words in lines]
        return sorted(found, key=lambda rank: int(rank["RANK"]))


@dataclass
class Scenario:
    """A launch of two ranks, and the signal to send to the launcher once they are ready."""

    do: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    send: tuple[signal.Signals, ...] = ()
    ready: tuple[str, ...] = ("ready-0", "ready-1")
    grace: str = "300"


BUSY = socket.create_server(("127.0.0.1", 0))
BUSY_PORT = BUSY.getsockname()[1]
with socket.create_server(("", 0)) as held:
    NODES_PORT = held.getsockname()[1]
NODES = [
    ("--nnodes", "2", "--node_rank", str(node), "--master_port", str(NODES_PORT)) for node in (0, 1)
]
DEFAULT_PORT = ("--node_rank", "0")  # no --master_port
SCENARIOS = {
    "success": Scenario(
        do=("-1 args -",), flags=DEFAULT_PORT, words=("--text", "two words", "--", "--", "--nnodes")
    ),
    "recorded": Scenario(do=("0 wait -", "1 record 3:no such episode")),
    "all exit 2": Scenario(do=("-1 exit 2",)),
    "uncaught": Scenario(do=("0 wait -", "1 raise broken")),
    "killed": Scenario(do=("0 child 9", "1 wait -")),
    "term": Scenario(do=("-1 save 75",), send=(signal.SIGTERM, signal.SIGTERM)),
    "int": Scenario(do=("-1 save 75",), send=(signal.SIGINT,)),
    "node 0": Scenario(do=("-1 save 75",), flags=NODES[0], send=(signal.SIGTERM,)),
    "node 1": Scenario(
        do=("-1 save 75",), flags=NODES[1], send=(signal.SIGTERM,), ready=("ready-2", "ready-3")
    ),
    "term, no handler": Scenario(do=("-1 wait -",), send=(signal.SIGTERM,)),
    "term, deaf": Scenario(do=("-1 deaf -",), send=(signal.SIGTERM,), grace="1"),
    "busy port": Scenario(do=("-1 exit 0",), flags=("--master_port", str(BUSY_PORT))),
    "bad config": Scenario(words=("--bad-config",)),
    "term while checking": Scenario(words=("--hang",), send=(signal.SIGTERM,), ready=("checking",)),
    "bad grace": Scenario(grace="soon"),
    "bad node": Scenario(flags=("--node_rank", "1")),
}


def wait_for(files: list[Path], timeout_s: float = 40) -> None:
    end = time.monotonic() + timeout_s
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end, f"{[f.name for f in files if not f.exists()]} did not appear"
        time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [held.getsockname()[1] for held in sockets]
    for held in sockets:
        held.close()
    return ports


def play(scenario: Scenario, folder: Path, port: int) -> Run:
    folder.mkdir()
    experiment = folder / "experiment.py"
    experiment.write_text(textwrap.dedent(EXPERIMENT))
    do = [word for action in scenario.do for word in ("--do", *action.split(" ", 2))]
    command = [str(LAUNCHER), "--exp", str(experiment), "--nproc_per_node", "2"]
    environ = launcher_environment(
        OPENDM_PYTHON=sys.executable,
        OPENDM_SHUTDOWN_TIMEOUT_S=scenario.grace,
        TMPDIR=str(folder),
    )
    process = subprocess.Popen(
        [*command, *(scenario.flags or ("--master_port", str(port))), *do, *scenario.words],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if scenario.send:
            wait_for([folder / name for name in scenario.ready])
        start = time.monotonic()
        for signum in scenario.send:
            process.send_signal(signum)
            time.sleep(0.5 if len(scenario.send) > 1 else 0)
        output, error = process.communicate(timeout=60)
    finally:
        process.kill()
    return Run(process.returncode, output, error, folder, time.monotonic() - start)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory) -> Iterator[Callable[[str], Run]]:
    root = tmp_path_factory.mktemp("launches")
    with ThreadPoolExecutor(5) as pool:
        futures: dict[str, Future[Run]] = {
            name: pool.submit(play, scenario, root / name.replace(", ", "_"), port)
            for (name, scenario), port in zip(
                sorted(SCENARIOS.items(), key=lambda item: not item[1].send),  # the slow ones first
                free_ports(len(SCENARIOS)),
                strict=True,
            )
        }
        yield lambda name: futures[name].result()
    BUSY.close()


def test_success_is_silent_and_the_ranks_know_their_place(run_of):
    run = run_of("success")
    # Somebody else may use the default port at this moment; the notice of it is all there may be.
    assert (run.code, [line for line in run.error.splitlines() if "is busy" not in line]) == (0, [])
    assert [rank["RANK"] for rank in run.ranks] == ["0", "1"], (run.output, run.error)
    assert [rank["LOCAL_RANK"] for rank in run.ranks] == ["0", "1"]
    assert [rank["WORLD_SIZE"] for rank in run.ranks] == ["2", "2"]
    cores = len(os.sched_getaffinity(0))
    assert run.ranks[0]["OMP_NUM_THREADS"] == str(max(1, min(4, cores // 2)))
    assert (run.folder / "validated").read_text() == "once\n"
    assert run.output.count("'--text', 'two words', '--', '--nnodes']") == 2


def test_the_recorded_reason_of_the_first_failure_is_the_only_line(run_of):
    run = run_of("recorded")
    assert run.code == 3
    assert run.error == "rank 1 failed (exit code 3): no such episode\n"


def test_the_exit_code_of_the_ranks_is_the_launchers(run_of):
    run = run_of("all exit 2")
    assert run.code == 2
    assert len(run.verdicts) == 1
    assert "(exit code 2): it recorded no reason" in run.verdicts[0]


def test_an_uncaught_exception_still_gets_a_line(run_of):
    run = run_of("uncaught")
    assert run.code == 1
    assert "ValueError: broken" in run.error
    assert run.verdicts == ["rank 1 failed (exit code 1): it recorded no reason; see its output"]
    assert "torch/distributed" not in run.error


def test_a_rank_killed_by_a_signal_is_named_and_its_children_go_too(run_of):
    run = run_of("killed")
    assert run.code == 137
    assert run.verdicts == ["rank 0 failed (exit code 137): killed by SIGKILL"]
    assert gone(int(run.output.split("child ")[1].split()[0]))


def test_sigterm_leaves_time_to_save_and_gives_the_ranks_exit_code(run_of):
    run = run_of("term")
    assert run.code == 75
    assert len(run.verdicts) == 1
    assert "stopped after SIGTERM (exit code 75)" in run.verdicts[0]
    assert run.error.count("SIGTERM: the ranks have 300 s to save") == 1  # it was sent twice
    saved = [(run.folder / f"saved-{rank}").read_text() for rank in (0, 1)]
    assert saved == ["SIGTERM", "SIGTERM"]
    assert run.seconds > 2.5


def test_two_launchers_make_one_job_and_both_pass_the_ranks_exit_code_on(run_of):
    runs = [run_of("node 0"), run_of("node 1")]
    ranks = [rank for run in runs for rank in run.ranks]
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2", "3"], [run.error for run in runs]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1"] * 2
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"4"}
    assert {rank["MASTER_PORT"] for rank in ranks} == {str(NODES_PORT)}
    assert [run.code for run in runs] == [75, 75]
    assert sorted(f.name for run in runs for f in run.folder.glob("saved-*")) == [
        f"saved-{rank}" for rank in range(4)
    ]


def test_sigint_reaches_the_ranks_as_sigint(run_of):
    run = run_of("int")
    assert run.code == 75
    assert [(run.folder / f"saved-{rank}").read_text() for rank in (0, 1)] == ["SIGINT"] * 2
    assert "KeyboardInterrupt" not in run.error


def test_ranks_that_do_not_handle_sigterm_give_143(run_of):
    run = run_of("term, no handler")
    assert run.code == 143
    assert run.seconds < 20


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(run_of):
    run = run_of("term, deaf")
    assert run.code == 143
    assert 0.9 < run.seconds < 20
    assert "killed by SIGKILL" in run.verdicts[0]


@pytest.mark.parametrize("name", ["term", "int", "term, no handler", "term, deaf", "recorded"])
def test_no_process_and_no_folder_is_left_behind(run_of, name):
    run = run_of(name)
    pids = [int(file.read_text()) for file in run.folder.glob("ready-*")]
    assert pids
    assert all(gone(pid) for pid in pids)
    assert list(run.folder.glob("opendm_launch_*")) == []


def test_a_busy_port_of_the_users_choice_is_refused_in_one_line(run_of):
    run = run_of("busy port")
    assert run.code == 2
    assert len(run.error.splitlines()) == 1
    assert str(BUSY_PORT) in run.error
    assert run.ranks == []


def test_a_failing_check_of_the_configuration_is_passed_through(run_of):
    run = run_of("bad config")
    assert (run.code, run.error) == (7, "bad config\n")
    assert run.ranks == []
    assert (run.folder / "validated").read_text() == "once\n"


def test_sigterm_during_the_check_leaves_no_process(run_of):
    run = run_of("term while checking")
    assert run.code == 143
    assert gone(int((run.folder / "checking").read_text()))
    assert run.ranks == []


def test_the_grace_must_be_a_number(run_of):
    run = run_of("bad grace")
    assert run.code == 2
    assert run.error == (
        "opendm.launch: OPENDM_SHUTDOWN_TIMEOUT_S='soon': give a whole number of seconds\n"
    )


def test_a_node_outside_the_job_is_refused(run_of):
    run = run_of("bad node")
    assert run.code == 2
    assert "--node_rank 1 --nnodes 1" in run.error


def test_a_busy_default_port_is_replaced_and_a_given_one_is_not(monkeypatch, capsys):
    from opendm import launch
    from opendm.errors import ConfigError

    monkeypatch.setattr(launch, "DEFAULT_MASTER_PORT", BUSY_PORT)
    chosen = launch.master_port(None, 1, 0)
    assert chosen != BUSY_PORT
    error = capsys.readouterr().err
    assert str(BUSY_PORT) in error
    assert str(chosen) in error
    with pytest.raises(ConfigError, match="every node"):
        launch.master_port(None, 2, 0)
    with pytest.raises(ConfigError, match=str(BUSY_PORT)):
        launch.master_port(BUSY_PORT, 1, 0)
    assert launch.master_port(None, 2, 1) == BUSY_PORT


def gone(pid: int) -> bool:
    """Whether a process has ended; it may take a moment to be reaped."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return True
        time.sleep(0.02)
    return False
