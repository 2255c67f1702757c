"""Held-out episodes: which they are, and that training sees nothing of them."""

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from opendm.constants.robot import RobotStateDesc
from opendm.data.config import DM05DataConfig
from opendm.data.formats import find_episodes
from opendm.data.normalize import NormStatsFile
from opendm.data.val_split import select_split
from opendm.dataset.register import CONVERSATION_DATA
from opendm.errors import ConfigError
from opendm.model.dm05.tiny import build_processor

NUM_EPISODES = 9


def write_episodes(folder, numbers):
    """Episode ``n`` has ``n + 2`` frames, and actions near ``n``."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        lines = [
            json.dumps({
                "images_1": {"type": "image", "url": "missing.jpg"},
                "state": [t * 0.1, 1.0],
                "action": [t * 0.1 + number, 0.0],
                "prompt": "go",
            })
            for t in range(number + 2)
        ]  # fmt: skip
        (folder / f"{number:03d}.jsonl").write_text("\n".join(lines))
    return str(folder)


def split_names(folder, num_held_out):
    """Names of the training and the held-out episodes."""
    episodes = find_episodes(folder)
    return tuple(
        [episode.path.name for episode in select_split(episodes, folder, num_held_out, split)]
        for split in ("train", "val")
    )


@pytest.fixture
def folder(tmp_path):
    return write_episodes(tmp_path / "episodes", range(NUM_EPISODES))


@pytest.fixture
def config(folder, tmp_path, monkeypatch):
    fields = {
        "jsonl_dir": folder,
        "image_dir": str(tmp_path),
        "image_keys": ["images_1"],
        "image_prompts": ["Head"],
        "state_desc": [RobotStateDesc.EEF, RobotStateDesc.GRIPPER],
        "robot_type": "Sawyer",
    }
    monkeypatch.setitem(CONVERSATION_DATA, "unit_test", fields)
    return DM05DataConfig(
        dataset_name="unit_test", norm_stats_root=str(tmp_path / "stats"), val_episodes=3
    )


@pytest.mark.parametrize("num_held_out", range(1, NUM_EPISODES))
def test_every_episode_is_in_exactly_one_split(folder, num_held_out):
    train, val = split_names(folder, num_held_out)
    assert len(val) == num_held_out
    assert sorted(train + val) == [f"{number:03d}.jsonl" for number in range(NUM_EPISODES)]
    assert train == sorted(train)


def test_without_held_out_episodes_training_has_all(folder):
    episodes = find_episodes(folder)
    assert select_split(episodes, folder, 0, "train") == episodes


def test_the_choice_is_the_same_in_every_process_and_folder(folder, tmp_path):
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(folder, copy)
    code = (
        "import sys; from opendm.data.formats import find_episodes as f\n"
        "from opendm.data.val_split import select_split as s\n"
        "print(*(e.path.name for e in s(f(sys.argv[1]), sys.argv[1], 3, 'val')))"
    )
    command = [sys.executable, "-c", code, str(copy)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.split() == split_names(folder, 3)[1]


def test_the_choice_is_spread_and_not_the_first_or_last(tmp_path):
    folder = write_episodes(tmp_path / "many", range(60))
    numbers = [int(name[:3]) for name in split_names(folder, 20)[1]]
    assert 15 < np.mean(numbers) < 45
    assert np.ptp(numbers) > 40


def test_more_held_out_episodes_keep_those_that_were(folder):
    for num_held_out in range(1, NUM_EPISODES - 1):
        fewer, more = (set(split_names(folder, n)[1]) for n in (num_held_out, num_held_out + 1))
        assert fewer < more


def test_a_new_episode_exchanges_at_most_one(folder, tmp_path):
    before = set(split_names(folder, 3)[1])
    for number in range(NUM_EPISODES, NUM_EPISODES + 12):
        write_episodes(tmp_path / "episodes", [number])
        after = set(split_names(folder, 3)[1])
        assert len(before & after) >= 2
        before = after


@pytest.mark.parametrize("given", [NUM_EPISODES, NUM_EPISODES + 5])
@pytest.mark.parametrize("split", ["train", "val"])
def test_training_without_an_episode_is_refused(folder, given, split):
    message = rf"val-episodes {given} leaves no episode .* has 9; give at most 8"
    with pytest.raises(ConfigError, match=message):
        select_split(find_episodes(folder), folder, given, split)


def test_validation_without_an_episode_is_refused(folder):
    with pytest.raises(ConfigError, match="val-episodes is 0"):
        select_split(find_episodes(folder), folder, 0, "val")


def test_a_negative_number_is_refused(config):
    config.validate()
    with pytest.raises(ConfigError, match="val-episodes -1"):
        dataclasses.replace(config, val_episodes=-1).validate()


def test_statistics_count_training_episodes_alone(config, folder, tmp_path):
    train, _ = split_names(folder, 3)
    alone = write_episodes(tmp_path / "alone", [int(name[:3]) for name in train])
    means = []
    for number, change in enumerate([
        {},
        {"jsonl_dir": alone, "val_episodes": 0},
        {"val_episodes": 0},
    ]):  # fmt: skip
        changed = dataclasses.replace(config, norm_stats_root=str(tmp_path / str(number)), **change)
        stats = NormStatsFile.load(changed.compute_norm_stats(4))
        means.append(list(stats.profiles["Sawyer"]["action"].mean))
    assert means[0] == means[1]
    assert abs(means[0][0] - means[2][0]) > 0.01


def test_each_number_of_held_out_episodes_has_statistics_of_its_own(config):
    contents = {
        dataclasses.replace(config, val_episodes=number).compute_norm_stats(4).read_bytes()
        for number in (0, 2, 3)
    }
    assert len(contents) == 3


def test_statistics_of_before_are_still_those_of_a_run_without_held_out_episodes(config):
    whole = dataclasses.replace(config, val_episodes=0)
    path = whole.compute_norm_stats(4)
    assert "val_episodes" not in NormStatsFile.load(path).opendm
    stamp = path.stat().st_mtime_ns
    whole.compute_norm_stats(4)
    assert path.stat().st_mtime_ns == stamp


def test_datasets_hold_the_samples_of_their_split(config, folder):
    config.compute_norm_stats(4)
    processor = build_processor(["go"])
    train = config.build_dataset(processor, 4, 256)
    val = config.build_val_dataset(processor, 4, 256)
    names = tuple([episode.path.name for episode in data.episodes] for data in (train, val))
    assert names == split_names(folder, 3)
    assert len(train) + len(val) == sum(number + 2 for number in range(NUM_EPISODES))
    assert len(config.build_norm_stats_dataset(4)) == len(train)


def test_held_out_pictures_are_not_augmented(tmp_path):
    config = DM05DataConfig(
        norm_stats_root=str(tmp_path), val_episodes=2, compute_norm_stats_max_batches=1
    )
    config.compute_norm_stats(5)
    processor = build_processor(["press the button"])
    val, train = (
        [data[0]["pixel_values"] for _ in range(6)]
        for data in (config.build_val_dataset(processor, 5, 256),
                     config.build_dataset(processor, 5, 256))
    )  # fmt: skip
    assert all(torch.equal(val[0], picture) for picture in val)
    assert not all(torch.equal(train[0], picture) for picture in train)


def test_a_hook_with_the_public_signature_trains_and_is_refused_for_validation(config):
    class Old(DM05DataConfig):
        def build_dataset(self, processor, chunk_size, max_length):
            return ["mine"]

    class Passing(DM05DataConfig):
        def build_dataset(self, *args, **kwargs):
            return [kwargs["split"]]

    assert Old().build_dataset(None, 4, 256) == ["mine"]
    with pytest.raises(ConfigError, match="build_dataset of Old does not take split"):
        Old().build_val_dataset(None, 4, 256)
    assert Passing().build_val_dataset(None, 4, 256) == ["val"]
