import json
from pathlib import Path

import numpy as np
import pytest

from opendm.data.normalize import NormStats, NormStatsFile
from opendm.dataset import register
from opendm.dataset.register import dataset_fields
from opendm.errors import DataError
from opendm.eval.open_loop import (
    HOLD,
    HeldOut,
    MeanError,
    OpenLoopErrors,
    evaluate_open_loop,
    hold_last_state,
    name_dimensions,
)
from opendm.eval.run_record import flatten
from opendm.infer.layout import PolicyLayout
from opendm.model.dm05.tiny import build_tiny_checkpoint

CHUNK, FRAMES = 8, 20


@pytest.fixture
def heldout(tmp_path, monkeypatch):
    """The first frames of one held-out episode."""
    fields = dataset_fields("demo_heldout")
    folder = tmp_path / "episodes"
    folder.mkdir()
    lines = (Path(fields["jsonl_dir"]) / "reach-v3_08.jsonl").read_text().splitlines()
    (folder / "reach-v3_08.jsonl").write_text("\n".join(lines[:FRAMES]))
    monkeypatch.setitem(
        register.CONVERSATION_DATA, "one_episode", {**fields, "jsonl_dir": str(folder)}
    )
    return "one_episode"


def make_layout(**changes):
    fields = {
        "dataset_name": "demo",
        "image_keys": ["images_1", "images_2"],
        "image_prompts": ["Corner", "Gripper"],
        "action_mode": "relative",
        "state_desc": ["eef", "eef", "eef", "gripper"],
        "robot_type": "Sawyer",
        "n_bins": 256,
        "add_state": True,
        "action_dim": 4,
        "chunk_size": CHUNK,
        "max_length": 256,
    }
    return PolicyLayout(**{**fields, **changes})


@pytest.fixture
def checkpoint(tmp_path):
    folder = build_tiny_checkpoint(tmp_path / "run" / "checkpoint-2", ["Reach"])
    make_layout().save(folder)
    vectors = np.full(4, -0.1), np.full(4, 0.1)
    stats = NormStats(np.zeros(4), np.ones(4), *vectors)
    NormStatsFile({"Sawyer": {"state": stats, "action": stats}}, "Sawyer").save(
        folder / "norm_stats.json"
    )
    lines = [{"step": 1, "loss": 2.0, "engine": "none"}, {"step": 2, "loss": None}]
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 3, "lo'
    (folder.parent / "metrics.jsonl").write_text(text)
    (folder.parent / "run.json").write_text(json.dumps({"config": {"seed": 1, "name": "x"}}))
    return folder


def test_the_report_of_a_run(heldout, checkpoint, tmp_path):
    untrained = build_tiny_checkpoint(tmp_path / "base", ["Reach"], seed=1)
    shown = []

    def evaluate(output):
        return evaluate_open_loop(
            checkpoint,
            untrained=untrained,
            dataset_name=heldout,
            output=output,
            num_steps=2,
            stride=7,
            show=shown.append,
        )

    report = evaluate(tmp_path / "out")
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    text = (tmp_path / "out" / "open_loop.json").read_text()
    figures = json.loads(text)
    assert figures["num_frames"] == 3
    assert figures["moving_dimensions"] == ["x", "y", "z"]
    moving = figures["moving_error"]
    better = min(moving["untrained"], moving["hold last state"])
    assert figures["ratio"] == pytest.approx(moving["trained"] / better)
    assert shown[-1].startswith("xyz error ")
    assert shown[-1].endswith("(limit 0.7)")
    assert report.summary == [shown[-1]]
    assert report.training == [
        {"step": 1, "loss": 2.0, "engine": None},
        {"step": 2, "loss": None},
    ]
    assert report.settings["config.seed"] == "1"
    (episode,) = report.episodes
    assert episode.predicted.shape == episode.true.shape == (FRAMES, 4)
    assert {key: len(frames) for key, frames in episode.frames.items()} == {
        "images_1": 6,
        "images_2": 6,
    }
    evaluate(tmp_path / "again")
    assert (tmp_path / "again" / "open_loop.json").read_text() == text


def test_targets_are_the_recorded_actions(heldout):
    held_out = HeldOut.open(heldout, make_layout())
    lines = held_out.dataset.episodes[0].path.read_text().splitlines()
    recorded = np.array([json.loads(line)["action"] for line in lines])
    sample = held_out.dataset[FRAMES - 3]
    np.testing.assert_allclose(sample["action"][0, :3], recorded[-3:], atol=1e-6)
    assert sample["action_mask"][0, :, 0].tolist() == [True] * 3 + [False] * 5
    hold = hold_last_state([sample], sample["action"])
    np.testing.assert_allclose(hold[0, -1], json.loads(lines[-3])["state"], atol=1e-6)


def test_a_dataset_without_the_policys_camera_is_refused(heldout):
    layout = make_layout(image_keys=["images_1", "images_9"])
    with pytest.raises(DataError, match="has no camera 'images_9'"):
        HeldOut.open(heldout, layout)


def test_repeated_tail_steps_do_not_count():
    error = MeanError.zeros(2)
    true = np.zeros((1, 3, 2))
    predicted = np.array([[[1.0, 2], [3, 4], [100, 100]]])
    mask = np.array([[[True, True], [True, True], [False, False]]])
    error.add(predicted, true, mask)
    assert error.mean().tolist() == [2.0, 3.0]


def test_the_ratio_is_to_the_better_baseline():
    by_policy = {"trained": [0.01, 9.0], "untrained": [0.05, 0.0], HOLD: [0.02, 0.0]}
    errors = OpenLoopErrors(["x", "gripper"], ["m", ""], by_policy, [0], 1)
    assert errors.ratio == pytest.approx(0.5)
    assert errors.sentence() == (
        "xyz error 10 mm; untrained 50 mm; hold last state 20 mm; ratio 0.500 (limit 0.7)"
    )


def test_names_and_units_follow_state_desc():
    two_arms = make_layout(state_desc=["joint", "gripper"] * 2)
    names = ["arm 1 joint 1", "arm 1 gripper", "arm 2 joint 1", "arm 2 gripper"]
    assert name_dimensions(two_arms) == (names, [""] * 4)
    assert name_dimensions(make_layout()) == (["x", "y", "z", "gripper"], ["m", "m", "m", ""])
    assert name_dimensions(make_layout(state_desc=None))[0][0] == "action 0"


def test_settings_are_flattened():
    assert flatten({"a": {"b": [1], "c": "x"}, "d": None}) == {
        "a.b": "[1]",
        "a.c": "x",
        "d": "null",
    }
