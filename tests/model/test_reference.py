"""The plain numpy reference against stated values, stock Gemma 3 and properties it must have."""

import inspect

import numpy as np
import pytest
import torch
from reference import Reference, image_blocks, prefix_visibility, time_embedding
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma3TextModel,
)

IMAGE, PAD, HIDDEN = 90, 0, 7
IMAGE_TOKENS, ACTION_DIM, CHUNK, ACTION_WIDTH = 4, 32, 5, 48
LENGTHS, LONGEST = (41, 33), 44
CACHE = "cache"
"""The argument's name in newer releases of transformers; `past_key_values` before."""
if CACHE not in inspect.signature(Gemma3TextModel.forward).parameters:
    CACHE = "past_key_values"
GEOMETRY = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 3,  # shorter than an image
    "vocab_size": 100,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
    "attn_implementation": "eager",
}


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Give every parameter values that matter: the defaults hold zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            std = 0.3 if p.ndim == 1 else p[0].numel() ** -0.5
            p.copy_(torch.randn(p.shape, generator=generator) * std)


def text_tensors(module: torch.nn.Module, prefix: str) -> dict[str, np.ndarray]:
    return {prefix + name: p.detach().numpy() for name, p in module.named_parameters()}


@pytest.fixture(scope="module")
def vlm() -> Gemma3ForConditionalGeneration:
    config = Gemma3Config(
        text_config={**GEOMETRY, "hidden_size": 64, "intermediate_size": 96},
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=IMAGE,
        boi_token_index=91,
        eoi_token_index=92,
        attn_implementation="eager",
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    randomise(model, 1)
    return model


@pytest.fixture(scope="module")
def expert() -> Gemma3TextModel:
    config = Gemma3TextConfig(**GEOMETRY, hidden_size=ACTION_WIDTH, intermediate_size=80)
    model = Gemma3TextModel(config).eval()
    randomise(model, 2)
    return model


@pytest.fixture(scope="module")
def checkpoint(vlm, expert) -> tuple[dict[str, np.ndarray], dict]:
    tensors = text_tensors(vlm, "model.vlm.") | text_tensors(expert, "model.action_expert.")
    del tensors["model.action_expert.embed_tokens.weight"]
    rng, width = np.random.default_rng(3), ACTION_WIDTH
    sizes = {
        "model.action_in_proj": (width, ACTION_DIM),
        "model.action_out_proj": (ACTION_DIM, width),
        "model.time_mlp_in": (width, width),
        "model.time_mlp_out": (width, width),
        "model.action_expert.final_time_modulator": (3 * width, width),
    }
    for i in range(GEOMETRY["num_hidden_layers"]):
        for kind in ("input", "mlp"):
            sizes[f"model.action_expert.{kind}_time_modulators.{i}"] = (3 * width, width)
    for name, (rows, columns) in sizes.items():
        tensors[f"{name}.weight"] = rng.normal(size=(rows, columns)) / columns**0.5
        tensors[f"{name}.bias"] = rng.normal(size=rows) * 0.3
    config = {
        "vlm_config": vlm.config.to_dict(),
        "action_config": expert.config.to_dict(),
        "action_dim": ACTION_DIM,
        "chunk_size": CHUNK,
    }
    return tensors, config


@pytest.fixture(scope="module")
def reference(checkpoint) -> Reference:
    return Reference(*checkpoint)


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    """Two right-padded prompts with two images each, and unused history slots in the first."""
    rng = np.random.default_rng(4)
    ids = rng.integers(10, 80, (2, LONGEST))
    for row, starts in enumerate(((12, 27), (3, 20))):
        for start in starts:
            ids[row, start : start + IMAGE_TOKENS] = IMAGE
    ids[0, 5:9] = HIDDEN
    mask = np.arange(LONGEST) < np.array(LENGTHS)[:, None]
    ids[~mask] = PAD
    action_mask = np.zeros((2, CHUNK, ACTION_DIM), dtype=bool)
    action_mask[0, :, :7] = True
    action_mask[1, :3, :14] = True
    return {
        "input_ids": ids,
        "attention_mask": mask.astype(np.int64),
        "token_type_ids": (ids == IMAGE).astype(np.int64),
        "pixel_values": rng.normal(size=(4, 3, 56, 56)).astype(np.float32),
        "action": rng.normal(size=(2, CHUNK, ACTION_DIM)),
        "action_mask": action_mask,
    }


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(2, CHUNK, ACTION_DIM))


@pytest.fixture(scope="module")
def prefix_kv(reference, batch) -> list[tuple[np.ndarray, np.ndarray]]:
    names = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
    return reference.prefix(*(batch[name] for name in names))


def looked_at(batch: dict[str, np.ndarray]) -> np.ndarray:
    return (batch["attention_mask"] == 1) & (batch["input_ids"] != HIDDEN)


@pytest.mark.parametrize(
    ("t", "expected"),
    [
        (0.5, [0, 0, 1, 0.707107, 1, -1, 0, 0.707107]),
        (0.001, [1, 0.156434, 0.015707, 0.001571, 0, 0.987688, 0.999877, 0.999999]),
    ],
)
def test_time_embedding(t, expected):
    np.testing.assert_allclose(time_embedding(t, 8), expected, atol=1e-6)
    np.testing.assert_allclose(time_embedding([t, 1.0], 8)[0], expected, atol=1e-6)


def test_prompt_visibility_by_hand():
    types = np.array([[0, 1, 1, 0, 1, 0]])
    assert image_blocks(types).tolist() == [[-1, 0, 0, -1, 1, -1]]
    visible = np.array([[True, True, True, True, True, False]])
    seen = prefix_visibility(visible, image_blocks(types), 2)[0]
    assert seen.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]


def test_prefix_agrees_with_stock_gemma(vlm, batch, prefix_kv):
    visible = looked_at(batch)
    cache = DynamicCache()  # made without a configuration it keeps every key
    with torch.no_grad():
        vlm.model(
            input_ids=torch.tensor(batch["input_ids"]),
            attention_mask=torch.tensor(visible.astype(np.int64)),
            position_ids=torch.tensor(np.maximum(visible.cumsum(1) - 1, 0)),
            token_type_ids=torch.tensor(batch["token_type_ids"]),
            pixel_values=torch.tensor(batch["pixel_values"]),
            use_cache=True,
            **{CACHE: cache},
        )
    assert len(cache.layers) == len(prefix_kv)
    worst = 0.0
    for layer, (keys, values) in zip(cache.layers, prefix_kv, strict=True):
        for stock, ours in ((layer.keys, keys), (layer.values, values)):
            assert ours.shape == tuple(stock.shape) == (2, 2, LONGEST, 32)
            difference = np.abs(ours - stock.numpy()).transpose(0, 2, 1, 3)[visible]
            worst = max(worst, difference.max())
    assert worst < 1e-5, worst


def test_velocity_agrees_with_stock_gemma_under_constant_modulation(
    expert, checkpoint, batch, prefix_kv, noise
):
    """With scale = the norm's weight, no shift and gate 1, an action layer is a Gemma layer."""
    tensors, config = checkpoint
    tensors = dict(tensors)
    zero, one = np.zeros(ACTION_WIDTH), np.ones(ACTION_WIDTH)
    prefix = "model.action_expert."
    norms = {"final_time_modulator": "norm"}
    for i in range(GEOMETRY["num_hidden_layers"]):
        norms[f"input_time_modulators.{i}"] = f"layers.{i}.input_layernorm"
        norms[f"mlp_time_modulators.{i}"] = f"layers.{i}.pre_feedforward_layernorm"
    for modulator, norm in norms.items():
        scale = tensors[f"{prefix}{norm}.weight"]
        tensors[f"{prefix}{modulator}.weight"] = np.zeros((3 * ACTION_WIDTH, ACTION_WIDTH))
        tensors[f"{prefix}{modulator}.bias"] = np.concatenate([scale, zero, one])
    ours = Reference(tensors, config).velocity(
        noise, 0.3, prefix_kv, batch["input_ids"], batch["attention_mask"]
    )

    cache = DynamicCache()
    for i, (keys, values) in enumerate(prefix_kv):
        cache.update(torch.tensor(keys).float(), torch.tensor(values).float(), i)
    visible = looked_at(batch)
    mask = np.pad(visible, ((0, 0), (0, CHUNK)), constant_values=True)
    additive = torch.tensor(np.where(mask, 0.0, -2.3819763e38)).float()[:, None, None]
    additive = additive.expand(-1, 1, CHUNK, -1)
    x = noise @ tensors["model.action_in_proj.weight"].T + tensors["model.action_in_proj.bias"]
    with torch.no_grad():
        hidden = expert(
            inputs_embeds=torch.tensor(x).float(),
            attention_mask=dict.fromkeys(set(GEOMETRY["layer_types"]), additive),
            position_ids=torch.tensor(visible.sum(1)[:, None] + np.arange(CHUNK)),
            **{CACHE: cache},
        ).last_hidden_state.numpy()
    stock = hidden @ tensors["model.action_out_proj.weight"].T
    stock = stock + tensors["model.action_out_proj.bias"]
    worst = np.abs(ours - stock).max()
    assert worst < 1e-5, worst


def test_vision_names_with_and_without_the_inner_level(checkpoint, reference, batch):
    tensors, config = checkpoint
    flat = {k.replace("vision_tower.vision_model.", "vision_tower."): v for k, v in tensors.items()}
    deep = {k.replace("vision_tower.", "vision_tower.vision_model."): v for k, v in flat.items()}
    expected = reference.images(batch["pixel_values"])
    for named in (flat, deep):
        np.testing.assert_array_equal(
            Reference(named, config).images(batch["pixel_values"]), expected
        )


def test_time_reaches_the_velocity(reference, batch, prefix_kv, noise):
    rest = (prefix_kv, batch["input_ids"], batch["attention_mask"])
    both = reference.velocity(noise, [0.2, 0.7], *rest)
    for row, t in enumerate((0.2, 0.7)):
        np.testing.assert_allclose(both[row], reference.velocity(noise, t, *rest)[row], atol=1e-12)
    assert np.abs(both[1] - reference.velocity(noise, 0.2, *rest)[1]).max() > 1e-2


def test_padding_and_unused_history_do_not_matter(reference, batch, noise):
    expected = reference.per_sample_loss(batch, noise, np.array([0.4, 0.9]))
    longer = {
        **batch,
        "input_ids": np.pad(batch["input_ids"], ((0, 0), (0, 3)), constant_values=PAD),
        "attention_mask": np.pad(batch["attention_mask"], ((0, 0), (0, 3))),
        "token_type_ids": np.pad(batch["token_type_ids"], ((0, 0), (0, 3))),
    }
    got = reference.per_sample_loss(longer, noise, np.array([0.4, 0.9]))
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    unmasked = {**batch, "attention_mask": None}
    got = reference.per_sample_loss(unmasked, noise, np.array([0.4, 0.9]))
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_loss_counts_valid_elements_only(reference, batch, prefix_kv, noise):
    time = np.array([0.4, 0.9])
    per_sample = reference.per_sample_loss(batch, noise, time)
    t = time[:, None, None]
    x_t = t * noise + (1 - t) * batch["action"]
    x_t[0, :, 7:] = x_t[1, :, 14:] = 0  # the invalid rows of the second sample stay
    v = reference.velocity(x_t, time, prefix_kv, batch["input_ids"], batch["attention_mask"])
    errors = (v - (noise - batch["action"])) ** 2
    expected = [errors[0, :, :7].mean(), errors[1, :3, :14].mean()]
    np.testing.assert_allclose(per_sample, expected, rtol=1e-12)
    assert reference.loss(batch, noise, time) == pytest.approx(np.mean(expected), rel=1e-12)


def test_sample_without_valid_elements_counts_zero(reference, batch, noise):
    time = np.array([0.4, 0.9])
    mask = batch["action_mask"].copy()
    mask[1] = False
    per_sample = reference.per_sample_loss({**batch, "action_mask": mask}, noise, time)
    assert per_sample[1] == 0
    assert per_sample[0] == reference.per_sample_loss(batch, noise, time)[0]


def test_sampling_takes_masked_euler_steps(reference, batch, prefix_kv, noise):
    mask = np.zeros((1, 1, ACTION_DIM))
    mask[..., :7] = 1
    rest = (prefix_kv, batch["input_ids"], batch["attention_mask"])
    x = noise * mask
    x = (x - reference.velocity(x, 1.0, *rest) / 2) * mask
    x = x - reference.velocity(x, 0.5, *rest) / 2
    got = reference.sample(batch, noise, 2, mask)
    np.testing.assert_allclose(got, x, rtol=1e-12)
    assert np.abs(got[..., 7:]).max() > 0
    plain = noise - reference.velocity(noise, 1.0, *rest)
    np.testing.assert_allclose(reference.sample(batch, noise, 1), plain, rtol=1e-12)
