import io
import json
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from policies import CHUNK, Q01, Q99, make_layout
from service_kit import STATE

from opendm.data.normalize import NormStats, NormStatsFile
from opendm.data.processor import load_processor
from opendm.errors import CheckpointError, DataError
from opendm.infer.config import DM05InferenceConfig
from opendm.infer.layout import PolicyLayout
from opendm.infer.policy import Observation, Policy, PolicyOptions


@pytest.fixture
def checkpoint(served_checkpoint):
    return served_checkpoint


@pytest.fixture
def policy(served_policy):
    return served_policy


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
    np.testing.assert_allclose(batch, np.stack(singles), rtol=0, atol=1e-5)
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


def test_each_observation_of_a_batch_draws_from_its_own_generator(policy):
    seen = {}
    for others in ([], [2], [3, 4]):
        seeds = [1, *others]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        observations = [observation(seed, prompt="Reach " * seed) for seed in seeds]
        seen[len(seeds)] = policy.act_batch(observations, generators, num_steps=3)[0]
    np.testing.assert_allclose(seen[2], seen[1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(seen[3], seen[1], rtol=0, atol=1e-5)


def test_the_prefix_is_computed_once_whatever_the_number_of_steps(policy):
    calls = Counter()
    model = policy.model
    parts = {
        "vision": model.visual,
        "text layer": model.language_model.layers[0],
        "suffix layer": model.model.action_expert.layers[0],
    }
    hooks = [
        part.register_forward_hook(lambda *_, name=name: calls.update([name]))
        for name, part in parts.items()
    ]
    for steps in (1, 4):
        calls.clear()
        policy.act(observation(), num_steps=steps)
        assert calls == {"vision": 1, "text layer": 1, "suffix layer": steps}
    for hook in hooks:
        hook.remove()


def test_actions_can_be_clipped_to_what_training_saw(checkpoint, policy, monkeypatch):
    clipping = Policy(
        policy.model, policy.processor, policy.layout, policy.norm_stats,
        PolicyOptions(clip_actions=True),
    )  # fmt: skip

    def large(**kwargs):
        signs = torch.tensor([1.0, -1.0]).repeat(CHUNK // 2)[None, :, None]
        return (3 * signs).expand(len(kwargs["input_ids"]), -1, 32)

    monkeypatch.setattr(policy.model, "inference_action", large)
    base = np.array([*STATE[:3], 0])
    actions = clipping.act(observation()) - base
    np.testing.assert_allclose(actions[0], Q99, atol=1e-6)
    np.testing.assert_allclose(actions[1], Q01, atol=1e-6)
    free = policy.act(observation()) - base
    assert (free[0] > Q99).all()
    assert (free[1] < Q01).all()


def robots_policy(policy):
    """Two robots that differ in everything that may differ."""
    table = {
        "Sawyer": {},
        "Arm": {
            "image_keys": ["front"], "image_prompts": ["Front"], "action_mode": "absolute",
            "state_desc": ["joint"] * 3, "action_dim": 3,
        },
    }  # fmt: skip
    three = NormStats(*(np.full(3, value) for value in (0.0, 1.0, -1.0, 1.0)))
    profiles = {**policy.norm_stats.profiles, "Arm": {"state": three, "action": three}}
    return Policy(
        policy.model, policy.processor, make_layout(robots=table),
        NormStatsFile(profiles, "Sawyer"),
    )  # fmt: skip


def test_a_checkpoint_of_several_robots_acts_for_each_as_if_alone(policy, tmp_path):
    both = robots_policy(policy)
    layout_of_arm = make_layout(
        image_keys=["front"], image_prompts=["Front"], action_mode="absolute",
        state_desc=["joint"] * 3, action_dim=3, robot_type="Arm",
    )  # fmt: skip
    alone = Policy(policy.model, policy.processor, layout_of_arm, both.norm_stats)
    front = observation(5).images["images_1"]
    arm = Observation((0.1, 0.2, 0.3), {"front": front}, "Reach", robot_type="Arm")
    noise = policy.noise_for([1, 2])
    prepared = [both.prepare(arm), both.prepare(observation())]
    mixed = both.act_prepared(prepared, num_steps=2, noise=noise)
    assert [chunk.shape for chunk in mixed] == [(CHUNK, 3), (CHUNK, 4)]
    np.testing.assert_allclose(
        mixed[0], alone.act(arm, num_steps=2, noise=noise[:1]), rtol=0, atol=1e-5
    )
    np.testing.assert_allclose(
        mixed[1], policy.act(observation(), num_steps=2, noise=noise[1:]), rtol=0, atol=1e-5
    )
    with pytest.raises(DataError, match=r"robot_type 'Leg' is unknown .*\['Arm', 'Sawyer'\]"):
        both.prepare(observation(robot_type="Leg"))
    both.layout.save(tmp_path)
    assert PolicyLayout.load(tmp_path) == both.layout


def test_history_is_taken_where_the_checkpoint_has_it_and_changes_the_actions(policy):
    layout = make_layout(is_history=True, max_history_images=2, max_length=400)
    remembering = Policy(policy.model, policy.processor, layout, policy.norm_stats)
    noise = policy.noise_for([0])
    past = list(observation(9).images.values())
    results = [
        remembering.act(observation(history_images=past[:n]), num_steps=2, noise=noise)
        for n in (0, 1, 2)
    ]
    assert not np.allclose(results[0], results[1])
    assert not np.allclose(results[1], results[2])
    pair = [observation(history_images=past[:n]) for n in (0, 2)]
    batch = remembering.act_batch(pair, num_steps=2, noise=noise.repeat(2, 1, 1))
    np.testing.assert_allclose(batch, [results[0], results[2]], rtol=0, atol=1e-5)
    with pytest.raises(DataError, match="trained without history"):
        policy.act(observation(history_images=past))
    with pytest.raises(DataError, match="3 history images for 2 slots"):
        remembering.act(observation(history_images=[*past, past[0]]))
