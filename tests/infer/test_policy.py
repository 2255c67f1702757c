import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from opendm.data.normalize import NormStats, NormStatsFile
from opendm.data.processor import load_processor
from opendm.errors import CheckpointError, DataError
from opendm.infer.config import DM05InferenceConfig
from opendm.infer.layout import PolicyLayout
from opendm.infer.policy import Observation, Policy
from opendm.model.dm05.tiny import build_tiny_checkpoint

STATE = (0.1, 0.6, 0.2, 1.0)
CHUNK = 6
Q01, Q99 = np.array([-0.1, -0.2, -0.3, 0.0]), np.array([0.3, 0.2, 0.5, 1.0])


def make_layout(**changes):
    fields = {
        "dataset_name": "demo",
        "image_keys": ["images_1", "images_2"],
        "image_prompts": ["Corner", "Gripper"],
        "action_mode": "relative",
        "state_desc": ["eef", "eef", "eef", "gripper"],
        "robot_type": "Sawyer",
        "n_bins": 256,
        "add_state": True,
        "action_dim": 4,
        "chunk_size": CHUNK,
        "max_length": 256,
    }
    return PolicyLayout(**{**fields, **changes})


def save_stats(folder):
    state = NormStats(np.zeros(4), np.ones(4), np.array([-1.0, 0, 0, 0]), np.ones(4))
    action = NormStats(np.zeros(4), np.ones(4), Q01, Q99)
    profile = {"state": state, "action": action}
    NormStatsFile({"Sawyer": profile}, "Sawyer").save(folder / "norm_stats.json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = build_tiny_checkpoint(tmp_path_factory.mktemp("policy") / "tiny", ["Reach"])
    make_layout().save(folder)
    save_stats(folder)
    return folder


@pytest.fixture(scope="module")
def policy(checkpoint):
    return Policy.from_checkpoint(checkpoint)


def observation(seed=0, **changes):
    pixels = np.random.default_rng(seed).integers(0, 256, (2, 90, 120, 3), dtype=np.uint8)
    fields = {
        "state": STATE,
        "images": {"images_1": pixels[0], "images_2": pixels[1]},
        "prompt": "Reach",
    }
    return Observation(**{**fields, **changes})


def test_a_seed_fixes_the_chunk(policy):
    def act(seed):
        generator = torch.Generator().manual_seed(seed)
        return policy.act(observation(), num_steps=3, generator=generator)

    first = act(1)
    assert first.shape == (CHUNK, 4)
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, act(1))
    assert not np.allclose(first, act(2))


def test_a_batch_equals_its_single_observations(policy):
    observations = [observation(0), observation(1, prompt="Reach out for the far red goal")]
    noise = policy.noise_for([5, 6])
    batch = policy.act_batch(observations, num_steps=3, noise=noise)
    singles = [
        policy.act(one, num_steps=3, noise=start[None])
        for one, start in zip(observations, noise, strict=True)
    ]
    np.testing.assert_allclose(batch, np.stack(singles), atol=1e-4)
    assert not np.allclose(batch[0], batch[1])


@pytest.mark.parametrize("precision", ["bf16_mixed", "fp32_mixed"])
def test_a_checkpoint_samples_in_the_precision_it_was_trained_in(policy, monkeypatch, precision):
    """Autocast's, under fp32_mixed; the weights' own, under bf16_mixed."""
    seen = []

    def zeros(**kwargs):
        seen.append(torch.is_autocast_enabled("cpu"))
        return torch.zeros(len(kwargs["input_ids"]), CHUNK, 32)

    monkeypatch.setattr(policy.model, "precision_policy", precision)
    monkeypatch.setattr(policy.model, "inference_action", zeros)
    policy.act(observation())
    assert seen == [precision == "fp32_mixed"]


@pytest.mark.parametrize("mode", ["relative", "absolute"])
def test_actions_are_denormalised_and_added_to_the_state(policy, checkpoint, monkeypatch, mode):
    if mode == "absolute":
        layout = make_layout(action_mode=mode)
        stats = policy.norm_stats
        policy = Policy(policy.model, load_processor(checkpoint), layout, stats)
    seen = {}

    def zeros(**kwargs):
        seen.update(kwargs)
        return torch.zeros(len(kwargs["input_ids"]), CHUNK, 32)

    monkeypatch.setattr(policy.model, "inference_action", zeros)
    actions = policy.act(observation())
    expected = (Q01 + Q99) / 2
    if mode == "relative":
        expected = expected + np.array([*STATE[:3], 0])
    np.testing.assert_allclose(actions, np.tile(expected, (CHUNK, 1)), atol=1e-5)
    assert seen["action_mask"].sum() == 4
    assert seen["action_mask"][..., :4].all()


def test_every_form_of_a_picture_gives_the_same_actions(policy):
    arrays = observation().images
    png = {}
    for key, array in arrays.items():
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, "PNG")
        png[key] = buffer.getvalue()
    noise = policy.noise_for([0])
    expected = policy.act(observation(), num_steps=2, noise=noise)
    pictures = {key: Image.fromarray(array) for key, array in arrays.items()}
    for images in (png, pictures):
        actions = policy.act(observation(images=images), num_steps=2, noise=noise)
        np.testing.assert_array_equal(actions, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": STATE[:3]}, "state has 3 values, expected 4"),
        ({"state": (*STATE[:3], float("nan"))}, r"state\[3\] is nan"),
        ({"images": {"images_1": np.zeros((8, 8, 3), np.uint8)}}, "camera 'images_2' is missing"),
        ({"images": {"images_1": b"no", "images_2": b"no"}}, "'images_1' cannot be decoded"),
        ({"images": dict.fromkeys(("images_1", "images_2"), np.zeros((8, 8)))}, "expected uint8"),
        ({"robot_type": "UR5"}, "UR5"),
    ],
)
def test_a_wrong_observation_is_named(policy, changes, message):
    with pytest.raises(DataError, match=message):
        policy.act(observation(**changes))


def test_actions_that_are_not_finite_are_refused(policy, monkeypatch):
    monkeypatch.setattr(
        policy.model, "inference_action", lambda **_: torch.full((1, CHUNK, 32), float("nan"))
    )
    with pytest.raises(CheckpointError, match="not finite"):
        policy.act(observation())


def test_an_untrained_checkpoint_borrows_its_layout(policy, checkpoint, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(checkpoint / name)
    with pytest.raises(CheckpointError, match=r"opendm\.json does not exist"):
        Policy.from_checkpoint(bare)
    borrowed = Policy.from_checkpoint(bare, layout_from=checkpoint)
    noise = policy.noise_for([0])
    np.testing.assert_array_equal(
        borrowed.act(observation(), num_steps=2, noise=noise),
        policy.act(observation(), num_steps=2, noise=noise),
    )


def test_another_prompt_layout_is_refused(checkpoint, tmp_path):
    make_layout(prompt_layout=2).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"key 'prompt_layout' of .* is 2"):
        Policy.from_checkpoint(checkpoint, layout_from=tmp_path)


def test_the_layout_survives_its_file(tmp_path):
    layout = make_layout(speed="0.5", control_mode="eef")
    layout.save(tmp_path)
    assert PolicyLayout.load(tmp_path) == layout


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n_bins", None, "key 'n_bins' is missing"),
        ("n_bins", "256", "key 'n_bins' is '256'; expected int"),
        ("add_state", 1, "key 'add_state' is 1; expected bool"),
        ("image_keys", ["images_1", 2], "key 'image_keys'"),
        ("image_prompts", ["Corner"], "key 'image_prompts' has 1 labels for 2"),
        ("action_mode", "delta", "key 'action_mode' is 'delta'; allowed: absolute, relative"),
        ("chunk_size", 0, "key 'chunk_size' is 0"),
        ("format_version", 9, "format_version is 9"),
    ],
)
def test_a_broken_layout_names_its_key(tmp_path, key, value, message):
    make_layout().save(tmp_path)
    path = tmp_path / "opendm.json"
    values = json.loads(path.read_text())
    values[key] = value
    if value is None:
        del values[key]
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        PolicyLayout.load(tmp_path)


def test_defaults_are_those_of_the_public_framework():
    config = DM05InferenceConfig()
    assert (config.port, config.diffusion_steps, config.output_action_dim) == (7891, 10, 14)
    assert config.image_prompts == ["Head", "Left wrist", "Right wrist"]
    assert config.fast_prefix_len is None
