"""A run that was killed, stopped or moved goes on as if nothing had happened."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from run_ranks import Ranks, assert_same_metrics, experiment, metrics, run_ranks

from opendm.exp.dm05_exp import run
from opendm.trainer.checkpoint_folder import newest_healthy

STEPS = 6


def weights(folder):
    return (Path(folder) / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tiny_checkpoint, tmp_path_factory):
    """Uninterrupted runs by number of ranks."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(experiment(tiny_checkpoint, folder / "1")) == 0
    exp = experiment(tiny_checkpoint, folder / "2", trainer_config__per_device_train_batch_size=2)
    assert run_ranks(exp, 2, folder) == [0, 0]
    return {1: folder / "1", 2: folder / "2"}


def interrupted_at(step, source, target):
    """A copy of a run as it was when ``step`` had been saved; metrics go further than that."""
    target.mkdir()
    for number in range(2, step + 1, 2):
        shutil.copytree(source / f"checkpoint-{number}", target / f"checkpoint-{number}")
    shutil.copy(source / "metrics.jsonl", target)
    return target


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    step, workers, whole, tiny_checkpoint, tmp_path
):
    folder = interrupted_at(step, whole[1], tmp_path / "run")
    exp = experiment(tiny_checkpoint, folder, trainer_config__dataloader_num_workers=workers)
    assert run(exp) == 0
    assert_same_metrics(folder, whole[1])
    assert weights(folder) == weights(whole[1])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (1, 4), (2, 2)])
def test_a_run_moves_to_another_number_of_ranks(before, after, whole, tiny_checkpoint, tmp_path):
    folder = interrupted_at(4, whole[before], tmp_path / "run")
    exp = experiment(
        tiny_checkpoint, folder, trainer_config__per_device_train_batch_size=4 // after
    )
    codes = [run(exp)] if after == 1 else run_ranks(exp, after, tmp_path)
    assert codes == [0] * after
    assert_same_metrics(folder, whole[before], rel=0.0 if before == after else 1e-6)


def test_four_random_kills_are_survived_bit_for_bit(whole, tiny_checkpoint, tmp_path):
    chooser = random.Random(3)
    exp = experiment(
        tiny_checkpoint, tmp_path / "run", trainer_config__per_device_train_batch_size=2,
        trainer_config__save_steps=1,
    )  # fmt: skip
    for _ in range(4):
        ranks = Ranks(exp, 2, tmp_path)
        time.sleep(chooser.uniform(1.0, 5.0))
        ranks.signal(signal.SIGKILL)
        ranks.wait()
    assert run_ranks(exp, 2, tmp_path) == [0, 0]
    assert_same_metrics(tmp_path / "run", whole[2])
    assert weights(tmp_path / "run") == weights(whole[2])


@pytest.mark.parametrize("receivers", [[0, 1], [1]])
def test_a_signal_ends_the_run_with_a_checkpoint(receivers, whole, tiny_checkpoint, tmp_path):
    folder = tmp_path / "run"
    exp = experiment(
        tiny_checkpoint, folder, trainer_config__per_device_train_batch_size=2,
        trainer_config__save_strategy="no",
    )  # fmt: skip
    ranks = Ranks(exp, 2, tmp_path)
    while not (folder / "metrics.jsonl").exists() or not metrics(folder):
        time.sleep(0.02)
    ranks.signal(signal.SIGTERM, receivers)
    assert ranks.wait() == [75, 75]
    step, _ = newest_healthy(folder, print)
    assert metrics(folder)[-1]["step"] == step
    assert run_ranks(exp, 2, tmp_path) == [0, 0]
    assert_same_metrics(folder, whole[2])
