"""From episode files to samples: chunks, inverses, paths, and messages about bad data."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opendm.constants.robot import ActionMode, RobotStateDesc
from opendm.data.dataset import JsonlDataset
from opendm.data.normalize import NormStats, NormStatsFile
from opendm.data.transforms import (
    ActionAbsolute,
    ActionRelative,
    BuildAction,
    BuildActionChunk,
    Denormalize,
    LoadImages,
    Normalize,
    PadAction,
    Pipeline,
)
from opendm.data.transforms.actions import unpad_action
from opendm.data.transforms.images import resolve_path
from opendm.errors import DataError

DESC = [RobotStateDesc.EEF, RobotStateDesc.GRIPPER]


def write_episode(folder, frames, name="episode.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    lines = [frame if isinstance(frame, str) else json.dumps(frame) for frame in frames]
    path.write_text("\n".join(lines) + "\n")
    return path


def frames(count, with_action=True):
    rows = [{"state": [float(t), 10.0 * t], "prompt": "go"} for t in range(count)]
    if with_action:
        rows = [{**row, "action": [t + 0.5, -1.0 * t]} for t, row in enumerate(rows)]
    return rows


def test_recorded_actions_use_the_last_frame_and_mask_the_tail(tmp_path):
    write_episode(tmp_path, frames(3))
    dataset = JsonlDataset(str(tmp_path), BuildActionChunk(4))
    assert len(dataset) == 3
    last = dataset[2]
    assert last["action"].shape == (1, 4, 2)
    assert last["action"][0].tolist() == [[2.5, -2.0]] * 4
    assert last["action_mask"][0].all(-1).tolist() == [True, False, False, False]
    assert dataset[0]["action_mask"][0].all(-1).tolist() == [True, True, True, False]


def test_next_states_are_targets_where_no_action_is_recorded(tmp_path):
    write_episode(tmp_path, frames(3, with_action=False))
    dataset = JsonlDataset(str(tmp_path), BuildActionChunk(2))
    assert len(dataset) == 2
    assert dataset[0]["action"][0].tolist() == [[1.0, 10.0], [2.0, 20.0]]
    assert dataset[1]["action_mask"][0].all(-1).tolist() == [True, False]


def test_relative_action_is_subtracted_in_double_precision(tmp_path):
    row = {"state": [1e8 + 0.25, 1.0], "action": [1e8 + 0.5, 7.0], "prompt": "go"}
    write_episode(tmp_path, [row])
    transform = BuildAction(1, ActionMode.RELATIVE)
    sample = JsonlDataset(str(tmp_path), transform, dataset_meta={"state_desc": DESC})[0]
    assert sample["action"][0, 0].tolist() == [0.25, 7.0]
    assert sample["action"].dtype == sample["state"].dtype == np.float32


def arrays(size=2):
    rng = np.random.default_rng(0)
    return rng.normal(size=size).astype("f4"), rng.normal(size=(1, 5, size)).astype("f4")


def test_absolute_inverts_relative():
    state, action = arrays()
    sample = {"state": state, "action": action.copy(), "meta_data": {"state_desc": DESC}}
    relative = ActionRelative()(dict(sample))
    np.testing.assert_array_equal(relative["action"][..., 1], action[..., 1])
    np.testing.assert_allclose(ActionAbsolute()(relative)["action"], action, atol=1e-6)


@pytest.mark.parametrize("use_quantiles", [True, False])
def test_denormalize_inverts_normalize(use_quantiles):
    state, action = arrays()
    stats = NormStats(np.ones(2), np.full(2, 2.0), np.full(2, -5.0), np.full(2, 5.0))
    file = NormStatsFile({None: {"state": stats, "action": stats}})
    keys = ("state", "action")
    sample = {"state": state.copy(), "action": action.copy(), "meta_data": {}}
    there = Normalize(None, keys, use_quantiles, file)(sample)
    assert not np.allclose(there["action"], action)
    back = Denormalize(None, keys, use_quantiles, file)(there)
    np.testing.assert_allclose(back["action"], action, atol=1e-5)
    np.testing.assert_allclose(back["state"], state, atol=1e-5)


def test_padding_keeps_the_values_and_masks_the_rest():
    _, action = arrays(14)
    mask = np.ones(action.shape, bool)
    padded = PadAction()({"action": action, "action_mask": mask})
    assert padded["action"].shape == padded["action_mask"].shape == (1, 5, 32)
    np.testing.assert_array_equal(unpad_action(padded["action"], 14), action)
    assert not padded["action_mask"][..., 14:].any()


def test_more_than_32_dimensions_are_refused():
    action = np.zeros((1, 2, 33), np.float32)
    with pytest.raises(DataError, match="33 dimensions"):
        PadAction()({"action": action, "action_mask": action.astype(bool)})


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("./a/0.jpg", "root/a/0.jpg"),
        ("a/../b.jpg", "root/b.jpg"),
        (".hidden/0.jpg", "root/.hidden/0.jpg"),
        ("./.hidden/0.jpg", "root/.hidden/0.jpg"),
        ("..name/0.jpg", "root/..name/0.jpg"),
        ("/a/0.jpg", "root/a/0.jpg"),
    ],
)
def test_dots_in_paths_mean_what_they_mean(url, expected):
    assert resolve_path(url, "root") == Path(expected)


def test_paths_outside_the_root_need_permission():
    with pytest.raises(DataError, match="allow-outside-root"):
        resolve_path("a/../../b.jpg", "root")
    allowed = resolve_path("../b.jpg", "root", allow_outside_root=True)
    assert allowed == Path("root/../b.jpg")


def message_of(dataset, index):
    with pytest.raises(DataError) as caught:
        dataset[index]
    return str(caught.value)


def refusal(folder):
    with pytest.raises(DataError) as caught:
        JsonlDataset(str(folder))
    return str(caught.value)


def test_malformed_line_is_named_by_file_and_line(tmp_path):
    rows = frames(4)
    rows[2] = '{"state": [1, 2'
    path = write_episode(tmp_path, ["", *rows])
    assert refusal(tmp_path).startswith(f"{path}:4 is not valid JSON")
    path.write_text("[1]\n")
    other = write_episode(tmp_path / "other", ["[1]"])
    with pytest.raises(DataError, match=f"{other}:1 holds a list"):
        JsonlDataset(str(tmp_path / "other"))


def test_wrong_length_is_named_by_file_and_line(tmp_path):
    rows = frames(4)
    rows[3]["action"] = [1.0]
    path = write_episode(tmp_path, rows)
    message = refusal(tmp_path)
    assert message.startswith(f"{path}:4: ")
    assert "action has 1 values, expected 2" in message


def test_missing_image_is_named_by_file_and_line(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "0.jpg")
    rows = [{**row, "images_1": {"type": "image", "url": f"{t}.jpg"}}
            for t, row in enumerate(frames(2))]  # fmt: skip
    path = write_episode(tmp_path / "episodes", rows)
    load = LoadImages(["images_1"], str(tmp_path / "images"))
    dataset = JsonlDataset(str(tmp_path / "episodes"), Pipeline([load]))
    assert dataset[0]["images"][0].size == (4, 4)
    message = message_of(dataset, 1)
    assert message.startswith(f"{path}:2: ")
    assert "images/1.jpg does not exist" in message


def test_image_record_without_url_is_refused():
    with pytest.raises(DataError, match="has no url"):
        LoadImages(["images_1"])({"images_1": {"type": "image"}})


def test_no_episodes(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        JsonlDataset(str(tmp_path / "none"))
    with pytest.raises(DataError, match="without a usable frame"):
        JsonlDataset(str(tmp_path))
