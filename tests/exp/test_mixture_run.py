"""A run on two robots of different sizes, from flags to a policy that serves both."""

import json

import numpy as np
import pytest
from PIL import Image
from robot_sets import write_robot_set
from run_ranks import experiment

from opendm.constants.robot import ActionMode
from opendm.data.config import DM05DataConfig
from opendm.data.mixture import Mixture
from opendm.data.normalize import NormStats, NormStatsFile
from opendm.dataset.register import CONVERSATION_DATA, register_dataset
from opendm.errors import ConfigError
from opendm.exp import training
from opendm.exp.checking import check_layout
from opendm.exp.dm05_exp import run
from opendm.exp.policy_layout import policy_layout
from opendm.infer.observation import Observation
from opendm.infer.policy import Policy
from opendm.model.dm05.config import DM05ModelConfig
from opendm.runtime import Runtime
from opendm.trainer.interrupt import StopRequest


@pytest.fixture(scope="module")
def robots(tmp_path_factory):
    """Names of two registered sets: a small arm with one camera, a large one with two."""
    folder = tmp_path_factory.mktemp("robots")
    sizes = {"mix_small": (1, 3, 3, 2), "mix_large": (2, 5, 5, 3)}
    for name, (cameras, state, action, episodes) in sizes.items():
        write_robot_set(
            folder / name,
            num_images=cameras, state_dim=state, action_dim=action, num_episodes=episodes,
        )  # fmt: skip
        register_dataset(
            {
                name: {
                    "jsonl_dir": str(folder / name),
                    "image_dir": str(folder / name),
                    "image_keys": [f"images_{camera}" for camera in range(1, cameras + 1)],
                    "image_prompts": [f"View {camera}" for camera in range(1, cameras + 1)],
                    "state_desc": ["joint"] * (state - 1) + ["gripper"],
                    "robot_type": name.upper(),
                    "action_mode": "absolute" if name == "mix_small" else "relative",
                }
            }
        )
    yield list(sizes)
    for name in sizes:
        del CONVERSATION_DATA[name]


def config(tmp_path, **values):
    data = DM05DataConfig(norm_stats_root=str(tmp_path / "stats"))
    for name, value in values.items():
        setattr(data, name, value)
    return data


def test_two_robots_train_together_and_are_both_served(robots, tiny_checkpoint, tmp_path):
    exp = experiment(
        tiny_checkpoint,
        tmp_path / "run",
        data_config__datasets=[f"{robots[0]}=1", f"{robots[1]}=3"],
        data_config__norm_stats_default_robot_type="MIX_LARGE",
        trainer_config__num_train_steps=2,
    )
    assert run(exp) == 0
    folder = tmp_path / "run"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    statistics = NormStatsFile.load(folder / "norm_stats.json")
    assert sorted(statistics.profiles) == ["MIX_LARGE", "MIX_SMALL"]
    layout = json.loads((folder / "opendm.json").read_text())
    assert layout["robot_type"] == "MIX_LARGE"
    assert layout["robots"]["MIX_SMALL"]["action_mode"] == "absolute"
    assert layout["robots"]["MIX_LARGE"]["image_prompts"] == ["View 1", "View 2"]

    policy = Policy.from_checkpoint(folder)
    picture = Image.new("RGB", (32, 24), "gray")
    for robot, cameras, size in (("MIX_SMALL", 1, 3), ("MIX_LARGE", 2, 5)):
        images = {f"images_{camera}": picture for camera in range(1, cameras + 1)}
        actions = policy.act(Observation([0.0] * size, images, "pick up the cube", robot))
        assert actions.shape == (4, size)
        assert np.isfinite(actions).all()


def built(data, robots, tiny_checkpoint):
    from opendm.data.processor import load_processor

    data.compute_norm_stats(4)
    return data.build_dataset(load_processor(tiny_checkpoint), 4, 1024)


@pytest.mark.parametrize(
    ("mixture_by", "shares"),
    [("frames", (16 / 40, 24 / 40)), ("episodes", (2 / 5, 3 / 5)), ("tasks", (1 / 2, 1 / 2))],
)
def test_weights_by_frames_episodes_and_tasks(
    mixture_by, shares, robots, tiny_checkpoint, tmp_path
):
    data = config(
        tmp_path,
        datasets=robots, mixture_by=mixture_by, norm_stats_default_robot_type="MIX_LARGE",
    )  # fmt: skip
    mixed = built(data, robots, tiny_checkpoint)
    rows = np.concatenate([mixed.draw_order(0, epoch)[1] for epoch in range(10)])
    parts = [mixed.locate(int(row))[0] for row in rows]
    assert parts.count(0) / len(parts) == pytest.approx(shares[0], abs=0.01)


def test_tasks_of_one_dataset_are_balanced(tiny_checkpoint, tmp_path):
    data = config(tmp_path, mixture_by="tasks", dataset_name="demo")
    mixed = built(data, None, tiny_checkpoint)
    assert isinstance(mixed, Mixture)
    assert len(mixed.groups) == 3
    assert max(mixed.counts) - min(mixed.counts) <= 1


def test_held_out_episodes_are_in_no_draw(robots, tiny_checkpoint, tmp_path):
    data = config(
        tmp_path, datasets=robots, val_episodes=1, norm_stats_default_robot_type="MIX_LARGE"
    )
    mixed = built(data, robots, tiny_checkpoint)
    from opendm.data.processor import load_processor

    held_out = data.build_val_dataset(load_processor(tiny_checkpoint), 4, 1024)
    assert [len(part.episodes) for part in mixed.parts] == [1, 2]
    assert [len(part.episodes) for part in held_out.parts] == [1, 1]
    for trained, held in zip(mixed.parts, held_out.parts, strict=True):
        assert not {e.name for e in trained.episodes} & {e.name for e in held.episodes}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo=0"], "positive number"),
        (["demo=-1"], "positive number"),
        (["demo=nan"], "positive number"),
        (["demo=much"], "positive number"),
        (["=2"], "expected NAME"),
        (["demo=1", "demo_heldout"], "a weight to each dataset or to none"),
        (["demo", "demo"], "named twice"),
        (["demos"], "did you mean 'demo'"),
    ],
)
def test_wrong_mixtures_are_refused(words, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, datasets=words).validate()


def test_folders_of_one_dataset_do_not_go_with_a_mixture(tmp_path):
    with pytest.raises(ConfigError, match="jsonl-dir and image-dir name the folders of one"):
        config(tmp_path, datasets=["demo"], jsonl_dir="x").validate()


def test_one_robot_in_two_action_modes_is_refused(robots, tmp_path):
    fields = CONVERSATION_DATA[robots[0]]
    register_dataset({"mix_again": {**fields, "action_mode": "relative"}})
    try:
        with pytest.raises(ConfigError, match=r"'mix_again' \(RELATIVE\)"):
            config(tmp_path, datasets=[robots[0], "mix_again"]).validate()
    finally:
        del CONVERSATION_DATA["mix_again"]


def test_several_robots_need_a_default(robots, tmp_path):
    with pytest.raises(ConfigError, match="norm-stats-default-robot-type"):
        config(tmp_path, datasets=robots).compute_norm_stats(4)


def test_a_declared_mode_holds_for_its_dataset_alone(robots, tmp_path):
    parts = config(tmp_path, datasets=robots).parts()
    assert [part.action_mode for part in parts] == [ActionMode.ABSOLUTE, ActionMode.RELATIVE]


@pytest.fixture
def untyped(tmp_path):
    """A statistics file of no robot type."""
    entry = NormStats(np.zeros(3), np.ones(3), -np.ones(3), np.ones(3))
    path = tmp_path / "untyped.json"
    NormStatsFile({None: {"state": entry, "action": entry}}).save(path)
    return path


def test_two_robots_need_statistics_that_name_a_robot(robots, tiny_checkpoint, untyped, tmp_path):
    exp = experiment(
        tiny_checkpoint, tmp_path / "run",
        data_config__datasets=robots, data_config__norm_stats_file=str(untyped),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"do not name a robot type.*MIX_LARGE', 'MIX_SMALL"):
        policy_layout(exp, untyped)
    [problem] = check_layout(exp)
    assert problem.is_error
    assert "norm-stats-file" in problem.reason


def test_one_robot_shown_in_two_ways_is_refused_before_a_model_is_read(
    robots, tiny_checkpoint, tmp_path, monkeypatch, caplog
):
    source = CONVERSATION_DATA[robots[0]]
    other = write_robot_set(tmp_path / "again", num_images=1, state_dim=3, action_dim=3)
    fields = {**source, "jsonl_dir": str(other), "image_dir": str(other), "image_prompts": ["Top"]}
    monkeypatch.setitem(CONVERSATION_DATA, "mix_again", fields)
    monkeypatch.setattr(DM05ModelConfig, "build_model", lambda *_, **__: pytest.fail("built"))
    exp = experiment(
        tiny_checkpoint, tmp_path / "run", data_config__datasets=[robots[0], "mix_again"],
        data_config__action_mode=ActionMode.ABSOLUTE,
    )  # fmt: skip
    assert "not the same cameras" in next(check_layout(exp)).reason
    assert run(exp) == ConfigError.exit_code
    assert not (tmp_path / "stats").exists()


def test_training_says_that_statistics_of_other_data_are_replaced(
    tiny_checkpoint, tmp_path, monkeypatch, caplog
):
    folder = write_robot_set(tmp_path / "set", num_images=1, state_dim=3, action_dim=3)
    exp = experiment(
        tiny_checkpoint, tmp_path / "run", data_config__dataset_name=str(folder),
        data_config__action_mode=ActionMode.ABSOLUTE, trainer_config__num_train_steps=1,
    )  # fmt: skip
    path = exp.data_config.compute_norm_stats(4)
    episode = folder / "episode_0.jsonl"
    episode.write_text(episode.read_text() + episode.read_text())
    runtime = Runtime.from_env()
    monkeypatch.setattr(training, "build_model", lambda *_: pytest.exit("the model is next"))
    with caplog.at_level("INFO", "opendm"), pytest.raises(pytest.exit.Exception):
        training.build_trainer(exp, runtime, StopRequest())
    said = f"statistics {path} are computed again because of another fingerprint"
    assert said in caplog.text
    assert f"check: {path} statistics have another fingerprint than this run" in caplog.text
    assert caplog.text.index("than this run") < caplog.text.index(said)


def test_training_refuses_statistics_that_change_while_it_starts(
    tiny_checkpoint, tmp_path, monkeypatch
):
    exp = experiment(tiny_checkpoint, tmp_path / "run")
    path = exp.data_config.norm_stats_path(4)
    build = DM05DataConfig.build_dataset

    def build_late(*arguments, **options):
        path.write_text(path.read_text() + " ")
        return build(*arguments, **options)

    monkeypatch.setattr(DM05DataConfig, "build_dataset", build_late)
    with pytest.raises(ConfigError, match="were replaced while this run was starting"):
        training.build_trainer(exp, Runtime.from_env(), StopRequest())


def test_a_mixture_that_holds_one_file_twice_is_refused(tmp_path, monkeypatch):
    folder = write_robot_set(tmp_path / "d3" / "sub", num_images=1, state_dim=3, action_dim=3)
    (tmp_path / "link").symlink_to(folder)
    absolute = {"action_mode": ActionMode.ABSOLUTE}
    for other in (folder.parent, f"{folder}/.", tmp_path / "link"):
        mixed = config(tmp_path, datasets=[str(folder), str(other)], **absolute)
        with pytest.raises(ConfigError, match=r"both hold the file .*episode_0\.jsonl"):
            mixed.validate()
    fields = {
        "jsonl_dir": str(folder), "image_dir": str(folder),
        "image_keys": ["images_1"], "image_prompts": ["Head"],
    }  # fmt: skip
    for name, episodes in (("first", [0]), ("second", [1]), ("both", [0, 1])):
        monkeypatch.setitem(CONVERSATION_DATA, name, {**fields, "episodes": episodes})
    config(tmp_path, datasets=["first", "second"], **absolute).validate()
    with pytest.raises(ConfigError, match="both hold the file"):
        config(tmp_path, datasets=["first", "both"], **absolute).validate()


def test_weights_do_not_change_the_statistics(robots, tmp_path):
    contents = set()
    for weight in (1, 99):
        mixed = config(
            tmp_path, norm_stats_root=str(tmp_path / str(weight)),
            datasets=[f"{robots[0]}=1", f"{robots[1]}={weight}"],
            norm_stats_default_robot_type="MIX_LARGE",
        )  # fmt: skip
        contents.add(mixed.compute_norm_stats(4).read_bytes())
    assert len(contents) == 1
