"""How ranks start: who reads weights, and what happens to ranks that were not started alike."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from run_ranks import (
    Ranks,
    assert_same_metrics,
    experiment,
    interrupted_at,
    weights,
)
from safetensors import safe_open

from opendm.failure import FILE_VARIABLE, phase_of
from opendm.model.dm05 import checkpoint_files

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 60
HALF = {
    "model_config__bf16": True,
    "trainer_config__bf16": True,
    "trainer_config__per_device_train_batch_size": 2,
}


def note_reads(folder, rank):
    """Have each rank leave a line for every folder that it reads weights of."""
    original = checkpoint_files.read_tensors

    def read_tensors(path, dtype):
        with (folder / f"read by {rank}").open("a") as file:
            file.write(f"{path}\n")
        return original(path, dtype)

    checkpoint_files.read_tensors = read_tensors


def reads(folder):
    """Folders read, by rank; forgotten afterwards."""
    found = {}
    for file in folder.glob("read by *"):
        found[int(file.name.split()[-1])] = file.read_text().split()
        file.unlink()
    return found


def test_rank_0_alone_reads_weights_and_two_ranks_resume_in_bfloat16_bit_for_bit(
    tiny_checkpoint, tmp_path
):
    expected = tmp_path / "whole"
    prepare = partial(note_reads, tmp_path)
    exp = experiment(tiny_checkpoint, expected, **HALF)
    assert Ranks(exp, 2, tmp_path, prepare).wait() == [0, 0]
    assert reads(tmp_path) == {0: [str(tiny_checkpoint)]}

    folder = interrupted_at(4, expected, tmp_path / "run")
    exp = experiment(tiny_checkpoint, folder, **HALF)
    assert Ranks(exp, 2, tmp_path, prepare).wait() == [0, 0]
    assert reads(tmp_path) == {0: [str(folder / "checkpoint-4")]}
    assert_same_metrics(folder, expected)
    assert weights(folder) == weights(expected)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def tell_failures(folder, rank):
    os.environ[FILE_VARIABLE] = str(folder / f"failure-{rank}")


def test_ranks_with_different_flags_end_in_time_and_both_name_the_flag(tiny_checkpoint, tmp_path):
    exps = [
        experiment(tiny_checkpoint, tmp_path / "run", optimizer_config__base_lr=rate)
        for rate in (1e-3, 2e-3)
    ]
    begun = time.monotonic()
    assert Ranks(exps, 2, tmp_path, partial(tell_failures, tmp_path)).wait() == [4, 4]
    seconds = time.monotonic() - begun
    for rank in range(2):
        said = json.loads((tmp_path / f"failure-{rank}").read_text())["message"]["message"]
        assert said.startswith(
            "rank 1 differs from rank 0 in configuration.optimizer_config.base_lr: 0.002 instead "
            "of 0.001"
        )
    print(f"another rate on one rank of a whole run: both gone after {seconds:.1f} s")
    assert seconds < 10


def words(tiny_checkpoint, folder):
    return [
        "--model-config.no-bf16", "--trainer-config.no-bf16",
        "--model-config.model-name-or-path", str(tiny_checkpoint),
        "--trainer-config.output-dir", str(folder),
        "--trainer-config.num-train-steps", "500",
        "--trainer-config.per-device-train-batch-size", "2",
        "--data-config.norm-stats-root", str(folder.parent / "stats"),
    ]  # fmt: skip


def rank_processes(launcher_pid):
    """Process ids by rank, of the children that a launcher has now."""
    children = Path(f"/proc/{launcher_pid}/task/{launcher_pid}/children").read_text().split()
    found = {}
    for pid in children:
        try:
            lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
        except OSError:  # it has ended
            continue
        environ = dict(line.split("=", 1) for line in lines if line)
        if "RANK" in environ:
            found[int(environ["RANK"])] = int(pid), environ[FILE_VARIABLE]
    return found


def until(what, seconds=TIMEOUT_S):
    """What ``what()`` gives once it gives something."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)
    return found


def test_sigterm_to_one_rank_before_the_first_step_ends_the_run_with_75(tiny_checkpoint, tmp_path):
    environ = dict(os.environ, OMP_NUM_THREADS="1", TMPDIR=str(tmp_path))
    launch = [sys.executable, "-m", "opendm.launch", "--nproc_per_node", "2"]
    launcher = subprocess.Popen(
        [*launch, "playground/dm05_sft_demo.py", *words(tiny_checkpoint, tmp_path / "run")],
        cwd=REPOSITORY, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def loading():
        assert launcher.poll() is None, launcher.stderr.read()
        ranks = rank_processes(launcher.pid)
        pid, file = ranks.get(1, (0, ""))
        return ranks if pid and phase_of(file) in ("loading", "statistics") else None

    try:
        ranks = until(loading)
        begun = time.monotonic()
        os.kill(ranks[1][0], signal.SIGTERM)
        error = launcher.communicate(timeout=TIMEOUT_S)[1]
    finally:
        launcher.kill()
    seconds = time.monotonic() - begun
    print(f"SIGTERM to one rank before the first step: all gone after {seconds:.1f} s")
    assert launcher.returncode == 75, error
    assert "rank 1 stopped during" in error
    assert "stopped by SIGTERM before the first step" in error
    assert not any(Path(f"/proc/{pid}").exists() for pid, _ in ranks.values())
    assert not list((tmp_path / "run").glob("*checkpoint-*"))
