"""Meta-World itself: starts, pictures, recorded actions and a whole evaluation. `make test-sim`."""

import json
import runpy
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from opendm.cli import main
from opendm.data.normalize import NormStats, NormStatsFile
from opendm.eval.metaworld.controls import BlindActor, Condition
from opendm.eval.metaworld.environment import World, prepare_simulator
from opendm.eval.metaworld.rollout import Pictures, Rules, run_episodes
from opendm.eval.metaworld.stage import StageSettings, open_stages
from opendm.eval.metaworld.tasks import TASKS
from opendm.infer.layout import PolicyLayout
from opendm.model.dm05.tiny import SIZES, build_tiny_checkpoint
from opendm.runtime import chosen_opengl

pytestmark = pytest.mark.sim
REPOSITORY = Path(__file__).parents[2]
BUTTON = "button-press-topdown-v3"
ALIKE = tuple(name for name in TASKS if name.startswith("alike-"))
SIZE = 96
GL = chosen_opengl() or "osmesa"


@pytest.fixture(scope="module", autouse=True)
def simulator():
    prepare_simulator(GL)


@pytest.fixture(scope="module")
def collector():
    return runpy.run_path(str(REPOSITORY / "playground/collect_metaworld.py"))


@pytest.fixture(scope="module")
def button():
    world = World.open(BUTTON, SIZE)
    yield world
    world.close()


def first_look(world, seed):
    world.reset(seed)
    return np.stack([image.copy() for image in world.look().values()])


def test_a_start_follows_from_its_seed(button):
    before = first_look(button, 50_000)
    other = first_look(button, 50_001)
    assert np.array_equal(first_look(button, 50_000), before)
    assert not np.array_equal(other, before)


def test_two_worlds_at_once_show_what_one_shows(button):
    alone = first_look(button, 50_002)
    second = World.open(BUTTON, SIZE)
    try:
        assert np.array_equal(first_look(second, 50_002), alone)
        assert np.array_equal(first_look(button, 50_002), alone)
    finally:
        second.close()
    assert np.array_equal(first_look(button, 50_002), alone)


def test_the_widened_range_is_drawn_from(button):
    starts = []
    for seed in range(50_000, 50_040):
        button.reset(seed)
        starts.append(button.env.obj_init_pos[:2].copy())
    low, high = np.min(starts, axis=0), np.max(starts, axis=0)
    assert (low >= [-0.25, 0.7]).all()
    assert (high <= [0.25, 0.9]).all()
    assert high[0] - low[0] > 0.4


def test_the_first_camera_is_neither_mirrored_nor_upside_down(button):
    """The robot's red base stands left of the table, and the background is above it."""
    image = first_look(button, 50_000)[0].astype(int)
    red = (image[..., 0] > 80) & (image[..., 1] < 60) & (image[..., 2] < 60)
    assert red[:, :48].sum() > 2 * red[:, 48:].sum()
    assert image[:20].mean() < 30 < image[-30:].mean()


@pytest.mark.parametrize("name", [BUTTON, *ALIKE])
def test_recorded_actions_solve_their_own_start(name, collector):
    """Without noise: what was written down, executed with live feedback, presses the button."""
    from metaworld.policies import ENV_POLICY_MAP

    world = World.open(name, SIZE)
    expert = ENV_POLICY_MAP[world.task.environment or name]()
    recorder = collector["Recorder"](world, expert, 200, 90)
    seeds = [seed for seed in range(1000, 1012, 2) if recorder.record(seed) is not None][:2]
    try:
        assert len(seeds) == 2
        for seed in seeds:
            motion = np.array([frame.action for frame in recorder.record(seed)])
            (outcome,) = run_episodes(BlindActor(motion), [world], [seed], Rules(8, 200))
            assert outcome.is_success, seed
    finally:
        world.close()


def test_a_hand_that_holds_the_puck_is_hardly_disturbed(collector):
    """What was executed differs from the label by the noise, of which a quarter is left then."""
    from metaworld.policies import ENV_POLICY_MAP

    world = World.open("alike-push-v3", SIZE)
    commands = []

    def step(command, step=World.step):
        commands.append(np.array(command))
        return step(world, command)

    recorder = collector["Recorder"](world, ENV_POLICY_MAP["push-v3"](), 200, 90)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "step", lambda _, command: step(command))
        frames = recorder.record(1001)
    world.close()
    labels = np.array(
        [np.append((frame.action - frame.state)[:3] * 100, frame.action[3]) for frame in frames]
    )
    executed = np.array(commands[: len(labels)])
    apart = abs(executed[:, :3] - labels[: len(executed), :3]).max(axis=1)
    is_holding = executed[:, 3] > 0
    assert is_holding.any()
    assert not is_holding.all()
    assert apart[~is_holding].max() > 0.2
    assert apart[is_holding].max() < 0.4


def test_only_the_sentence_tells_the_alike_tasks_apart():
    looks, hands = [], []
    for name in ALIKE:
        world = World.open(name, SIZE)
        looks.append([first_look(world, seed) for seed in (50_000, 50_001)])
        hands.append(world.reset(50_000)[:4])
        world.close()
    reach, push, pick = (np.array(look, dtype=int) for look in looks)
    for other in (push, pick):  # the puck of push settles to within a micrometre of the others'
        assert (abs(reach - other) > 2).mean() < 1e-3
    assert (abs(reach[0] - reach[1]) > 2).mean() > 1e-2
    np.testing.assert_allclose(hands, [hands[0]] * 3, atol=1e-6)  # the prompt has them too
    assert len({TASKS[name].sentence for name in ALIKE}) == 3


def test_episodes_do_not_depend_on_how_many_processes_record_them(collector, tmp_path):
    options = {
        "tasks": [BUTTON], "heldout_per_task": 1, "image_size": 32,
        "jpeg_quality": 80, "seed": 1001, "max_steps": 200, "gl": GL, "overwrite": False,
    }  # fmt: skip
    whole = Namespace(**options, output=tmp_path / "whole")
    shared = Namespace(**options, output=tmp_path / "shared")
    jobs = collector["plan_jobs"](BUTTON, 2, whole)
    collector["record_jobs"](jobs, whole)
    for part in (jobs[1::2], jobs[0::2]):
        collector["record_jobs"](part, shared)
    files = sorted(p.relative_to(whole.output) for p in whole.output.rglob("*") if p.is_file())
    assert len(files) > 100
    for file in files:
        assert (whole.output / file).read_bytes() == (shared.output / file).read_bytes()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sim") / "policy"
    build_tiny_checkpoint(folder, ["Press the button"], chunk_size=16, size=SIZES["sim"])
    PolicyLayout(
        dataset_name="metaworld", image_keys=["images_1", "images_2"],
        image_prompts=["Corner", "Gripper"], action_mode="relative",
        state_desc=["eef", "eef", "eef", "gripper"], robot_type="Sawyer", n_bins=256,
        add_state=True, action_dim=4, chunk_size=16, max_length=160,
    ).save(folder)  # fmt: skip
    low, high = np.full(4, -0.1), np.full(4, 0.1)
    stats = NormStats(np.zeros(4), np.ones(4), low, high)
    NormStatsFile({"Sawyer": {"state": stats, "action": stats}}, "Sawyer").save(
        folder / "norm_stats.json"
    )
    return folder


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demonstrations") / "train"
    folder.mkdir()
    frame = {"action": [0, 0.6, 0.2, 1], "prompt": TASKS[BUTTON].sentence}
    (folder / f"{BUTTON}_00.jsonl").write_text(3 * (json.dumps(frame) + "\n"))
    (folder.parent / "seeds.json").write_text(json.dumps({f"{BUTTON}_00": 1000}))
    return folder


def test_an_untrained_policy_fails_and_every_control_is_reported(
    checkpoint, demonstrations, tmp_path
):
    words = ["eval", "metaworld", "--checkpoint", checkpoint, "--task", BUTTON, "reach-v3"]
    words += ["--episodes", 1, "--flow-steps", 1, "--actions-per-query", 16]
    words += ["--untrained", checkpoint, "--demonstrations", demonstrations, "--output", tmp_path]
    assert main([*map(str, words), "--processes", "2"]) == 0
    figures = json.loads((tmp_path / "metaworld.json").read_text())
    button = figures["tasks"][BUTTON]
    assert set(button["controls"]) == {
        "untrained", "blind mean demonstration", "blank images",
        "frozen images of another start", f"told “{TASKS['reach-v3'].sentence}”",
    }  # fmt: skip
    assert {rate["successes"] for rate in button["controls"].values()} == {0}
    assert button["by_step"]["-1"]["episodes"] == 1
    assert "none of the 1" in figures["settings"]["seeds"]
    assert (tmp_path / f"{BUTTON}.gif").read_bytes()[:3] == b"GIF"
    assert TASKS[BUTTON].sentence in (tmp_path / "metaworld.html").read_text()


def test_the_outcome_does_not_depend_on_the_number_of_processes(
    checkpoint, demonstrations, tmp_path
):
    seeds, told = range(50_000, 50_012), TASKS[BUTTON].sentence
    blind = Condition("blind", None, told, Pictures.BLANK)
    policy = Condition("policy", checkpoint, told)
    settings = StageSettings(
        gl=GL, image_size=SIZE, rules=Rules(8, 16), num_flow_steps=1,
        demonstrations=demonstrations,
    )  # fmt: skip
    found = []
    for num_processes in (1, 2):
        with open_stages(settings, num_processes) as play:
            pending = [play(BUTTON, condition, seeds) for condition in (blind, policy)]
            found.append([outcome for wait in pending for outcome in wait()])
    alone, shared = found
    assert [outcome.seed for outcome in alone] == 2 * list(seeds)
    for one, other in zip(alone, shared, strict=True):
        assert (one.seed, one.num_steps) == (other.seed, other.num_steps)
        np.testing.assert_array_equal(one.frames, other.frames)
    kept = [index for index, outcome in enumerate(alone) if outcome.frames]
    assert kept == [0, 12]
