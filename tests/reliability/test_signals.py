"""SIGTERM and Ctrl-C end a run with a committed checkpoint and exit code 75, whenever they come."""

import random
import shutil
import signal
import time
from dataclasses import dataclass
from functools import partial

import pytest
from run_ranks import Ranks, assert_same_metrics, experiment, metrics, run_ranks, weights

from opendm.data.config import DM05DataConfig
from opendm.exp import training
from opendm.trainer import checkpointing
from opendm.trainer.checkpoint_folder import newest_healthy
from opendm.trainer.trainer import DMTrainer

TIMEOUT_S = 60
STEPS = 6


@dataclass(frozen=True)
class Case:
    """Signals in the order in which they come, and who gets them."""

    moments: tuple[str, ...]
    receivers: tuple[int, ...] = (0, 1)
    signum: signal.Signals = signal.SIGTERM
    save_steps: int | None = None
    """None: the run saves only where it is asked to end."""
    step: int | None = 3
    """That it ends at."""
    code: int = 75


CASES = {
    "all ranks in a step": Case(("step",)),
    "one rank in a step": Case(("step",), receivers=(1,)),
    "in a save": Case(("save",), save_steps=2),
    "in the save of the last step": Case(("save",), save_steps=STEPS, step=STEPS, code=0),
    "in the statistics": Case(("statistics",), step=None),
    "twice, the second in the save": Case(("step", "save")),
    "Ctrl-C": Case(("step",), signum=signal.SIGINT),
}


def wait_for(path, processes=()):
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        assert all(process.is_alive() for process in processes), "a rank ended"
        time.sleep(0.01)


def pause_at(folder, rank):
    """Have rank 0 leave a file at each moment, and wait there until the signal was sent."""
    moments = {
        "statistics": (DM05DataConfig, "compute_norm_stats", 1),
        "step": (DMTrainer, "compute_loss", 3),
        "save": (checkpointing, "commit", 1),
    }

    def pause(moment, owner, name, at_call):
        original, calls = owner.__dict__[name], []

        def paused(*arguments, **options):
            calls.append(1)
            if len(calls) == at_call and (folder / f"pause at {moment}").exists():
                (folder / moment).touch()
                wait_for(folder / f"{moment} over")
            return original(*arguments, **options)

        setattr(owner, name, paused)

    if rank == 0:
        for moment, place in moments.items():
            pause(moment, *place)


def two_ranks(tiny_checkpoint, folder, **changes):
    return experiment(
        tiny_checkpoint, folder, trainer_config__per_device_train_batch_size=2, **changes
    )


@pytest.mark.parametrize("name", CASES)
def test_a_signal_ends_the_run_with_a_checkpoint(name, whole, tiny_checkpoint, tmp_path):
    case, folder = CASES[name], tmp_path / "run"
    exp = two_ranks(
        tiny_checkpoint, folder,
        trainer_config__save_strategy="no" if case.save_steps is None else "steps",
        trainer_config__save_steps=case.save_steps or 1,
    )  # fmt: skip
    for moment in case.moments:
        (tmp_path / f"pause at {moment}").touch()
    ranks = Ranks(exp, 2, tmp_path, partial(pause_at, tmp_path))
    for moment in case.moments:
        wait_for(tmp_path / moment, ranks.processes)
        ranks.signal(case.signum, case.receivers)
        (tmp_path / f"{moment} over").touch()
    assert ranks.wait() == [case.code] * 2
    if case.step is None:
        assert not list(folder.glob("*checkpoint-*"))
    else:
        assert newest_healthy(folder, pytest.fail)[0] == case.step
        assert metrics(folder)[-1]["step"] == case.step
        assert not list(folder.glob(".checkpoint-*"))
    assert run_ranks(exp, 2, tmp_path) == [0, 0]
    assert_same_metrics(folder, whole[2])
    assert weights(folder) == weights(whole[2])
    print(f"{case.signum.name}, {name}: exit code {case.code}, continued bit for bit")


def say_started(folder, rank):
    """Leave a file when this rank has its signal handlers."""
    original = training.build_trainer

    def build_trainer(*arguments):
        (folder / f"started-{rank}").touch()
        return original(*arguments)

    training.build_trainer = build_trainer


def num_steps(folder):
    return len(metrics(folder)) if (folder / "metrics.jsonl").exists() else 0


def stop_at_random(exp, folder, tmp_path, chooser, longest_s):
    """Exit codes of a run that gets SIGTERM at a random moment, and whether it reached a step.

    Before its first step all ranks get it: what becomes of the others of a rank that ends at once
    is the launcher's task.
    """
    started = [tmp_path / f"started-{rank}" for rank in range(2)]
    steps_before = num_steps(folder)
    ranks = Ranks(exp, 2, tmp_path, partial(say_started, tmp_path))
    for file in started:
        wait_for(file, ranks.processes)
        file.unlink()
    time.sleep(chooser.uniform(0, longest_s))
    steps_too = num_steps(folder) > steps_before
    ranks.signal(signal.SIGTERM, [chooser.randrange(2)] if steps_too else None)
    return ranks.wait(), steps_too


@pytest.mark.soak
def test_random_signals_end_runs_with_a_checkpoint(whole, tiny_checkpoint, tmp_path, record):
    folder, chooser, wanted = tmp_path / "run", random.Random(5), 100
    exp = two_ranks(tiny_checkpoint, folder, trainer_config__save_steps=4)
    begun = time.monotonic()
    assert run_ranks(exp, 2, tmp_path) == [0, 0]
    longest_s = time.monotonic() - begun
    shutil.rmtree(folder)
    num_stopped = num_in_steps = num_finished = 0
    while num_stopped < wanted:
        codes, in_steps = stop_at_random(exp, folder, tmp_path, chooser, longest_s)
        if num_steps(folder) == STEPS:
            assert set(codes) <= {0, 75, -signal.SIGTERM}  # it may come after the last step
            num_finished += 1
            assert run_ranks(exp, 2, tmp_path) == [0, 0]
            assert_same_metrics(folder, whole[2])
            assert weights(folder) == weights(whole[2])
            shutil.rmtree(folder)
            continue
        assert codes == [75, 75]
        newest = newest_healthy(folder, pytest.fail)
        assert num_steps(folder) == (0 if newest is None else newest[0])
        assert not list(folder.glob(".checkpoint-*"))
        num_stopped += 1
        num_in_steps += in_steps
    record(
        f"{num_stopped} of {wanted} runs on FSDP1 x2 that got SIGTERM at a random moment ended "
        f"with 75 and their last step saved ({num_in_steps} among their steps, the others before "
        f"the first); {num_finished} of {num_finished} finished runs bit for bit"
    )
