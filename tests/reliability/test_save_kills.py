"""A save that is killed at any of its writes leaves the old or the new checkpoint, and no third."""

import itertools
import os
import shutil
import signal
from functools import partial

import pytest
from crash_points import interposed, is_killed_at
from run_ranks import Ranks, assert_same_metrics, experiment, interrupted_at, run_ranks, weights

from opendm.exp.dm05_exp import run
from opendm.trainer.checkpoint_folder import newest_healthy
from opendm.trainer.checkpointing import Checkpoints


def test_one_process_killed_at_every_write_leaves_the_old_or_the_new_checkpoint(
    whole, tiny_checkpoint, tmp_path, monkeypatch
):
    folder, before, copies = tmp_path / "run", tmp_path / "before", tmp_path / "copies"
    found = []
    save = Checkpoints.save

    def kill_at_every_write(checkpoints, step, *parts, **options):
        if step == 4:
            # links suffice: no file of a checkpoint is ever written over
            shutil.copytree(folder, before, copy_function=os.link)
            for index in itertools.count():
                if not is_killed_at(partial(save, checkpoints, step, *parts, **options), index):
                    return folder / "checkpoint-4"
                found.append(newest_healthy(folder, pytest.fail)[0])
                if len(found) == 1 or index % 30 == 15 or found[-2:] == [2, 4]:
                    shutil.copytree(folder, copies / str(index))
                shutil.rmtree(folder)
                shutil.copytree(before, folder, copy_function=os.link)
        return save(checkpoints, step, *parts, **options)

    # a process that dies leaves the same files with and without it; only its calls count
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(Checkpoints, "save", kill_at_every_write)
    changes = {"trainer_config__save_total_limit": 1}
    assert run(experiment(tiny_checkpoint, folder, **changes)) == 0
    assert found == sorted(found)
    assert set(found) == {2, 4}
    monkeypatch.setattr(Checkpoints, "save", save)
    for copy in sorted(copies.iterdir()):
        assert run(experiment(tiny_checkpoint, copy, **changes)) == 0
        assert_same_metrics(copy, whole[1])
        assert weights(copy) == weights(whole[1])
        assert not list(copy.glob(".checkpoint-*"))
    print(
        f"one process killed at {len(found)} of {len(found)} writes of a save: {found.count(2)} "
        f"times the old, {found.count(4)} times the new checkpoint; "
        f"{len(list(copies.iterdir()))} continued bit for bit"
    )


def act_in_first_save(act):
    """Call ``act(call, target)`` before every write of the next save of this process."""
    save = Checkpoints.save

    def watched(checkpoints, step, *parts, **options):
        Checkpoints.save = save
        with interposed(act):
            return save(checkpoints, step, *parts, **options)

    Checkpoints.save = watched


def die_in_save(who, index, rank):
    """Have rank ``who`` killed at a write of its first save."""
    count = itertools.count()

    def act(call, target):
        if next(count) == index:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == who:
        act_in_first_save(act)


def log_save(folder, rank):
    """Have every rank leave the writes of its first save in a file."""
    path = os.open(folder / f"writes-{rank}", os.O_WRONLY | os.O_CREAT)
    act_in_first_save(lambda call, target: os.write(path, f"{call}\n".encode()))


def two_ranks(tiny_checkpoint, folder):
    return experiment(
        tiny_checkpoint, folder, trainer_config__per_device_train_batch_size=2,
        trainer_config__save_steps=1, trainer_config__save_total_limit=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def writes(whole, tiny_checkpoint, tmp_path_factory):
    """(rank, index) of every write of a save on two ranks."""
    root = tmp_path_factory.mktemp("writes")
    folder = interrupted_at(2, whole[2], root / "run")
    exp = two_ranks(tiny_checkpoint, folder)
    assert Ranks(exp, 2, root, partial(log_save, root)).wait() == [0, 0]
    counts = [len((root / f"writes-{rank}").read_text().splitlines()) for rank in range(2)]
    return [(rank, index) for rank, count in enumerate(counts) for index in range(count)]


def killed(exp, who, index, folder, tmp_path):
    """Have a rank die at a write of the run's next save; the newest checkpoint after that."""
    old = newest_healthy(folder, pytest.fail)[0]
    codes = Ranks(exp, 2, tmp_path, partial(die_in_save, who, index)).wait()
    assert codes[who] == -signal.SIGKILL
    assert codes[1 - who] not in (0, -signal.SIGKILL)
    new = newest_healthy(folder, pytest.fail)[0]
    assert new in (old, old + 1)
    return new


def test_a_rank_of_two_killed_in_a_save_costs_no_checkpoint(
    writes, whole, tiny_checkpoint, tmp_path
):
    """The restart after each kill is the run that the next one ends."""
    folder = interrupted_at(2, whole[2], tmp_path / "run")
    exp = two_ranks(tiny_checkpoint, folder)
    of_rank = [[index for rank, index in writes if rank == who] for who in range(2)]
    chosen = [(0, of_rank[0][-1]), (0, len(of_rank[0]) // 2), (1, len(of_rank[1]) // 2)]
    found = [killed(exp, *place, folder, tmp_path) for place in chosen]
    assert found == [3, 3, 3]  # the first comes after the commit of step 3
    assert run_ranks(exp, 2, tmp_path) == [0, 0]
    assert_same_metrics(folder, whole[2])
    assert weights(folder) == weights(whole[2])
    print(f"two ranks, one killed at {len(chosen)} of {len(writes)} writes: continued bit for bit")


@pytest.mark.soak
def test_a_rank_of_two_killed_at_every_write(writes, whole, tiny_checkpoint, tmp_path, record):
    found, num_continued = [], 0
    for number, (who, index) in enumerate(writes):
        folder = interrupted_at(2, whole[2], tmp_path / "run")
        exp = two_ranks(tiny_checkpoint, folder)
        found.append(killed(exp, who, index, folder, tmp_path))
        if number % 8 == 0 or (who, index + 1) not in writes:
            assert run_ranks(exp, 2, tmp_path) == [0, 0]
            assert_same_metrics(folder, whole[2])
            assert weights(folder) == weights(whole[2])
            num_continued += 1
        shutil.rmtree(folder)
    record(
        f"FSDP1 x2, a rank killed at {len(found)} of {len(writes)} writes of a save: "
        f"{found.count(2)} times the old, {found.count(3)} times the new checkpoint; "
        f"{num_continued} of {num_continued} restarts bit for bit"
    )
