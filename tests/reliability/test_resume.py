"""A run that was killed, moved or changed goes on as if nothing had happened, or says why not."""

import errno
import json
import random
import re
import resource
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from crash_points import fail_at, logged
from run_ranks import (
    Ranks,
    assert_same_metrics,
    experiment,
    interrupted_at,
    metrics,
    run_ranks,
    weights,
)
from safetensors import safe_open
from safetensors.torch import load_file

from opendm.data.augmentations import NoAugmentationPipeline
from opendm.exp.dm05_exp import run
from opendm.model.dm05.checkpoint_files import released_name
from opendm.trainer.checkpoint_folder import healthy_checkpoints
from opendm.trainer.checkpointing import Checkpoints

STEPS = 6


def states(folder):
    """All tensors and counters of the last checkpoint, and torch's random state.

    The other random states belong to samples, and type checks of tests draw from them.
    """
    state = folder / f"checkpoint-{STEPS}" / "state"
    with safe_open(state / "state-00000.safetensors", "np") as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name).tobytes() for name in names}
        random_state = json.loads(file.metadata()["random"])["torch"]
    return tensors, random_state, json.loads((state / "state.json").read_text())


@pytest.mark.parametrize(("step", "workers"), [(2, 0), (4, 2)])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    step, workers, whole, tiny_checkpoint, tmp_path
):
    folder = interrupted_at(step, whole[1], tmp_path / "run")
    exp = experiment(tiny_checkpoint, folder, trainer_config__dataloader_num_workers=workers)
    assert run(exp) == 0
    assert_same_metrics(folder, whole[1])
    assert weights(folder) == weights(whole[1])
    assert states(folder) == states(whole[1])


def test_these_runs_have_augmentation(whole, tiny_checkpoint, tmp_path):
    exp = experiment(tiny_checkpoint, tmp_path / "run", trainer_config__num_train_steps=1)
    exp.data_config.image_pipeline = NoAugmentationPipeline
    assert run(exp) == 0
    assert metrics(tmp_path / "run")[0]["loss"] != metrics(whole[1])[0]["loss"]


OPTIONS = {
    "accumulation": {
        "trainer_config__gradient_accumulation_steps": 2,
        "trainer_config__per_device_train_batch_size": 2,
    },
    "average": {"trainer_config__ema_decay": 0.5},
    "muon": {"optimizer_config__optim": "muon_adamw"},
    "bfloat16": {"model_config__bf16": True, "trainer_config__bf16": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_resumes_bit_for_bit(option, tiny_checkpoint, tmp_path):
    changes = OPTIONS[option]
    expected = tmp_path / "whole"
    assert run(experiment(tiny_checkpoint, expected, **changes)) == 0
    folder = interrupted_at(4, expected, tmp_path / "run")
    assert run(experiment(tiny_checkpoint, folder, **changes)) == 0
    assert_same_metrics(folder, expected)
    assert weights(folder) == weights(expected)
    assert states(folder) == states(expected)
    if option == "average":
        assert_averages_are_exported(folder)


def assert_averages_are_exported(folder):
    kept = load_file(folder / f"checkpoint-{STEPS}" / "state" / "state-00000.safetensors")
    exported = load_file(folder / "model.safetensors")
    averages = {name[:-4]: value for name, value in kept.items() if name.endswith("/ema")}
    assert averages
    for name, average in averages.items():
        found = exported[released_name(name)]
        assert torch.equal(found, average.to(found.dtype).reshape(found.shape))
        if average.ndim:
            assert not torch.equal(average, kept[f"{name}/weight"])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2), (2, 2)])
def test_a_run_moves_to_another_number_of_ranks(before, after, whole, tiny_checkpoint, tmp_path):
    if before not in whole:
        exp = experiment(
            tiny_checkpoint, tmp_path / "4", trainer_config__per_device_train_batch_size=1
        )
        assert run_ranks(exp, 4, tmp_path) == [0] * 4
    expected = whole.get(before, tmp_path / "4")
    folder = interrupted_at(4, expected, tmp_path / "run")
    exp = experiment(
        tiny_checkpoint, folder, trainer_config__per_device_train_batch_size=4 // after
    )
    codes = [run(exp)] if after == 1 else run_ranks(exp, after, tmp_path)
    assert codes == [0] * after
    assert_same_metrics(folder, expected, rel=0.0 if before == after else 1e-6)


# Flags


def test_a_named_checkpoint_is_continued_in_another_folder(whole, tiny_checkpoint, tmp_path):
    folder = tmp_path / "run"
    exp = experiment(tiny_checkpoint, folder, trainer_config__resume=str(whole[1] / "checkpoint-2"))
    assert run(exp) == 0
    assert metrics_of(folder) == metrics_of(whole[1])[2:]
    assert weights(folder) == weights(whole[1])


def metrics_of(folder):
    return [[line[key] for key in ("step", "loss", "grad_norm", "lr")] for line in metrics(folder)]


def test_a_named_checkpoint_is_refused_beside_a_newer_one(whole, tiny_checkpoint, tmp_path, capsys):
    folder = interrupted_at(4, whole[1], tmp_path / "run")
    named = str(folder / "checkpoint-2")
    assert run(experiment(tiny_checkpoint, folder, trainer_config__resume=named)) == 2
    assert "holds checkpoint-4, which is newer" in capsys.readouterr().err


def test_never_refuses_a_folder_with_checkpoints(whole, tiny_checkpoint, tmp_path, capsys):
    folder = interrupted_at(2, whole[1], tmp_path / "run")
    assert run(experiment(tiny_checkpoint, folder, trainer_config__resume="never")) == 2
    assert "holds checkpoint-2 of an earlier run" in capsys.readouterr().err
    assert (folder / "checkpoint-2").is_dir()


def test_another_configuration_is_refused_with_the_difference_or_starts_anew(
    whole, tiny_checkpoint, tmp_path, capsys
):
    folder = interrupted_at(2, whole[1], tmp_path / "run")
    kept = (folder / "metrics.jsonl").read_bytes()
    changes = {"trainer_config__seed": 7, "trainer_config__save_strategy": "no"}
    assert run(experiment(tiny_checkpoint, folder, **changes)) == 2
    assert "trainer_config.seed: 42 -> 7" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_bytes() == kept
    assert (folder / "checkpoint-2").is_dir()
    exp = experiment(tiny_checkpoint, folder, trainer_config__overwrite=True, **changes)
    assert run(exp) == 0
    assert [line["step"] for line in metrics(folder)] == list(range(1, STEPS + 1))
    assert metrics_of(folder)[0] != metrics_of(whole[1])[0]
    assert not list(folder.glob("checkpoint-*"))


def test_other_rates_need_a_word_and_are_then_used(whole, tiny_checkpoint, tmp_path, capsys):
    folder = interrupted_at(4, whole[1], tmp_path / "run")
    changes = {"optimizer_config__base_lr": 5e-4}
    line = "optimizer_config.base_lr: 0.001 -> 0.0005"
    assert run(experiment(tiny_checkpoint, folder, **changes)) == 2
    assert line in capsys.readouterr().err
    exp = experiment(tiny_checkpoint, folder, trainer_config__accept_changes=True, **changes)
    assert run(exp) == 0
    assert line in capsys.readouterr().out
    for found, expected in zip(metrics(folder), metrics(whole[1]), strict=True):
        factor = 1.0 if found["step"] <= 4 else 0.5
        np.testing.assert_allclose(found["lr"], factor * expected["lr"], rtol=1e-12)


# Damage and disks


def test_the_checkpoint_before_a_damaged_one_is_continued(whole, tiny_checkpoint, tmp_path, capsys):
    folder = interrupted_at(4, whole[1], tmp_path / "run")
    damaged = folder / "checkpoint-4" / "state" / "state-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert run(experiment(tiny_checkpoint, folder)) == 0
    shown = capsys.readouterr().out
    assert f"{folder / 'checkpoint-4'} cannot be used: state/state-00000.safetensors" in shown
    assert "checkpoint-2 at step 2" in shown
    assert_same_metrics(folder, whole[1])
    assert weights(folder) == weights(whole[1])


def limit_file_size(work, num_bytes):
    """Run ``work()`` while no file may be longer: what the system itself does at a quota."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        return work()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_costs_no_step_and_no_earlier_checkpoint(
    whole, tiny_checkpoint, tmp_path, monkeypatch, capsys
):
    folder, save, calls = tmp_path / "run", Checkpoints.save, []
    full_at = {3: "state", 4: "model.safetensors.partial", 5: "manifest.json"}

    def save_on_a_full_disk(checkpoints, step, *parts, **options):
        def work():
            return save(checkpoints, step, *parts, **options)

        if step == 1:
            calls.extend((call, path.name) for call, path in logged(work))
        elif step == 2:
            limit_file_size(work, 100_000)
        elif step in full_at:
            index = calls.index(("mkdir" if step == 3 else "write", full_at[step]))
            fail_at(work, index, errno.ENOSPC, lasting=True)
        else:
            work()

    monkeypatch.setattr(Checkpoints, "save", save_on_a_full_disk)
    assert run(experiment(tiny_checkpoint, folder, trainer_config__save_steps=1)) == 0
    shown = [
        line
        for line in capsys.readouterr().out.splitlines()
        if re.search(r"checkpoint of step \d+ was not written", line)
    ]
    assert len(shown) == 4
    for line in shown:
        if "step 3" in line:  # it names the size of the one file
            assert re.search(r"state-00000.safetensors of \d\.\d{3} GiB could not be", line)
            continue
        if "step 2" in line or "step 4" in line:  # at 5 all but the manifest was there
            assert re.search(r"[\d,]+ bytes of about [\d,]+ needed were written", line)
        assert "are free there" in line
        assert re.search(r"No space left on device|File too large", line)
    assert [step for step, _ in healthy_checkpoints(folder, pytest.fail)] == [1, STEPS]
    assert not list(folder.glob(".checkpoint-*"))
    assert_same_metrics(folder, whole[1])
    assert weights(folder) == weights(whole[1])


# Kills


def kill_at_random(exp, tmp_path, chooser, longest_s):
    """Exit codes of a run of which one rank or both are killed at a random moment."""
    ranks = Ranks(exp, 2, tmp_path)
    time.sleep(chooser.uniform(0, longest_s))
    ranks.signal(signal.SIGKILL, chooser.choice([[0], [1], [0, 1]]))
    for process in ranks.processes:  # a rank that has not met the other yet cannot notice
        process.join(5)
    ranks.signal(signal.SIGKILL)  # what the launcher does
    return ranks.wait()


def survive_kills(count, seed, tiny_checkpoint, tmp_path, expected):
    """Kill runs until ``count`` were; runs that got to the end, all compared with ``expected``."""
    folder, chooser = tmp_path / "run", random.Random(seed)
    exp = experiment(
        tiny_checkpoint, folder, trainer_config__per_device_train_batch_size=2,
        trainer_config__save_steps=1, trainer_config__save_total_limit=2,
    )  # fmt: skip

    def check():
        assert_same_metrics(folder, expected)
        assert weights(folder) == weights(expected)
        shutil.rmtree(folder)

    begun = time.monotonic()
    assert run_ranks(exp, 2, tmp_path) == [0, 0]
    longest_s = time.monotonic() - begun
    check()
    killed = finished = 0
    while killed < count:
        codes = kill_at_random(exp, tmp_path, chooser, longest_s)
        killed += -signal.SIGKILL in codes
        if codes == [0, 0]:
            finished += 1
            check()
    assert run_ranks(exp, 2, tmp_path) == [0, 0]
    check()
    return finished + 1


def test_four_random_kills_are_survived_bit_for_bit(whole, tiny_checkpoint, tmp_path):
    finished = survive_kills(4, 3, tiny_checkpoint, tmp_path, whole[2])
    print(f"FSDP1 x2, 4 random SIGKILLs: {finished} of {finished} finished runs bit for bit")


@pytest.mark.soak
@pytest.mark.parametrize("part", [1, 2, 3, 4])
def test_two_hundred_random_kills_are_survived_bit_for_bit(
    part, whole, tiny_checkpoint, tmp_path, record
):
    finished = survive_kills(50, part, tiny_checkpoint, tmp_path, whole[2])
    record(
        f"FSDP1 x2, 50 random SIGKILLs (part {part} of 4) of one rank or both: all resumed by "
        f"themselves, {finished} of {finished} finished runs bit for bit"
    )
