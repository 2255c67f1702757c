"""Angles: relative actions go the short way round, and come back to the same pose."""

import numpy as np
import pytest

from opendm.constants.robot import ActionMode
from opendm.data.angles import wrap_angle
from opendm.data.config import DM05DataConfig
from opendm.data.dataset import JsonlDataset
from opendm.data.statistics import SampledPart, compute_statistics, part_of_dataset
from opendm.data.transforms.actions import ActionAbsolute, ActionRelative, BuildAction
from opendm.dataset.register import CONVERSATION_DATA, register_dataset
from opendm.errors import ConfigError

DESC = ["joint", "joint", "gripper"]


def sample(state, action, **meta):
    return {
        "state": np.asarray(state, float),
        "action": np.asarray(action, float)[None],
        "meta_data": {"state_desc": DESC, **meta},
    }


@pytest.mark.parametrize(
    ("angle", "wrapped"),
    [(0, 0), (np.pi, -np.pi), (-np.pi, -np.pi), (3.5, 3.5 - 2 * np.pi), (-7, 2 * np.pi - 7)],
)
def test_wrapped_angles_lie_within_half_a_turn(angle, wrapped):
    assert wrap_angle(np.array([angle], float)) == pytest.approx([wrapped], abs=1e-15)


def test_a_difference_across_the_seam_is_short_and_only_where_declared():
    crossing = ([3.1, 3.1, 3.1], [[-3.1, -3.1, -3.1]])
    short = 2 * np.pi - 6.2
    declared = ActionRelative()(sample(*crossing, angle_dims=[1, 2]))["action"]
    np.testing.assert_allclose(declared[0, 0], [-6.2, short, -3.1])  # the gripper is no difference
    plain = ActionRelative()(sample(*crossing))["action"]
    np.testing.assert_allclose(plain[0, 0], [-6.2, -6.2, -3.1])


def test_absolute_is_the_inverse_of_relative_for_angles():
    rng = np.random.default_rng(0)
    state = rng.uniform(-np.pi, np.pi, 3)
    action = rng.uniform(-np.pi, np.pi, (50, 3))
    there = ActionRelative()(sample(state, action, angle_dims=[0, 1]))
    assert np.abs(there["action"][..., :2]).max() <= np.pi
    back = ActionAbsolute()(there)["action"]
    np.testing.assert_allclose(back[0], action, atol=1e-12)


@pytest.fixture
def turning(tmp_path):
    """Two episodes whose first joint goes round several times."""
    import json

    rng = np.random.default_rng(1)
    for episode in range(2):
        turns = wrap_angle(np.cumsum(rng.uniform(0, 0.8, 40)))
        lines = [
            json.dumps({"prompt": "turn", "state": [turn, 0.1 * turn, 1.0], "images_1": {}})
            for turn in turns
        ]
        (tmp_path / f"{episode}.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_statistics_count_angles_as_training_sees_them(turning):
    dataset = JsonlDataset(
        str(turning),
        BuildAction(5, ActionMode.RELATIVE),
        "turning",
        {"state_desc": DESC, "angle_dims": [0], "robot_type": "T"},
    )
    fast = compute_statistics([part_of_dataset(dataset, DESC)])
    slow = compute_statistics([SampledPart(dataset, DESC)])
    assert fast.to_json() == slow.to_json()
    top = fast.profiles["T"]["action"]
    assert top.min[0] >= 0
    assert top.max[0] <= 4.0


@pytest.mark.parametrize("dims", [[3], [-1], [True], ["0"]])
def test_dimensions_that_do_not_exist_are_refused(dims, turning, tmp_path):
    register_dataset({
        "turning": {
            "jsonl_dir": str(turning), "image_dir": str(turning), "image_keys": ["images_1"],
            "image_prompts": ["View"], "state_desc": DESC, "angle_dims": dims,
        }
    })  # fmt: skip
    try:
        with pytest.raises(ConfigError, match=r"angle_dims .* 0 to 2"):
            DM05DataConfig(dataset_name="turning").validate()
    finally:
        del CONVERSATION_DATA["turning"]
