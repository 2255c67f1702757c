"""A LeRobot dataset is what its folder holds: pictures, metadata and files as they were indexed."""

import dataclasses
import json
import os
import shutil

import lerobot_sets as sets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from opendm.check.contents import read_contents
from opendm.check.pictures import PictureRules
from opendm.constants.robot import ActionMode
from opendm.data.config import DM05DataConfig
from opendm.data.dataset import JsonlDataset
from opendm.data.formats import open_source
from opendm.data.transforms import LoadImages
from opendm.errors import ConfigError, DataError

DATA = sets.SmallSet(cameras={"top": (16, 16)})


@pytest.fixture
def v2(tmp_path):
    return sets.write_v2(tmp_path / "v2", DATA)


def config(folder, **options):
    return DM05DataConfig(dataset_name=str(folder), action_mode=ActionMode.ABSOLUTE, **options)


def picture(config):
    info = config._dataset_info()
    load = LoadImages(info["image_keys"], info["image_dir"])
    source = config.open_source().source
    (image,) = JsonlDataset(info["jsonl_dir"], load, "x", info, source=source)[0]["images"]
    return np.asarray(image)


def test_another_folder_brings_its_own_pictures(v2, tmp_path):
    there = shutil.copytree(v2, tmp_path / "there")
    (first, second) = sorted(there.rglob("*.mp4"))[:2]
    shutil.copy(second, first)
    moved = config(v2, jsonl_dir=str(there))
    moved.validate()
    assert moved._dataset_info()["image_dir"] == str(there)
    assert not np.array_equal(picture(moved), picture(config(v2)))
    first.unlink()
    with pytest.raises(DataError, match=f"{first} does not exist"):
        picture(moved)
    problems = read_contents(
        moved._dataset_info(), "x", PictureRules(moved._dataset_info()["image_dir"]), skip_bad=False
    ).problems
    assert any(first.name in str(problem) for problem in problems)


def test_pictures_from_another_folder_are_refused(v2, tmp_path):
    config(v2, image_dir=f"{v2}/../v2").validate()
    for options in ({"image_dir": str(tmp_path)}, {"jsonl_dir": str(v2), "image_dir": "/tmp"}):
        with pytest.raises(ConfigError, match=r"image-dir .* is another folder than the LeRobot"):
            config(v2, **options).validate()


def fingerprint(root, tmp_path, **options):
    return open_source(root, index_root=tmp_path / "cache", **options).index.fingerprint()


def replace_text(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(("name", "old", "new"), [
    ("tasks.jsonl", '"task": "', '"task": "do not '),
    ("info.json", '"fps": ', '"fps":  '),
    ("episodes.jsonl", '{"', '{ "'),
])  # fmt: skip
def test_metadata_of_v2_belongs_to_the_fingerprint(v2, tmp_path, name, old, new):
    before = fingerprint(v2, tmp_path)
    assert fingerprint(v2, tmp_path) == before
    replace_text(v2 / "meta" / name, old, new)
    assert fingerprint(v2, tmp_path) != before


def test_the_episode_table_of_v3_belongs_to_the_fingerprint(tmp_path):
    root = sets.write_v3(tmp_path / "v3", DATA)
    before = fingerprint(root, tmp_path)
    (path,) = (root / "meta/episodes").rglob("*.parquet")
    table = parquet.read_table(path)
    (name,) = [name for name in table.column_names if name.endswith("from_timestamp")]
    place = table.column_names.index(name)
    parquet.write_table(table.set_column(place, name, pa.array(np.zeros(len(table)))), path)
    assert fingerprint(root, tmp_path) != before


def test_statistics_of_the_recorder_do_not(v2, tmp_path):
    before = fingerprint(v2, tmp_path)
    (v2 / "meta" / "stats.json").write_text('{"new": 1}')
    assert fingerprint(v2, tmp_path) == before


def test_verifying_reads_the_metadata_too(v2, tmp_path):
    path = v2 / "meta/tasks.jsonl"
    before, status = fingerprint(v2, tmp_path), path.stat()
    task = json.loads(path.read_text().splitlines()[0])["task"]
    replace_text(path, task, task[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint(v2, tmp_path) == before
    assert fingerprint(v2, tmp_path, verify=True) != before


def test_half_a_character_in_a_task_is_refused(v2, tmp_path):
    replace_text(v2 / "meta/tasks.jsonl", '"task": "', '"task": "\\ud83d')
    with pytest.raises(DataError, match=r"tasks\.jsonl: task '\\ud83d.* half of a character"):
        fingerprint(v2, tmp_path)


def test_a_file_of_pictures_that_changes_during_a_run_is_refused(tmp_path):
    data = dataclasses.replace(DATA)
    pictures = sets.decoded_pictures(sets.write_jsonl(tmp_path / "jsonl", data), data)
    root = sets.write_v3(tmp_path / "v3", data, pictures=pictures)
    source = open_source(root, index_root=tmp_path / "cache")
    assert source.record(0, 0)["observation.images.top"]["row"] == 0
    path = source.path(0)
    table = parquet.read_table(path)
    parquet.write_table(table.take(list(range(len(table)))[::-1]), path)
    with pytest.raises(DataError, match=f"{path} has changed since it was indexed"):
        source.record(0, 0)
    path.unlink()
    with pytest.raises(DataError, match=f"{path} cannot be read"):
        source.record(0, 0)
