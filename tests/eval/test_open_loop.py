import json
from pathlib import Path

import numpy as np
import pytest
from policies import CHUNK, link_checkpoint, make_layout

from opendm.dataset import register
from opendm.dataset.register import dataset_fields
from opendm.errors import ConfigError, DataError
from opendm.eval.action_errors import HOLD, MeanError, OpenLoopErrors, name_dimensions
from opendm.eval.held_out import HeldOut, hold_last_state
from opendm.eval.horizon import HorizonErrors, render_horizon, shown_steps
from opendm.eval.open_loop import checkpoint_names, evaluate_open_loop
from opendm.eval.run_record import flatten
from opendm.model.dm05.tiny import build_tiny_checkpoint

FRAMES = 20


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


@pytest.fixture
def checkpoint(served_checkpoint, tmp_path):
    folder = link_checkpoint(served_checkpoint, tmp_path / "run" / "checkpoint-2")
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


def test_several_checkpoints_are_compared_as_if_alone(
    heldout, checkpoint, served_checkpoint, tmp_path
):
    """Same frames and noise: each one's figures are those of a page of its own."""
    other = link_checkpoint(served_checkpoint, tmp_path / "absolute", action_mode="absolute")
    untrained = build_tiny_checkpoint(tmp_path / "base", ["Reach"], seed=1)

    def evaluate(*checkpoints):
        output = tmp_path / "-".join(path.name for path in checkpoints)
        evaluate_open_loop(
            *checkpoints, untrained=untrained, dataset_name=heldout, output=output, num_steps=1,
            stride=10, num_episode_views=1, show=lambda _: None,
        )  # fmt: skip
        return json.loads((output / "open_loop.json").read_text()), output / "report.html"

    both, page = evaluate(other, checkpoint)
    assert both["judged"] == "checkpoint-2"
    alone = {path.name: evaluate(path)[0] for path in (other, checkpoint)}
    names = ["absolute", "checkpoint-2", "untrained", "hold last state"]
    for figures in (both["mean_absolute_error"], both["horizon"]["position"]["by_step"]):
        assert sorted(figures) == sorted(names)
    for name, figures in alone.items():
        horizon = figures["horizon"]["position"]["by_step"]
        assert both["horizon"]["position"]["by_step"][name] == pytest.approx(horizon["trained"])
        assert both["mean_absolute_error"][name] == pytest.approx(
            figures["mean_absolute_error"]["trained"]
        )
    assert both["ratios"]["checkpoint-2"] == both["ratio"] == alone["checkpoint-2"]["ratio"]
    assert both["ratios"]["absolute"] != both["ratio"]
    text = page.read_text()
    section = text[text.index("Error over the horizon") : text.index("<h2>Training")]
    for name in names:
        assert section.count(f"<td>{name}</td>") == 2, "a row for positions and for the gripper"
        assert section.count(f"<title>{name}</title>") == 2, "and a curve"


def test_checkpoints_that_cannot_be_compared_are_named(
    heldout, checkpoint, served_checkpoint, tmp_path
):
    short = link_checkpoint(served_checkpoint, tmp_path / "short", chunk_size=CHUNK - 1)
    with pytest.raises(ConfigError, match=f"short has chunk_size {CHUNK - 1} and the last one"):
        evaluate_open_loop(
            short, checkpoint, untrained=checkpoint, dataset_name=heldout, output=tmp_path
        )
    with pytest.raises(ConfigError, match=r"short twice"):
        checkpoint_names([short, checkpoint, short])
    assert checkpoint_names([Path("a/x"), Path("b/x")]) == ["a/x", "b/x"]


def test_a_checkpoint_of_several_robots_acts_as_the_datasets(
    heldout, served_checkpoint, tmp_path, monkeypatch
):
    names = ("image_keys", "image_prompts", "action_mode", "state_desc", "action_dim")
    sawyer = {name: getattr(make_layout(), name) for name in names}
    arm = {"image_keys": ["front"], "image_prompts": ["Front"], "state_desc": ["joint"] * 3}
    arm |= {"action_mode": "relative", "action_dim": 3}
    robots = {"Arm": arm, "Sawyer": sawyer}
    folder = link_checkpoint(
        served_checkpoint, tmp_path / "both", robots=robots, robot_type="Arm", **arm
    )
    alone = link_checkpoint(served_checkpoint, tmp_path / "alone")

    def evaluate(checkpoint, name=heldout):
        output = tmp_path / f"of_{checkpoint.name}"
        evaluate_open_loop(
            checkpoint, untrained=checkpoint, dataset_name=name, output=output, num_steps=1,
            stride=10, num_episode_views=1, show=lambda _: None,
        )  # fmt: skip
        return json.loads((output / "open_loop.json").read_text())

    assert evaluate(folder) == evaluate(alone)
    fields = {**dataset_fields(heldout), "robot_type": "Leg"}
    monkeypatch.setitem(register.CONVERSATION_DATA, "leg", fields)
    with pytest.raises(DataError, match=r"robot_type 'Leg' is unknown .*\['Arm', 'Sawyer'\]"):
        evaluate(folder, "leg")


def test_targets_are_the_recorded_actions(heldout):
    held_out = HeldOut.open(heldout, make_layout())
    lines = held_out.dataset.episodes[0].path.read_text().splitlines()
    recorded = np.array([json.loads(line)["action"] for line in lines])
    sample = held_out.dataset[FRAMES - 3]
    np.testing.assert_allclose(sample["action"][0, :3], recorded[-3:], atol=1e-6)
    assert sample["action_mask"][0, :, 0].tolist() == [True] * 3 + [False] * (CHUNK - 3)
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


def test_each_step_has_its_own_error_and_steps_that_no_frame_has_are_gaps():
    error = MeanError.zeros(1)
    mask = np.array([[[True], [True], [False]], [[True], [False], [False]]])
    predicted = np.array([[[1.0], [4], [100]], [[3], [100], [100]]])
    for one in range(2):  # in two batches
        error.add(predicted[one : one + 1], np.zeros((1, 3, 1)), mask[one : one + 1])
    np.testing.assert_array_equal(error.by_step()[:, 0], [2.0, 4.0, np.nan])
    assert error.mean().tolist() == [8 / 3]
    assert error.num_frames == 2


def test_errors_by_step_are_averaged_within_a_kind_only():
    desc = ["eef"] * 6 + ["gripper"]
    dimensions, units = name_dimensions(make_layout(state_desc=desc, action_dim=7))
    steps = np.arange(14.0).reshape(2, 7)
    errors = OpenLoopErrors(
        dimensions, units, {"trained": steps.mean(axis=0).tolist()}, [0, 1, 2], 1,
        {"trained": steps},
    )  # fmt: skip
    kinds = {kind.kind: kind for kind in errors.horizon()}
    assert {name: kind.unit for name, kind in kinds.items()} == {
        "position": "m", "rotation": "rad", "gripper": "",
    }  # fmt: skip
    assert kinds["position"].by_step["trained"].tolist() == [1.0, 8.0]
    assert kinds["rotation"].by_step["trained"].tolist() == [4.0, 11.0]
    assert kinds["gripper"].by_step["trained"].tolist() == [6.0, 13.0]
    assert kinds["rotation"].overall["trained"] == 7.5


def test_the_table_shows_metres_as_millimetres_and_a_long_horizon_in_part():
    values = np.linspace(0.001, 0.05, 50)
    text = render_horizon([HorizonErrors("position", "m", {"<a>": 0.0255}, {"<a>": values})])
    assert "Position error by step, mm" in text
    assert "<td>&lt;a&gt;</td><td>25.5</td><td>1.00</td>" in text
    assert text.count("<td>") == 12
    assert "step 50<" in text
    assert shown_steps(3) == [0, 1, 2]
    assert (shown_steps(50)[0], shown_steps(50)[-1], len(set(shown_steps(50)))) == (0, 49, 10)


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
