"""A frame is read alike by training, by the policy and by the service: tokens, pixels and state."""

import io
import json

import numpy as np
import pytest
import torch
from policies import CHUNK
from robot_sets import write_robot_set
from service_kit import STATE, STEPS, b64, picture, valid

from opendm.data.collator import as_float
from opendm.data.config import DM05DataConfig
from opendm.data.formats import dataset_info
from opendm.data.processor import image_size
from opendm.dataset.register import CONVERSATION_DATA
from opendm.exp.dm05_exp import DM05Exp
from opendm.exp.policy_layout import policy_layout
from opendm.infer.config import DM05InferenceConfig
from opendm.infer.observation import Observation, to_picture
from opendm.infer.policy import Policy
from opendm.infer.request import parse_infer
from opendm.infer.serve import make_contract

KEYS = ("input_ids", "attention_mask", "token_type_ids")
PIXELS = ("pixel_values", "history_pixel_values")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Two robots that differ in cameras, state and rate, both with history."""
    folder = write_robot_set(
        tmp_path / "arm", num_images=1, state_dim=3, action_dim=3, num_episodes=1
    )
    arm = {
        "jsonl_dir": str(folder), "image_dir": str(folder), "image_keys": ["images_1"],
        "image_prompts": ["Front"], "state_desc": ["joint"] * 3, "robot_type": "UR5", "fps": 1,
    }  # fmt: skip
    monkeypatch.setitem(CONVERSATION_DATA, "parity_arm", arm)
    sawyer = {**dataset_info("demo"), "fps": 3}
    monkeypatch.setitem(CONVERSATION_DATA, "parity_sawyer", sawyer)
    return DM05DataConfig(
        datasets=["parity_sawyer", "parity_arm"],
        is_history=True,
        norm_stats_root=str(tmp_path),
        norm_stats_default_robot_type="Sawyer",
    )


@pytest.fixture
def acting(data, served_checkpoint, tmp_path):
    exp = DM05Exp()
    exp.data_config, exp.model_config.chunk_size = data, CHUNK
    stats = data.compute_norm_stats(CHUNK)
    policy_layout(exp, stats).save(tmp_path)
    return Policy.from_checkpoint(
        served_checkpoint, layout_file=tmp_path / "opendm.json", norm_stats_file=stats
    )


def trained_frame(data, part, acting, row):
    """A sample of training without augmentation, and its frame as recorded and decoded."""
    part.norm_stats_file = str(data.norm_stats_path(CHUNK))
    transforms = part.build_transforms(
        acting.processor, CHUNK, acting.layout.max_length, augment=False
    )
    frame = {}

    def keep(sample):
        frame.update(sample)
        return sample

    transforms.transforms.insert(3, keep)  # behind the history, before any pixel changes
    return part.split_dataset(transforms, "train")[row], frame


def by_the_policy(acting, frame, robot):
    keys = acting.layout.for_robot(robot).image_keys
    images = dict(zip(keys, frame["images"], strict=True))
    return Observation(
        frame["state"], images, frame["prompt"], robot, history_images=frame["history_images"]
    )


def as_png(image):
    """Base64 of a file that holds exactly this picture."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return b64(buffer.getvalue())


def by_the_service(acting, frame, robot):
    observation = {
        "state": frame["state"].tolist(),
        "prompt": frame["prompt"],
        "robot_type": robot,
        "images": {str(i): as_png(one) for i, one in enumerate(frame["images"], start=1)},
        "history_images": [as_png(one) for one in frame["history_images"]],
    }
    contract = make_contract(acting, DM05InferenceConfig(diffusion_steps=STEPS))
    body = json.dumps({"observation": observation}).encode()
    return parse_infer(body, contract).observation


@pytest.mark.parametrize("way", [by_the_policy, by_the_service])
@pytest.mark.parametrize(("number", "robot", "row"), [(0, "Sawyer", 13), (1, "UR5", 4)])
def test_a_training_frame_is_read_alike(data, acting, way, number, robot, row):
    trained, frame = trained_frame(data, data.parts()[number], acting, row)
    assert len(frame["history_images"]) == 4, "the frame has a history"
    prepared = acting.prepare(way(acting, frame, robot))
    for key in KEYS:
        assert torch.equal(prepared.inputs[key], trained[key]), key
    for key in PIXELS:
        assert torch.equal(as_float(prepared.inputs[key]), as_float(trained[key])), key
    np.testing.assert_array_equal(prepared.state, frame["state"])


@pytest.mark.parametrize("size", [(320, 120), (90, 300), (200, 200), (7, 5)])
def test_a_request_keeps_its_pictures_in_the_models_size_and_loses_nothing(served_policy, size):
    """Requests wait with their pictures; at the size in which they came that takes gigabytes."""
    side = image_size(served_policy.processor)
    files = [picture(seed, size, "JPEG") for seed in (0, 1)]
    contract = make_contract(served_policy, DM05InferenceConfig(diffusion_steps=STEPS))
    body = valid(images={"1": b64(files[0]), "2": b64(files[1])})
    kept = parse_infer(json.dumps(body).encode(), contract).observation
    assert [image.size for image in kept.images.values()] == [(side, side)] * 2
    whole = {key: to_picture(key, file) for key, file in zip(kept.images, files, strict=True)}
    pixels = [
        served_policy.prepare(one).inputs["pixel_values"]
        for one in (kept, Observation(STATE, whole, "Reach"))
    ]
    assert torch.equal(*pixels)
