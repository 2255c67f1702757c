"""A dataset by its name, its folder or its Hub id, and what a registration can say of it."""

import dataclasses
import json
import shutil

import pytest

from opendm.constants.robot import ActionMode
from opendm.data import formats
from opendm.data.config import DM05DataConfig
from opendm.data.dataset import JsonlDataset
from opendm.data.formats import dataset_info, open_source
from opendm.data.normalize import NormStatsFile
from opendm.dataset.register import CONVERSATION_DATA, register_dataset
from opendm.errors import ConfigError, DataError
from opendm.exp.resume import compare

CAMERAS = {"images_left": {"type": "image", "url": "a.jpg"},
           "images_2": {"type": "image", "url": "b.jpg"}}  # fmt: skip


def write_set(folder, lengths=(3, 4, 5, 6)):
    folder.mkdir(parents=True, exist_ok=True)
    for number, length in enumerate(lengths):
        rows = [
            {**CAMERAS, "state": [float(number), t], "action": [t, 1.0], "prompt": "go"}
            for t in range(length)
        ]
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_set(tmp_path / "my set")


@pytest.fixture
def config(folder, tmp_path, monkeypatch):
    fields = {
        "jsonl_dir": str(folder),
        "image_dir": str(tmp_path),
        "image_keys": ["images_2"],
        "image_prompts": ["Head"],
    }
    monkeypatch.setitem(CONVERSATION_DATA, "unit_test", fields)
    return DM05DataConfig(
        dataset_name="unit_test",
        action_mode=ActionMode.ABSOLUTE,
        norm_stats_root=str(tmp_path / "stats"),
    )


def test_a_folder_describes_itself(folder):
    assert dataset_info(str(folder)) == {
        "jsonl_dir": str(folder),
        "image_dir": str(folder),
        "image_keys": ["images_2", "images_left"],
        "image_prompts": ["Camera 1", "Camera 2"],
    }


def test_a_folder_trains_without_a_registration(folder, tmp_path):
    config = DM05DataConfig(
        dataset_name=str(folder),
        action_mode=ActionMode.ABSOLUTE,
        norm_stats_root=str(tmp_path / "stats"),
    )
    config.validate()
    path = config.compute_norm_stats(2)
    assert path.parent == tmp_path / "stats"
    assert path.name.startswith("my set_")
    assert len(config.build_norm_stats_dataset(2)) == 18
    with pytest.raises(ConfigError, match="needs state_desc"):
        dataclasses.replace(config, action_mode=ActionMode.RELATIVE).validate()


def test_the_image_folder_can_be_another(folder, tmp_path):
    config = DM05DataConfig(dataset_name=str(folder), image_dir=str(tmp_path))
    assert config._dataset_info()["image_dir"] == str(tmp_path)


def test_a_registered_name_wins_over_a_folder_of_that_name(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder.rename(tmp_path / "demo")
    assert dataset_info("demo")["image_keys"] == ["images_1", "images_2"]
    assert dataset_info("./demo")["image_keys"] == ["images_2", "images_left"]


def test_a_hub_id_is_fetched_once_and_read_as_a_folder(folder, monkeypatch):
    from opendm.data import hub

    fetched = []
    monkeypatch.setattr(hub, "dataset_folder", lambda name: fetched.append(name) or folder)
    for _ in range(3):
        assert dataset_info("someone/their-set_1.0")["jsonl_dir"] == str(folder)
    assert fetched == ["someone/their-set_1.0"]
    formats._hub_folder.cache_clear()


@pytest.mark.parametrize("name", ["./none", "/no/such/folder", "a/b/c"])
def test_a_path_that_is_no_folder_is_named(name):
    with pytest.raises(ConfigError, match=f"{name}' is a path, and there is no such folder"):
        dataset_info(name)


def test_a_folder_of_another_format_names_the_supported_ones(tmp_path):
    (tmp_path / "episode_0.hdf5").write_text("")
    for read in (dataset_info, DM05DataConfig(jsonl_dir=str(tmp_path)).open_source):
        argument = str(tmp_path) if read is dataset_info else "all"
        with pytest.raises(DataError, match=r"JSON.*LeRobot v2\.0/v2\.1 and (LeRobot )?v3\.0"):
            read(argument)


def test_a_declared_action_mode_must_be_the_flags(config):
    CONVERSATION_DATA["unit_test"]["action_mode"] = "absolute"
    config.validate()
    CONVERSATION_DATA["unit_test"]["action_mode"] = "relative"
    with pytest.raises(ConfigError, match=r"action-mode ABSOLUTE .* says action_mode RELATIVE"):
        config.validate()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("action_mode", "delta", r"action_mode 'delta' is not one of \['absolute', 'relative'\]"),
        ("episodes", [], "give a list of episode numbers"),
        ("episodes", ["3"], "give a list of episode numbers"),
        ("episodes", [True], "give a list of episode numbers"),
    ],
)
def test_a_registration_that_says_nonsense_is_refused(config, field, value, message):
    fields = dict(CONVERSATION_DATA["unit_test"]) | {field: value}
    with pytest.raises(ConfigError, match=message):
        register_dataset({"nonsense": fields})
    assert "nonsense" not in CONVERSATION_DATA


def test_registered_episodes_alone_are_used(config):
    CONVERSATION_DATA["unit_test"]["episodes"] = [3, 1, 2]
    assert config.open_source().episodes == (3, 1, 2)
    assert len(config.build_norm_stats_dataset(2)) == 6 + 4 + 5
    plain = JsonlDataset(config._dataset_info()["jsonl_dir"], None, "x", config._dataset_info())
    assert [episode.number for episode in plain.episodes] == [3, 1, 2]
    held_out = dataclasses.replace(config, val_episodes=1)
    train, val = (held_out.open_source(split).episodes for split in ("train", "val"))
    assert sorted(train + val) == [1, 2, 3]
    CONVERSATION_DATA["unit_test"]["episodes"] = [4]
    with pytest.raises(ConfigError, match=r"episodes \[4\] are not in"):
        config.open_source()


def test_bad_records_are_refused_or_end_their_episode(config, folder, caplog):
    (folder / "2.jsonl").write_text((folder / "2.jsonl").read_text() + "{\n")
    with pytest.raises(DataError, match=r"2\.jsonl:6 is not valid JSON"):
        config.open_source()
    skip = dataclasses.replace(config, bad_records="skip")
    assert skip.open_source().episodes == (0, 1, 2, 3)
    assert "2.jsonl:6 is not valid JSON" in caplog.text
    assert "(1 frames from here on left out)" in caplog.text
    assert NormStatsFile.load(skip.compute_norm_stats(2)).opendm["bad_records"] == "skip"


def test_the_same_data_elsewhere_may_continue_a_run(config, folder, tmp_path):
    moved = shutil.copytree(folder, tmp_path / "elsewhere" / "moved")
    there = dataclasses.replace(config, jsonl_dir=str(moved), image_dir=str(moved))
    assert there.fingerprint() == config.fingerprint()
    saved, now = ({"data_config": dataclasses.asdict(c)} for c in (config, there))
    assert compare(saved, now).other == []
    assert compare(saved, {"data_config": {**now["data_config"], "n_bins": 3}}).other
    (moved / "0.jsonl").write_text((moved / "1.jsonl").read_text())
    assert there.fingerprint() != config.fingerprint()


def test_the_index_folder_can_be_chosen(config, tmp_path):
    chosen = dataclasses.replace(config, index_root=str(tmp_path / "indices"))
    index = chosen.open_source().source.index
    assert index.folder.parent == tmp_path / "indices"
    other = open_source(config._dataset_info()["jsonl_dir"], index_root=tmp_path / "indices")
    assert other.index.folder == index.folder
