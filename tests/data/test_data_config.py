"""``DM05DataConfig``: its imports, its checks, its statistics, and the samples it builds."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from opendm.constants.robot import ActionMode, RobotStateDesc
from opendm.data.config import DM05DataConfig
from opendm.data.norm_stats_job import norm_stats_name
from opendm.data.normalize import NormStatsFile
from opendm.data.stat_file import check_unchanged
from opendm.dataset.register import CONVERSATION_DATA
from opendm.errors import ConfigError, DataError
from opendm.model.dm05.tiny import IMAGE_SIZE, build_processor


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A dataset of two episodes whose images do not exist."""
    episodes = tmp_path / "episodes"
    episodes.mkdir()
    for name in ("a", "b"):
        lines = [
            json.dumps({
                "images_1": {"type": "image", "url": "missing.jpg"},
                "state": [t * 0.1, 1.0],
                "action": [t * 0.1 + 0.05, 0.0],
                "prompt": "go",
            })
            for t in range(6)
        ]  # fmt: skip
        (episodes / f"{name}.jsonl").write_text("\n".join(lines))
    fields = {
        "jsonl_dir": str(episodes),
        "image_dir": str(tmp_path),
        "image_keys": ["images_1"],
        "image_prompts": ["Head"],
        "state_desc": [RobotStateDesc.EEF, RobotStateDesc.GRIPPER],
        "robot_type": "Sawyer",
    }
    monkeypatch.setitem(CONVERSATION_DATA, "unit_test", fields)
    return DM05DataConfig(dataset_name="unit_test", norm_stats_root=str(tmp_path / "stats"))


def test_importing_the_config_imports_no_framework():
    code = (
        "import sys, opendm.data.config\n"
        "heavy = {'torch', 'torchvision', 'transformers', 'PIL', 'av'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_fields_and_defaults():
    assert dataclasses.asdict(DM05DataConfig()) == {
        "dataset_name": "demo",
        "datasets": [],
        "mixture_by": "frames",
        "augment": True,
        "jsonl_dir": None,
        "image_dir": None,
        "n_bins": 256,
        "action_mode": ActionMode.RELATIVE,
        "compute_norm_stats_max_batches": None,
        "norm_stats_root": "./norm_stats",
        "norm_stats_default_robot_type": None,
        "norm_stats_file": None,
        "add_state": True,
        "is_history": False,
        "val_episodes": 0,
        "allow_outside_root": False,
        "bad_records": "refuse",
        "index_root": None,
        "verify_index": False,
    }


def test_path_has_the_public_name():
    path = DM05DataConfig().norm_stats_path(50)
    assert str(path) == "norm_stats/demo_1b0496770e852d94.json"


def test_what_is_counted_otherwise_has_a_file_of_its_own(config, tmp_path, monkeypatch):
    episodes = tmp_path / "episodes"
    other = tmp_path / "other" / "episodes"
    shutil.copytree(episodes, other)
    fields = CONVERSATION_DATA["unit_test"]
    for key, value in {
        "episodes": [0], "columns": {"state": "s"}, "angle_dims": [0], "speed": "slow",
    }.items():  # fmt: skip
        monkeypatch.setitem(CONVERSATION_DATA, key, {**fields, key: value})
    absolute = ActionMode.ABSOLUTE
    paths = [
        dataclasses.replace(config, **change).norm_stats_path(4)
        for change in (
            {},
            {"val_episodes": 1},
            {"val_episodes": 2},
            {"compute_norm_stats_max_batches": 1},
            {"bad_records": "skip"},
            {"jsonl_dir": str(other)},
            {"dataset_name": "episodes"},
            {"dataset_name": "columns"},
            {"dataset_name": "angle_dims"},
            {"dataset_name": str(episodes)},
            {"dataset_name": str(other)},
            {"datasets": ["unit_test"]},
            {"datasets": ["unit_test", "speed"]},
            {"datasets": ["unit_test", "speed"], "norm_stats_default_robot_type": "Sawyer"},
            {"action_mode": absolute, "datasets": ["unit_test", "speed"]},
        )
    ]
    assert len(set(paths)) == len(paths)
    slow = dataclasses.replace(config, dataset_name="speed").norm_stats_path(4)
    assert slow.name == norm_stats_name("speed", repr(config.action_transform(4)))


def test_a_long_mixture_has_a_file_name_that_file_systems_take():
    assert len(norm_stats_name("+".join(["a_long_name_of_a_set"] * 30), "x", "settings")) < 200


def test_two_runs_side_by_side_do_not_swap_their_numbers(config):
    other = dataclasses.replace(config, val_episodes=1)
    first = config.compute_norm_stats(4)
    content = first.read_bytes()
    assert other.compute_norm_stats(4).read_bytes() != content
    assert config.norm_stats_path(4).read_bytes() == content


def test_statistics_that_another_run_replaced_are_refused(config):
    path = config.compute_norm_stats(4)
    content = config.read_norm_stats(4)
    check_unchanged(path, content)
    other = json.loads(content)
    other["opendm"]["fingerprint"] = "of other data"
    path.write_text(json.dumps(other))
    for check in (lambda: config.read_norm_stats(4), lambda: check_unchanged(path, content)):
        with pytest.raises(ConfigError, match="were replaced while this run was starting"):
            check()


def test_a_transform_without_a_text_of_its_own_is_refused(config):
    class Odd(DM05DataConfig):
        def action_transform(self, chunk_size):
            return object()

    with pytest.raises(ConfigError, match="no __repr__ of its own"):
        Odd(dataset_name="unit_test").norm_stats_path(4)


def test_contents_that_changed_under_the_same_size_and_time_are_seen_on_request(config, tmp_path):
    config.index_root = str(tmp_path / "index")
    episode = tmp_path / "episodes" / "a.jsonl"
    before, stamp = config.fingerprint(), episode.stat()
    episode.write_text(episode.read_text().replace('"go"', '"do"'))
    os.utime(episode, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert config.fingerprint() == before
    assert dataclasses.replace(config, verify_index=True).fingerprint() != before


def test_statistics_open_no_image_and_are_reused_until_something_changes(config, tmp_path):
    path = config.compute_norm_stats(4)
    file = NormStatsFile.load(path)
    assert file.default_robot_type == "Sawyer"
    assert file.opendm["action_horizon"] == 4
    assert file.profiles["Sawyer"]["action"].mean[0] > 0.05
    stamp = path.stat().st_mtime_ns
    assert config.compute_norm_stats(4) == path
    assert path.stat().st_mtime_ns == stamp
    episode = tmp_path / "episodes" / "a.jsonl"
    episode.write_text(episode.read_text().replace("0.05", "0.5"))
    config.compute_norm_stats(4)
    changed = NormStatsFile.load(path).opendm
    assert changed["fingerprint"] != file.opendm["fingerprint"]
    config.compute_norm_stats_max_batches = 1
    assert NormStatsFile.load(config.compute_norm_stats(4)).opendm["max_batches"] == 1


def test_a_public_file_is_used_as_it_is(config):
    path = config.norm_stats_path(4)
    file = NormStatsFile.load(config.compute_norm_stats(4))
    file.opendm = {}
    file.save(path)
    before = path.read_bytes()
    config.n_bins = 16
    assert config.compute_norm_stats(4) == path
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"n_bins": 1}, ConfigError, "n-bins 1"),
        ({"compute_norm_stats_max_batches": 0}, ConfigError, "max-batches 0"),
        ({"dataset_name": "unit_tset"}, ConfigError, "did you mean 'unit_test'"),
        ({"jsonl_dir": "/none"}, DataError, "jsonl_dir '/none'"),
        ({"image_dir": "/none"}, DataError, "image_dir '/none'"),
        ({"is_history": True}, ConfigError, "needs fps"),
    ],
)
def test_validation(config, change, error, message):
    config.validate()
    with pytest.raises(error, match=message):
        dataclasses.replace(config, **change).validate()


def test_relative_actions_need_a_description(config):
    CONVERSATION_DATA["unit_test"].pop("state_desc")
    with pytest.raises(ConfigError, match="state_desc"):
        config.validate()
    dataclasses.replace(config, action_mode=ActionMode.ABSOLUTE).validate()


def test_demo_becomes_a_batch(tmp_path):
    config = DM05DataConfig(norm_stats_root=str(tmp_path), compute_norm_stats_max_batches=1)
    config.validate()
    config.compute_norm_stats(5)
    processor = build_processor(["press the button"])
    dataset = config.build_dataset(processor, 5, 256)
    batch = config.build_collator(processor, 256)([dataset[0], dataset[len(dataset) - 1]])
    assert batch["pixel_values"].shape == (4, 3, IMAGE_SIZE, IMAGE_SIZE)
    assert batch["action"].shape == (2, 5, 32)
    assert batch["action_mask"][..., :4].all(-1).tolist() == [[True] * 5, [True] + [False] * 4]
    assert not batch["action_mask"][..., 4:].any()
    assert batch["input_ids"].shape[1] % 16 == 0
    assert batch["action"].abs().max() <= 1.0
    assert torch.isfinite(batch["action"]).all()
