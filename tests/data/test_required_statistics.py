"""Statistics without a state: refused where the prompt shows the state, else used."""

import json

import numpy as np
import pytest

from opendm.constants.robot import ActionMode
from opendm.data.config import DM05DataConfig
from opendm.data.normalize import NormStats, NormStatsFile
from opendm.data.transforms import Normalize
from opendm.errors import DataError
from opendm.model.dm05.tiny import build_processor

STATS = NormStats(*(np.full(2, value) for value in (0.0, 1.0, -2.0, 2.0)))


def file_of(path, *, robot=None, state=True):
    profile = {"action": STATS} | ({"state": STATS} if state else {})
    NormStatsFile({robot: profile}, robot).save(path)
    return path


@pytest.mark.parametrize("robot", [None, "arm"])
def test_a_required_field_without_statistics_is_named_with_its_file(tmp_path, robot):
    path = file_of(tmp_path / "s.json", robot=robot, state=False)
    of_robot = "" if robot is None else " of robot type 'arm'"
    with pytest.raises(DataError, match=f"statistics {path}{of_robot} have no 'state'"):
        Normalize(path, ("state", "action"), required=("state",))
    sample = {"state": np.ones(2), "action": np.ones((1, 3, 2)), "meta_data": {}}
    assert Normalize(path, ("state", "action"))(dict(sample))["state"] is sample["state"]
    whole = file_of(tmp_path / "whole.json", robot=robot)
    done = Normalize(whole, ("state", "action"), required=("state",))(dict(sample))
    np.testing.assert_allclose(done["state"], [0.5, 0.5], atol=1e-6)


def test_training_needs_the_state_only_where_the_prompt_shows_it(tmp_path):
    record = {"images_1": {"type": "image", "url": "a"}, "state": [0, 1], "action": [0, 1]}
    (tmp_path / "a.jsonl").write_text(json.dumps({**record, "prompt": "go"}) + "\n")
    path, processor = file_of(tmp_path / "s.json", state=False), build_processor(["go"])

    def build(**options):
        return DM05DataConfig(
            dataset_name=str(tmp_path),
            action_mode=ActionMode.ABSOLUTE,
            norm_stats_file=str(path),
            **options,
        ).build_transforms(processor, 2, 64)

    with pytest.raises(DataError, match=f"{path} have no 'state'"):
        build()
    build(add_state=False)
    file_of(path)
    build()
