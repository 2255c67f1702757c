"""Every dataset of the catalogue, on a small set of its shape."""

import numpy as np
import pytest
from robot_sets import write_robot_set

from opendm.constants.robot import ActionMode
from opendm.data.config import DM05DataConfig
from opendm.dataset.register import CONVERSATION_DATA, import_catalogue
from opendm.model.dm05.tiny import IMAGE_SIZE, build_processor

CHUNK = 4
import_catalogue([])
NAMES = sorted(CONVERSATION_DATA)


@pytest.fixture(scope="module")
def processor():
    return build_processor(["pick up the cube"])


def test_the_six_sets_of_libero_are_registered():
    sets = {f"libero_{name}" for name in ("goal", "10", "spatial", "object", "pi0_all", "oft_all")}
    assert sets <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_registered_set_gives_samples(name, processor, tmp_path):
    fields = CONVERSATION_DATA[name]
    cameras, size = fields["image_keys"], len(fields["state_desc"])
    numbers = max(int(camera.removeprefix("images_")) for camera in cameras)
    folder = write_robot_set(
        tmp_path / "set", num_images=numbers, state_dim=size, action_dim=size, num_frames=CHUNK
    )
    config = DM05DataConfig(
        dataset_name=name,
        jsonl_dir=str(folder),
        image_dir=str(folder),
        action_mode=ActionMode(fields.get("action_mode") or ActionMode.ABSOLUTE),
        norm_stats_root=str(tmp_path / "stats"),
    )
    config.validate()
    config.compute_norm_stats(CHUNK)
    dataset = config.build_dataset(processor, CHUNK, 1024)
    batch = config.build_collator(processor, 1024)([dataset[0], dataset[len(dataset) - 1]])
    assert batch["pixel_values"].shape == (2 * len(cameras), 3, IMAGE_SIZE, IMAGE_SIZE)
    assert batch["action"].shape[:2] == (2, CHUNK)
    assert batch["action_mask"].sum(-1)[0].tolist() == [size] * CHUNK
    assert np.isfinite(batch["action"].numpy()).all()
