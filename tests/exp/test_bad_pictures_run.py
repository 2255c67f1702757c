"""Whole runs on a set with bad pictures: counts are exact, and workers or ranks change nothing."""

import pytest
from robot_sets import write_robot_set
from run_ranks import assert_same_metrics, experiment, interrupted_at, metrics, run_ranks, weights

from opendm.constants.robot import ActionMode
from opendm.exp.dm05_exp import run
from opendm.trainer.sampling import StepSampler

STEPS, BATCH, EPISODES, FRAMES = 4, 4, 4, 8
SPOILED = (1, 3, 4, 6)
"""Frames of every episode whose picture is missing."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = write_robot_set(
        tmp_path_factory.mktemp("set"),
        num_images=1, state_dim=2, action_dim=2, num_episodes=EPISODES, num_frames=FRAMES,
    )  # fmt: skip
    for episode in range(EPISODES):
        for frame in SPOILED:
            (folder / f"images/{episode}/1/{frame}.jpg").unlink()
    return folder


def make(tiny, folder, root, **changes):
    values = {
        "data_config__dataset_name": str(root),
        "data_config__action_mode": ActionMode.ABSOLUTE,
        "data_config__bad_records": "skip",
        "data_config__val_episodes": 1,
        "trainer_config__eval_steps": 2,
        "trainer_config__num_train_steps": STEPS,
        "trainer_config__per_device_train_batch_size": BATCH,
        **changes,
    }
    return experiment(tiny, folder, **values)


@pytest.fixture(scope="module")
def whole(root, tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(make(tiny_checkpoint, folder, root)) == 0
    return folder


def counted(folder):
    return [line["replaced_samples"] for line in metrics(folder)]


def test_metrics_count_every_replaced_draw_once(whole):
    """Of the draws, those of a spoiled frame; held-out episodes are whole, so rows are frames."""
    sampler = StepSampler((EPISODES - 1) * FRAMES, 42, STEPS, BATCH)
    wanted, total = [], 0
    for step in range(STEPS):
        total += sum(key.row % FRAMES in SPOILED for key in sampler.step_keys(step)[0])
        wanted.append(total)
    assert counted(whole) == wanted
    assert total > 4


def test_a_resumed_run_with_workers_goes_on_counting(whole, root, tiny_checkpoint, tmp_path):
    folder = interrupted_at(2, whole, tmp_path / "run")
    exp = make(tiny_checkpoint, folder, root, trainer_config__dataloader_num_workers=2)
    assert run(exp) == 0
    assert counted(folder) == counted(whole)
    assert_same_metrics(folder, whole)
    assert weights(folder) == weights(whole)
    assert [line["val_loss"] for line in metrics(folder)] == [
        line["val_loss"] for line in metrics(whole)
    ]


def test_two_ranks_count_and_learn_what_one_does(whole, root, tiny_checkpoint, tmp_path):
    exp = make(
        tiny_checkpoint, tmp_path / "run", root,
        trainer_config__per_device_train_batch_size=BATCH // 2,
        trainer_config__fsdp1=False,
    )  # fmt: skip
    assert run_ranks(exp, 2, tmp_path) == [0, 0]
    assert counted(tmp_path / "run") == counted(whole)
    assert_same_metrics(tmp_path / "run", whole, rel=1e-4)
    ours, theirs = (
        [line["val_loss"] for line in metrics(folder) if line["val_loss"] is not None]
        for folder in (tmp_path / "run", whole)
    )
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert len(ours) == 2


def test_the_log_names_each_file_once_and_the_counts(root, tiny_checkpoint, tmp_path, capsys):
    assert run(make(tiny_checkpoint, tmp_path / "run", root)) == 0
    texts = [line.split(" ", 2)[-1] for line in capsys.readouterr().out.splitlines()]
    named = [text for text in texts if text.startswith("another sample is drawn")]
    files = [text.split("image file ")[1].split()[0] for text in named]
    assert len(files) == len(set(files)) > 4
    [report] = [text for text in texts if text.startswith("bad pictures:")]
    assert f" {counted(tmp_path / 'run')[-1]} draws" in report
    # 4 of the 8 held-out samples, at both evaluations
    wanted = f"validation: {len(SPOILED)} of {FRAMES} samples were replaced, since pictures are bad"
    assert [text for text in texts if text.startswith("validation: ")] == [wanted] * 2


def test_without_skip_mode_the_run_ends_with_3_and_says_what_helps(
    root, tiny_checkpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("opendm.check.run.NUM_SAMPLED", 0)  # the short check would find it first
    exp = make(tiny_checkpoint, tmp_path / "run", root, data_config__bad_records="refuse")
    assert run(exp) == 3
    error = capsys.readouterr().err
    assert "does not exist" in error
    assert "--data-config.bad-records skip" in error
    assert "Traceback" not in error
