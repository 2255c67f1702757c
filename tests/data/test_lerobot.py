"""LeRobot folders of every version give the samples that the same frames give as JSONL."""

import json
import logging

import lerobot_sets as sets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from opendm.constants.robot import RobotStateDesc
from opendm.data import hub
from opendm.data.dataset import JsonlDataset
from opendm.data.formats import open_source
from opendm.data.index import FrameIndex
from opendm.data.jsonl_source import scan_jsonl
from opendm.data.lerobot_fields import describe_lerobot, find_fields
from opendm.data.lerobot_meta import read_meta
from opendm.data.lerobot_source import LeRobotSource, scan_lerobot
from opendm.data.transforms import BuildAction, LoadHistory, LoadImages, Pipeline
from opendm.errors import DataError

KEYS = ["observation.images.top", "observation.images.left_wrist"]
LAYOUTS = ("v2.0", "v2.1", "v3.0", "v3.0-images")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The set in all layouts, by name; only to be read."""
    folder, data = tmp_path_factory.mktemp("sets"), sets.SmallSet()
    roots = {"jsonl": sets.write_jsonl(folder / "jsonl", data)}
    roots |= {v: sets.write_v2(folder / v, data, v) for v in ("v2.0", "v2.1")}
    roots["v3.0"] = sets.write_v3(folder / "v3.0", data)
    pictures = sets.decoded_pictures(roots["jsonl"], data)
    roots["v3.0-images"] = sets.write_v3(folder / "v3.0-images", data, pictures=pictures)
    return roots


def open_lerobot(root, columns=None, *, skip_bad=False):
    return LeRobotSource(root, scan_lerobot(root, columns, skip_bad=skip_bad), columns)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_frame_is_the_same_sample_in_every_layout(small, layout, tmp_path):
    def samples(root):
        load, history = LoadImages(KEYS, str(root)), LoadHistory(KEYS[0], str(root), 2, 5.0)
        transforms = Pipeline([BuildAction(4), load, history])
        meta = describe_lerobot(small[layout])
        source = open_source(root, index_root=tmp_path)
        return JsonlDataset(str(root), transforms, "set", meta, source=source)

    jsonl, lerobot = samples(small["jsonl"]), samples(small[layout])
    assert len(jsonl) == len(lerobot) == sum(sets.LENGTHS)
    for index in range(len(jsonl)):
        expected, found = jsonl[index], lerobot[index]
        assert found["prompt"] == expected["prompt"]
        assert found.keys() == expected.keys()
        for field in ("state", "action", "action_mask"):
            np.testing.assert_array_equal(found[field], expected[field])
        for field in ("images", "history_images"):
            assert len(found[field]) == len(expected[field])
            for a, b in zip(found[field], expected[field], strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert json.loads(lerobot.source.line(0, 1)) == lerobot.source.record(0, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_indices_hold_the_numbers_of_jsonl(small, layout, tmp_path):
    jsonl = scan_jsonl(small["jsonl"], skip_bad=False)
    scanned = scan_lerobot(small[layout], skip_bad=False)
    scanned.save(tmp_path)
    index = FrameIndex.open(tmp_path)
    for field in ("starts", "state", "action", "has_actions"):
        np.testing.assert_array_equal(getattr(index, field), getattr(jsonl, field))
        assert getattr(index, field).dtype == getattr(scanned, field).dtype
    texts = [[i.tasks[n] for n in i.task] for i in (index, jsonl)]
    assert texts[0] == texts[1]
    assert index.episodes == ("episode_000000", "episode_000001", "episode_000002")
    assert all(len(file.sha256) == 64 for file in index.files)
    assert index.task.dtype == index.episode_file.dtype == index.num_bytes.dtype == np.int32
    assert index.position.dtype == np.int64


def test_locations_name_file_episode_and_row(small):
    source = open_lerobot(small["v3.0"])
    path = small["v3.0"] / "data/chunk-000/file-000.parquet"
    assert source.location(1, 2) == f"{path}, episode_000001, row 7"


def test_a_registration_comes_from_the_metadata(small):
    fields = describe_lerobot(small["v2.0"])
    joint, gripper = RobotStateDesc.JOINT, RobotStateDesc.GRIPPER
    assert fields == {
        "jsonl_dir": str(small["v2.0"]),
        "image_dir": str(small["v2.0"]),
        "image_keys": KEYS,
        "image_prompts": ["Top", "Left wrist"],
        "state_desc": [joint, joint, joint, gripper],
        "robot_type": "so101",
        "fps": sets.FPS,
        "columns": {"state": "observation.state", "action": "action"},
    }


def edit_info(root, change):
    path = root / "meta" / "info.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))


@pytest.fixture
def v2(tmp_path):
    return sets.write_v2(tmp_path / "v2", sets.SmallSet(cameras={"top": (16, 16)}))


def test_names_that_are_missing_or_too_few_give_no_state_desc(v2):
    feature = "observation.state"
    edit_info(v2, lambda info: info["features"][feature].update(names=None))
    assert describe_lerobot(v2)["state_desc"] is None
    edit_info(v2, lambda info: info["features"][feature].update(names=["a", "gripper"]))
    assert describe_lerobot(v2)["state_desc"] is None


@pytest.mark.parametrize("version", ["v1.6", "v3.1", None])
def test_an_unknown_version_names_the_supported_ones(v2, version):
    edit_info(v2, lambda info: info.update(codebase_version=version))
    with pytest.raises(DataError, match=r"v2\.0, v2\.1, v3\.0") as caught:
        scan_lerobot(v2, skip_bad=False)
    assert repr(version) in str(caught.value)


@pytest.mark.parametrize("name", ["info.json", "tasks.jsonl", "episodes.jsonl"])
def test_a_missing_file_of_v2_metadata_is_named(v2, name):
    (v2 / "meta" / name).unlink()
    with pytest.raises(DataError, match=f"meta/{name} is missing"):
        scan_lerobot(v2, skip_bad=True)


@pytest.mark.parametrize("name", ["tasks.parquet", "episodes/chunk-000/file-000.parquet"])
def test_a_missing_file_of_v3_metadata_is_named(tmp_path, name):
    root = sets.write_v3(tmp_path / "v3", sets.SmallSet(cameras={"top": (16, 16)}))
    (root / "meta" / name).unlink()
    with pytest.raises(DataError, match=r"tasks\.parquet is missing|meta/episodes has no"):
        scan_lerobot(root, skip_bad=True)


def test_other_names_are_listed_with_the_closest(v2):
    def rename(info):
        features = info["features"]
        features["observation.states"] = features.pop("observation.state")

    edit_info(v2, rename)
    with pytest.raises(DataError) as caught:
        find_fields(read_meta(v2), {"action": "actions"}, ["observation.images.front"])
    lines = [" ".join(line.split()) for line in str(caught.value).split("\n")]
    assert "state observation.state missing; closest: observation.states" in lines
    assert "action actions missing; closest: action" in lines
    front = "observation.images.front"
    assert f"{front} {front} missing; closest: observation.images.top" in lines
    assert "observation.images.top video [16, 16, 3]" in lines
    assert '"state": "observation.states"' in lines[-1]


def test_fewer_cameras_than_registered_are_an_error(v2):
    with pytest.raises(DataError, match=r"observation\.images\.wrist +missing"):
        find_fields(read_meta(v2), None, ["observation.images.top", "observation.images.wrist"])


def test_a_camera_that_is_not_registered_is_told(small, caplog):
    with caplog.at_level(logging.WARNING):
        find_fields(read_meta(small["v2.1"]), None, KEYS[:1])
    assert KEYS[1] in caplog.text


def test_columns_rename_cameras_and_drop_actions(v2):
    columns = {"images_1": "observation.images.top", "action": None}
    source = open_lerobot(v2, columns)
    record = source.record(1, 2)
    assert list(record) == ["images_1", "state", "prompt"]
    assert describe_lerobot(v2, columns)["image_keys"] == ["images_1"]
    assert source.index.num_samples(1) == 3
    assert source.index.action.shape == (15, 0)


def test_frames_of_joined_videos_survive_rounded_times(tmp_path):
    rng = np.random.default_rng(3)
    lengths = tuple(rng.integers(7, 18, 50).tolist())
    data = sets.SmallSet(lengths, fps=30, cameras={"top": (16, 16)})
    times = [0.0]
    for length in lengths:  # as a recorder that adds up rounded durations
        times.append(times[-1] + float(np.float32(length / 30)) - 1e-4)
    root = sets.write_v3(tmp_path / "v3", data, timestamps=np.array(times))
    source = open_lerobot(root)
    numbers = [
        source.record(e, t)[KEYS[0]]["frame_idx"] for e, n in enumerate(lengths) for t in range(n)
    ]
    assert numbers == list(range(sum(lengths)))


def test_parquet_pictures_are_read_by_row_group(small, monkeypatch):
    reads = []
    read = parquet.ParquetFile.read_row_group

    def counted(file, group, columns):
        reads.append((group, columns))
        return read(file, group, columns=columns)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", counted)
    from opendm.data import parquet_images

    monkeypatch.setattr(parquet_images, "_open_tables", parquet_images._OpenTables())
    monkeypatch.setattr(parquet_images, "MAX_GROUP_BYTES", 1)
    source = open_lerobot(small["v3.0-images"])
    load = LoadImages(KEYS[:1], str(source.root))
    for t in (0, 1, 3):
        load(source.record(0, t))
    load(source.record(1, 1))
    assert reads == [(0, KEYS[:1]), (1, KEYS[:1])]
    assert len(parquet_images._open_tables.groups) == 1


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def test_all_files_without_a_footer_are_named_in_one_error(v2):
    for e in (0, 2):
        cut(v2 / f"data/chunk-000/episode_{e:06d}.parquet")
    with pytest.raises(DataError) as caught:
        scan_lerobot(v2, skip_bad=False)
    message = str(caught.value)
    for e, length in ((0, 5), (2, 6)):
        path = v2 / f"data/chunk-000/episode_{e:06d}.parquet"
        assert f"{path}, episode {e} ({length} frames): {path} is not a whole parquet" in message
    assert "episode 1" not in message


def test_a_file_of_many_episodes_without_a_footer_names_them_all(tmp_path):
    root = sets.write_v3(tmp_path / "v3", sets.SmallSet(cameras={"top": (16, 16)}))
    path = root / "data/chunk-000/file-000.parquet"
    cut(path)
    with pytest.raises(DataError, match=rf"^{path}, episodes 0 to 2 \(15 frames\): "):
        scan_lerobot(root, skip_bad=False)


def test_skipping_leaves_out_bad_episodes_and_counts_them(v2):
    cut(v2 / "data/chunk-000/episode_000000.parquet")
    index = scan_lerobot(v2, skip_bad=True)
    assert index.episodes == ("episode_000001", "episode_000002")
    assert index.num_frames == 10
    assert len(index.dropped) == 1
    assert "episode 0 (5 frames)" in index.dropped[0]
    source = LeRobotSource(v2, index)
    assert source.record(0, 1)[KEYS[0]]["url"].endswith("episode_000001.mp4")
    data = sets.SmallSet(cameras={"top": (16, 16)})
    assert source.record(0, 1)["state"] == data.state[1][1].tolist()
    for e in (1, 2):
        cut(v2 / f"data/chunk-000/episode_{e:06d}.parquet")
    with pytest.raises(DataError, match="none of 3 episodes is usable"):
        scan_lerobot(v2, skip_bad=True)


def change_rows(path, name, change):
    table = parquet.read_table(path)
    column = table.column_names.index(name)
    values = table[name].to_pylist()
    values = change(values) or values
    kind = table.schema.field(name).type if name != "ragged" else None
    array = pa.array(values, kind)
    parquet.write_table(table.set_column(column, name, array), path)


FAULTS = {
    "NaN": ("action", lambda v: v[2].__setitem__(1, float("nan")), r"row 2: action\[1\] is nan"),
    "infinite": ("observation.state", lambda v: v[3].__setitem__(0, float("inf")),
                 r"row 3: observation.state\[0\] is inf"),
    "null": ("action", lambda v: v[1].__setitem__(3, None), r"row 1: action\[3\] is nan"),
    "no row": ("action", lambda v: v.__setitem__(1, None), "row 1: action has 0 values"),
    "frames": ("frame_index", lambda v: v.__setitem__(2, 9), "row 2: frame_index 9, expected 2"),
    "task": ("task_index", lambda v: v.__setitem__(0, 7), r"task_index \[7\] is not in the tasks"),
    "episode": ("episode_index", lambda v: v.__setitem__(3, 8), "3 rows in the file; its length"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_values_name_file_episode_row_and_field(v2, fault):
    name, change, message = FAULTS[fault]
    path = v2 / "data/chunk-000/episode_000001.parquet"
    change_rows(path, name, change)
    with pytest.raises(DataError, match=message) as caught:
        scan_lerobot(v2, skip_bad=False)
    assert str(path) in str(caught.value)
    assert "episode 1 (4 frames)" in str(caught.value)
    index = scan_lerobot(v2, skip_bad=True)
    assert index.episodes == ("episode_000000", "episode_000002")


def test_variable_lists_and_single_numbers_are_vectors(v2):
    edit_info(v2, lambda info: info["features"]["action"].update(shape=[1], names=None))
    for e in range(3):
        path = v2 / f"data/chunk-000/episode_{e:06d}.parquet"
        table = parquet.read_table(path)
        state = pa.array(table["observation.state"].to_pylist(), pa.list_(pa.float64()))
        single = pa.array([row[0] for row in table["action"].to_pylist()], pa.float32())
        for name, array in (("observation.state", state), ("action", single)):
            table = table.set_column(table.column_names.index(name), name, array)
        parquet.write_table(table, path)
    index, data = scan_lerobot(v2, skip_bad=False), sets.SmallSet(cameras={"top": (16, 16)})
    np.testing.assert_array_equal(index.state, np.concatenate(data.state))
    np.testing.assert_array_equal(index.action, np.concatenate(data.action)[:, :1])


def test_metadata_cannot_lead_out_of_the_folder(v2):
    edit_info(v2, lambda info: info.update(data_path="../{episode_index}.parquet"))
    with pytest.raises(DataError, match="leaves the folder"):
        scan_lerobot(v2, skip_bad=False)


def test_a_hub_id_becomes_the_downloaded_folder(monkeypatch, tmp_path):
    asked = []

    def download(repo_id, *, repo_type):
        asked.append((repo_id, repo_type))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub.dataset_folder("lab/cups") == tmp_path
    assert asked == [("lab/cups", "dataset")]


def test_without_a_network_the_error_says_what_to_do(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(repo_id, *, repo_type):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(DataError, match="give its path instead"):
        hub.dataset_folder("lab/cups")


def test_what_cannot_be_a_hub_id_is_said():
    with pytest.raises(DataError, match="neither a folder nor a dataset id"):
        hub.dataset_folder("a/b/c")
