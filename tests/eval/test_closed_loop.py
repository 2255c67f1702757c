"""Closed-loop evaluation without a simulator: rates, blind motion, seeds, queries and the page."""

import dataclasses
import io
import json
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opendm.errors import CheckpointError, ConfigError, DataError
from opendm.eval.metaworld import environment
from opendm.eval.metaworld.controls import BlindActor, check_fits
from opendm.eval.metaworld.demonstrations import (
    check_unseen,
    mean_demonstration,
    recorded_actions,
    stretched,
)
from opendm.eval.metaworld.environment import absolute_action, relative_command
from opendm.eval.metaworld.evaluate import (
    Plan,
    check_distinct_steps,
    evaluate_metaworld,
    evaluate_task,
    other_sentence,
    training_steps,
    write_figures,
)
from opendm.eval.metaworld.page import TaskResult, gif_bytes, render_page
from opendm.eval.metaworld.rollout import (
    Outcome,
    Pictures,
    Rules,
    View,
    run_episodes,
    success_rate,
)
from opendm.eval.metaworld.statistics import Z_95, Rate
from opendm.eval.metaworld.tasks import TASKS, find_task
from opendm.infer.layout import PolicyLayout

REPOSITORY = Path(__file__).parents[2]
LAYOUT = PolicyLayout(
    dataset_name="metaworld",
    image_keys=["images_1", "images_2"],
    image_prompts=["Corner", "Gripper"],
    action_mode="relative",
    n_bins=256,
    add_state=True,
    action_dim=4,
    chunk_size=16,
    max_length=104,
)


@pytest.mark.parametrize(("successes", "trials"), [(0, 30), (1, 7), (49, 50), (100, 100)])
def test_wilson_bounds_solve_the_score_equation(successes, trials):
    share = successes / trials
    for bound in Rate(successes, trials).interval():
        # exact at 0 and 1, where one bound is the share itself
        error = abs(share - bound) - Z_95 * math.sqrt(bound * (1 - bound) / trials)
        assert abs(error) < 1e-12 or bound == pytest.approx(share, abs=1e-12)
    low, high = Rate(successes, trials).interval()
    assert 0 <= low <= share <= high <= 1 < 1 + high - low


def test_published_interval():
    assert str(Rate(49, 50)) == "49/50 [0.90, 1.00]"
    assert str(Rate(0, 30)) == "0/30 [0.00, 0.11]"


def test_relative_command_inverts_absolute_action():
    rng = np.random.default_rng(0)
    state, command = rng.normal(size=4), rng.uniform(-1, 1, 4)
    np.testing.assert_allclose(relative_command(state, absolute_action(state, command)), command)
    far = relative_command(state, state + 3)
    np.testing.assert_array_equal(far, [1, 1, 1, 1])


def test_equal_demonstrations_have_themselves_as_mean():
    motion = np.random.default_rng(1).normal(size=(9, 4))
    np.testing.assert_allclose(mean_demonstration([motion, motion]), motion)


def test_time_warping_undoes_another_pace():
    slow = np.linspace([0.0, 1], [6.0, 4], 61)
    np.testing.assert_allclose(stretched(slow, 13), np.linspace([0.0, 1], [6.0, 4], 13), atol=1e-12)
    np.testing.assert_allclose(stretched(slow, 13)[[0, -1]], slow[[0, -1]])


@pytest.fixture
def demonstrations(tmp_path):
    folder = tmp_path / "train"
    folder.mkdir()
    for number, prompt in enumerate(["Open the door", "Open the door", "Other"]):
        frames = [{"action": [step, 0, 0, 1], "prompt": prompt} for step in range(4 + number)]
        text = "".join(json.dumps(frame) + "\n" for frame in frames)
        (folder / f"door-open-v3_{number:02d}.jsonl").write_text(text)
    return folder


def test_only_a_tasks_own_episodes_are_read(demonstrations):
    lengths = [len(one) for one in recorded_actions(demonstrations, "Open the door")]
    assert lengths == [4, 5]
    (demonstrations / "x.jsonl").write_text('{"prompt": "Open the door"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl is no episode of the collector"):
        recorded_actions(demonstrations, "Open the door")


def test_a_seed_of_training_is_refused(demonstrations):
    assert "not checked" in check_unseen(range(50_000, 50_100), demonstrations)
    (demonstrations.parent / "seeds.json").write_text('{"a_00": 1000, "a_01": 50007}')
    assert "none of the 2" in check_unseen(range(50_008, 50_100), demonstrations)
    with pytest.raises(ConfigError, match="seed 50007 was used for a demonstration"):
        check_unseen(range(50_000, 50_100), demonstrations)
    for broken in ("{", "[1]", '{"a_00": null}'):
        (demonstrations.parent / "seeds.json").write_text(broken)
        with pytest.raises(DataError, match=r"seeds\.json is no file of the collector"):
            check_unseen(range(50_000, 50_100), demonstrations)


class Line:
    """A world on a line: solved when the hand is 5 cm or more from its start."""

    def __init__(self, reach):
        self.reach, self.image_size = reach, 8
        self.resets, self.num_looks = [], 0

    def reset(self, seed):
        self.resets.append(seed)
        self.place = np.array([seed % 7 / 100, 0.0, 0.0, 1.0])
        self.start = self.place[0]
        return np.concatenate([self.place, np.zeros(35)])

    def step(self, command):
        self.place[:3] += command[:3] / 100
        solved = bool(self.place[0] - self.start >= self.reach)
        return np.concatenate([self.place, np.zeros(35)]), solved

    def look(self):
        self.num_looks += 1
        shade = int(1000 * self.place[0]) % 256
        return dict.fromkeys(("corner2", "gripperPOV"), np.full((8, 8, 3), shade, np.uint8))


class Forward:
    """Goes on by 1 cm a step from where it sees the hand; remembers what it was asked."""

    def __init__(self):
        self.views, self.sizes = [], []

    def act(self, views):
        self.views += views
        self.sizes.append(len(views))
        ahead = np.arange(1, 17)[:, None] * np.array([0.01, 0, 0, 0])
        return [view.state + ahead for view in views]


def outcomes(num_worlds, seeds, **options):
    worlds = [Line(0.0999) for _ in range(num_worlds)]
    actor = Forward()
    found = run_episodes(actor, worlds, seeds, Rules(4, 30), **options)
    return [(o.seed, o.is_success, o.num_steps) for o in found], actor, worlds


def test_episodes_do_not_depend_on_how_many_run_at_once():
    seeds = range(50_000, 50_007)
    alone, _, _ = outcomes(1, seeds)
    together, actor, _ = outcomes(3, seeds)
    assert together == alone == [(seed, True, 10) for seed in seeds]
    assert max(actor.sizes) == 3


def test_only_the_first_actions_of_a_chunk_are_executed():
    _, actor, _ = outcomes(1, [1])
    assert [view.step for view in actor.views] == [0, 4, 8]


def test_an_unsolved_episode_ends_at_the_limit():
    worlds = [Line(9.0)]
    (found,) = run_episodes(Forward(), worlds, [3], Rules(4, 30))
    assert (found.is_success, found.num_steps) == (False, 30)
    assert success_rate([found]).value == 0


def test_live_pictures_follow_the_hand():
    _, actor, _ = outcomes(1, [0])
    shades = [view.images["corner2"][0, 0, 0] for view in actor.views]
    assert len(set(shades)) == len(shades) == 3


def test_blank_and_frozen_pictures_show_nothing_of_the_episode():
    _, actor, worlds = outcomes(1, [0], pictures=Pictures.BLANK)
    assert not any(view.images["corner2"].any() for view in actor.views)
    assert worlds[0].num_looks == 0
    _, actor, worlds = outcomes(1, [0], pictures=Pictures.FROZEN)
    frozen = {view.images["gripperPOV"].tobytes() for view in actor.views}
    assert len(frozen) == 1
    assert frozen != {np.zeros((8, 8, 3), np.uint8).tobytes()}
    assert worlds[0].resets[-1] == 0 != worlds[0].resets[0]


def test_kept_frames_are_one_per_query_and_the_end():
    worlds = [Line(0.0999), Line(0.0999)]
    found = run_episodes(Forward(), worlds, [0, 1, 2], Rules(4, 30), num_kept=1)
    assert [len(outcome.frames) for outcome in found] == [4, 0, 0]


def test_a_blind_motion_goes_on_where_it_was_and_holds_its_end():
    actor = BlindActor(np.arange(12.0).reshape(3, 4))
    views = [View(1, step, np.zeros(4), {}) for step in (0, 2, 9)]
    assert [len(chunk) for chunk in actor.act(views)] == [3, 1, 1]
    np.testing.assert_array_equal(actor.act(views)[2], [[8, 9, 10, 11]])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image_keys": ["head", "wrist"]}, r"sees cameras \['head', 'wrist'\]"),
        ({"action_dim": 7}, "has 7 action dimensions; the simulator takes 4"),
        ({"state_desc": ["joint"] * 7}, "reads 7 state dimensions"),
        ({"is_history": True}, "reads earlier pictures; the simulator shows none"),
    ],
)
def test_a_checkpoint_of_another_robot_is_refused(changes, said):
    check_fits(LAYOUT, "policy")
    with pytest.raises(CheckpointError, match=said):
        check_fits(dataclasses.replace(LAYOUT, **changes), "policy")


def test_no_more_actions_are_executed_than_a_chunk_has():
    check_fits(LAYOUT, "policy", 16)
    with pytest.raises(ConfigError, match=r"--actions-per-query 17 .* allowed: 1 to 16"):
        check_fits(LAYOUT, "policy", 17)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": ["reach-v4"]}, "unknown task 'reach-v4'; near matches: .*reach-v3"),
        ({"seed": 1000}, "--seed 1000 is too small; give 50000 or more"),
        ({"num_episodes": 0}, "--episodes"),
    ],
)
def test_wrong_flags_are_one_line(changes, said, tmp_path):
    plan = Plan(**{"checkpoints": [tmp_path], "tasks": ["reach-v3"], **changes})
    with pytest.raises(ConfigError, match=said):
        plan.validate()


def test_the_foreign_sentence_is_of_the_same_scene():
    alike = [name for name in TASKS if name.startswith("alike-")]
    names = [alike[0], "door-open-v3", *alike[1:]]
    for name in alike:
        other = other_sentence(name, names)
        assert other in {find_task(task).sentence for task in alike if task != name}
    assert other_sentence("door-open-v3", ["door-open-v3"]) is None


def test_tasks_that_look_alike_differ_in_their_sentences_only():
    alike = [task for name, task in TASKS.items() if name.startswith("alike-")]
    assert len({task.sentence for task in alike}) == len(alike) == 3
    assert all(task.has_disc and task.goal_radius_m is None for task in alike)
    ranges = [np.delete(np.array(task.start_range), 5, axis=1) for task in alike]  # not the height
    assert all(np.array_equal(ranges[0], other) for other in ranges)


def test_training_steps_are_read_from_name_or_run(tmp_path):
    assert training_steps(tmp_path / "checkpoint-350") == 350
    assert training_steps(tmp_path) == -1
    (tmp_path / "run.json").write_text('{"config": {"trainer_config": {"num_train_steps": 1200}}}')
    assert training_steps(tmp_path) == 1200


def test_checkpoints_of_equal_steps_are_refused(tmp_path):
    check_distinct_steps([tmp_path / "checkpoint-3", tmp_path / "checkpoint-4"])
    with pytest.raises(ConfigError, match="both have 3 training steps"):
        check_distinct_steps([tmp_path / "a/checkpoint-3", tmp_path / "b/checkpoint-3"])
    with pytest.raises(ConfigError, match="both have an unknown number of steps"):
        check_distinct_steps([tmp_path / "a", tmp_path / "b"])


def test_controls_are_those_of_the_last_checkpoint_whatever_its_steps(tmp_path):
    """Paths in the order of a shell: checkpoint-1200 comes before checkpoint-600."""
    late, judged, start = tmp_path / "checkpoint-1200", tmp_path / "checkpoint-600", tmp_path / "0"
    start.mkdir()
    (start / "config.json").write_text("{}")
    demonstrations = tmp_path / "train"
    demonstrations.mkdir()
    plan = Plan(checkpoints=[late, judged], tasks=["door-open-v3"], num_episodes=4, untrained=start)
    solved = {late: 4, judged: 3, start: 1}
    said = []

    def play(_task, condition, seeds):
        count = solved[condition.checkpoint] if condition.pictures is Pictures.LIVE else 0
        return lambda: [Outcome(seed, i < count, 9) for i, seed in enumerate(seeds)]

    result = evaluate_task(plan, "door-open-v3", demonstrations, play, said.append)
    assert result.trained == Rate(3, 4)
    assert result.by_step == {1200: Rate(4, 4), 600: Rate(3, 4)}
    assert result.controls == {
        "untrained": Rate(1, 4),
        "blank images": Rate(0, 4),
        "frozen images of another start": Rate(0, 4),
    }
    assert any("no blind control" in line and "--demonstrations" in line for line in said)
    write_figures(tmp_path / "figures.json", [result], {})
    figures = json.loads((tmp_path / "figures.json").read_text())["tasks"]["door-open-v3"]
    assert figures["judged"]["successes"] == 3


@pytest.mark.parametrize("flag", ["untrained", "demonstrations"])
def test_a_path_that_is_not_there_is_found_before_anything_is_played(flag, tmp_path):
    LAYOUT.save(tmp_path)
    (tmp_path / "train").mkdir()
    paths = {"untrained": tmp_path / "none", "demonstrations": tmp_path / "train"}
    paths[flag] = tmp_path / "none"
    plan = Plan(checkpoints=[tmp_path], tasks=["reach-v3"], **paths)
    with pytest.raises(ConfigError, match=f"--{flag} .*none"):
        evaluate_metaworld(plan, tmp_path)


def test_the_page_shows_every_rate_and_loads_nothing():
    frames = [np.full((8, 8, 3), shade, np.uint8) for shade in (0, 120, 240)]
    result = TaskResult(
        "door-open-v3",
        "Open <it>",
        Rate(7, 8),
        {350: Rate(1, 8), 700: Rate(7, 8)},
        {"blank": Rate(0, 8)},
        frames,
    )
    page = render_page("run", [result], {"seeds": "50000 to 50007"})
    assert "7 of 8" in page
    assert "0 of 8" in page
    assert "Open &lt;it&gt;" in page
    assert "Success against training" in page
    assert "http:" not in page.replace("http://www.w3.org", "")
    assert "https:" not in page
    assert Image.open(io.BytesIO(gif_bytes(frames))).n_frames == 3


@pytest.mark.parametrize(
    ("gl", "package"), [("osmesa", "apt install libosmesa6"), ("egl", "apt install libegl1")]
)
def test_a_missing_library_names_its_package(gl, package, monkeypatch):
    monkeypatch.setattr(environment.ctypes.util, "find_library", lambda _: None)
    with pytest.raises(ConfigError, match=package):
        environment.prepare_simulator(gl)


def test_another_backend_of_opengl_is_refused():
    with pytest.raises(ConfigError, match=r"'glfw' \(--gl or MUJOCO_GL\); allowed: osmesa, egl"):
        environment.prepare_simulator("glfw")


def test_a_missing_simulator_names_the_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.setattr(environment.ctypes.util, "find_library", str)
    monkeypatch.setattr(environment.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"No module named 'mujoco'.*pip install 'opendm\[sim\]'"):
        environment.prepare_simulator("osmesa")


def test_numbers_of_episodes_are_one_for_all_tasks_or_one_for_each(tmp_path, capsys):
    collector = runpy.run_path(str(REPOSITORY / "playground/collect_metaworld.py"))
    tasks = ["--tasks", *list(TASKS)[:3]]
    output = tmp_path / "new"
    counts = ["--episodes-per-task", "5", "6"]
    assert collector["main"](["--output", str(output), *tasks, *counts]) == 2
    assert "2 numbers for 3 tasks" in capsys.readouterr().err
    assert not output.exists()


def test_the_same_recording_is_kept_and_an_interrupted_one_is_not(tmp_path, capsys):
    collector = runpy.run_path(str(REPOSITORY / "playground/collect_metaworld.py"))
    words = ["--output", str(tmp_path), "--tasks", "alike-push-v3", "--keep"]
    options = collector["parse_options"](words)
    wanted = collector["recording"](options, {"alike-push-v3": 10})
    assert not collector["has_recording"](tmp_path, wanted)
    for name in ("recording.json", "seeds.json"):
        (tmp_path / name).write_text(json.dumps(wanted))
    assert collector["main"](words) == 0  # and needs no simulator
    assert "has this recording already" in capsys.readouterr().out
    for other in ({"alike-push-v3": 11}, {"alike-reach-v3": 10}):
        assert not collector["has_recording"](tmp_path, collector["recording"](options, other))
    collector["clear_output"](tmp_path, overwrite=True)
    assert not any(tmp_path.iterdir())
