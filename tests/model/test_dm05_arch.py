"""The network as a whole: against the reference, and what gradients may depend on."""

import copy
import itertools

import numpy as np
import pytest
import torch
from transformers import Gemma3Config, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP

from opendm.errors import CheckpointError, ConfigError
from opendm.model.dm05.configuration import DM05Config
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration

BACKENDS = ("eager", "sdpa", "flex_attention")


def use_backend(model, name: str) -> None:
    model.model.llm_backend = name
    model.model.action_expert.set_action_attention_backend(name)


def close(ours, expected) -> None:
    """Equal to 1e-5 of the largest value."""
    ours = ours.detach().numpy()
    assert ours.shape == expected.shape
    difference = np.abs(ours - expected).max() / np.abs(expected).max()
    assert difference < 1e-5, difference


def arrays(batch):
    return {name: tensor.numpy() for name, tensor in batch.items()}


@pytest.fixture(scope="module")
def expected(reference, batch, draw):
    """What the reference makes of the batch: per-sample loss, velocity and a 10-step sample."""
    data, noise, time = arrays(batch), draw["noise"].numpy(), draw["time"].numpy()
    names = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
    cache = reference.prefix(*(data[name] for name in names))
    mask = np.zeros((1, 1, noise.shape[2]))
    mask[..., :7] = 1
    return {
        "loss": reference.per_sample_loss(data, noise, time),
        "velocity": reference.velocity(
            noise, time, cache, data["input_ids"], data["attention_mask"]
        ),
        "sample": reference.sample(data, noise, 10, mask),
        "mask": torch.tensor(mask, dtype=torch.float32),
        "cache": cache,
    }


# The reference


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_loss_of_each_sample_is_the_reference(model, batch, draw, expected, backend):
    use_backend(model, backend)
    close(model(**batch, **draw).per_sample_loss, expected["loss"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_velocity_is_the_reference(model, prompt, draw, expected, backend):
    use_backend(model, backend)
    with torch.no_grad():
        prefix = model.model.prefix(**prompt)
        close(model.model.velocity(draw["noise"], draw["time"], prefix), expected["velocity"])


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_ten_step_sample_is_the_reference(model, prompt, draw, expected, backend):
    use_backend(model, backend)
    sample = model.inference_action(
        **prompt, diffusion_steps=10, noise=draw["noise"], action_mask=expected["mask"]
    )
    close(sample, expected["sample"])


def test_prefix_keys_and_values_are_the_reference(model, prompt, expected):
    prefix = model.model.prefix(**prompt)
    seen = prefix.visible.numpy()
    for layer, (keys, values) in enumerate(expected["cache"]):
        for ours, theirs in ((prefix.keys[layer], keys), (prefix.values[layer], values)):
            at_tokens = ours.transpose(1, 2)[prefix.visible]
            close(at_tokens, theirs.transpose(0, 2, 1, 3)[seen])


def test_loss_is_the_mean_over_samples(model, batch, draw):
    output = model(**batch, **draw)
    assert output.loss.item() == pytest.approx(output.per_sample_loss.mean().item(), rel=1e-6)


def test_pixels_may_be_bytes(model, batch, draw):
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (4, 3, 112, 112), dtype=torch.uint8, generator=rng)
    loss = model(**{**batch, "pixel_values": pixels}, **draw).loss
    scaled = (pixels.float() - 127.5) / 127.5
    assert torch.equal(loss, model(**{**batch, "pixel_values": scaled}, **draw).loss)


def test_training_and_sampling_velocities_are_bit_equal(model, prompt, batch, draw, monkeypatch):
    """Over a prefix longer than the sliding window; both modes keep every key."""
    assert prompt["input_ids"].shape[1] > model.config.vlm_config.text_config.sliding_window
    seen = []
    inner = model.model.velocity

    def spy(*args):
        seen.append(inner(*args))
        return seen[-1]

    monkeypatch.setattr(model.model, "velocity", spy)
    noise = draw["noise"]
    model.train()
    model(**prompt, action=batch["action"], noise=noise, time=torch.ones(2))  # x_t is the noise
    model.eval()
    model.inference_action(**prompt, diffusion_steps=1, noise=noise)
    assert torch.equal(seen[0].detach(), seen[1])


def test_padding_does_not_reach_the_loss(model, batch, draw):
    longer = dict(batch)
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        longer[name] = torch.nn.functional.pad(batch[name], (0, 6))
    garbage = longer["input_ids"].clone()
    garbage[longer["attention_mask"] == 0] = 55
    longer["input_ids"] = garbage
    close(model(**longer, **draw).per_sample_loss, model(**batch, **draw).per_sample_loss.numpy())


def test_every_image_reaches_its_own_sample_only(model, batch, draw):
    plain = model(**batch, **draw).per_sample_loss
    for view, row in enumerate((0, 0, 1, 1)):
        pixels = batch["pixel_values"].clone()
        pixels[view] += 1.0
        changed = model(**{**batch, "pixel_values": pixels}, **draw).per_sample_loss != plain
        assert changed.tolist() == [row == 0, row == 1]


# Gradients


def gradients(model, batch, draw):
    model.zero_grad(set_to_none=True)
    output = model(**batch, **draw)
    output.loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(("vlm", "expert"), [(True, False), (False, True), (True, True)])
def test_gradient_checkpointing_changes_no_bit(model, batch, draw, vlm, expert):
    model.train()
    plain, before = gradients(model, batch, draw)
    model.enable_gradient_checkpointing(
        vlm_gradient_checkpointing=vlm, ae_gradient_checkpointing=expert
    )
    recomputed, after = gradients(model, batch, draw)
    assert torch.equal(plain.loss, recomputed.loss)
    differing = [
        name
        for name, grad in before.items()
        if (grad is None) != (after[name] is None)
        or (grad is not None and not torch.equal(grad, after[name]))
    ]
    assert differing == []


def mlp_calls(model, run) -> dict[str, int]:
    """How often the feed-forward networks of each tower run."""
    towers = {
        "text": [m for m in model.language_model.modules() if isinstance(m, Gemma3MLP)],
        "vision": [m.mlp for m in model.visual.modules() if type(m).__name__.endswith("Layer")],
        "expert": [m for m in model.model.action_expert.modules() if isinstance(m, Gemma3MLP)],
    }
    counts = dict.fromkeys(towers, 0)
    handles = []
    for tower, mlps in towers.items():

        def count(*_, tower=tower):
            counts[tower] += 1

        # Before the call: recomputation stops at the last tensor that the backward pass needs.
        handles += [mlp.register_forward_pre_hook(count) for mlp in mlps]
    run()
    for handle in handles:
        handle.remove()
    return counts


@pytest.mark.parametrize(("vlm", "expert"), list(itertools.product((False, True), repeat=2)))
def test_gradient_checkpointing_recomputes_the_tower_it_names(model, batch, draw, vlm, expert):
    model.train().enable_gradient_checkpointing(
        vlm_gradient_checkpointing=vlm, ae_gradient_checkpointing=expert
    )
    counts = mlp_calls(model, lambda: gradients(model, batch, draw))
    # The last text layer hands out its keys and values only.
    times = {"text": 3 * (1 + vlm), "vision": 4 * (1 + vlm), "expert": 4 * (1 + expert)}
    assert counts == times


def unread_names(depth: int) -> set[str]:
    last = f"model.vlm.model.language_model.layers.{depth - 1}"
    names = {f"{last}.self_attn.{part}.weight" for part in ("q_proj", "q_norm", "o_proj")}
    names |= {f"{last}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    norms = (
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    names |= {f"{last}.{norm}.weight" for norm in norms}
    names |= {"model.vlm.model.language_model.norm.weight", "model.action_expert.norm.weight"}
    for layer in range(depth):
        for norm in ("input_layernorm", "pre_feedforward_layernorm"):
            names.add(f"model.action_expert.layers.{layer}.{norm}.weight")
    return names


def test_parameters_without_gradient_are_exactly_those_no_loss_reads(model, batch, draw):
    for parameter in model.parameters():
        parameter.requires_grad_()
    _, grads = gradients(model.train(), batch, draw)
    assert {name for name, grad in grads.items() if grad is None} == unread_names(4)


def test_unread_parameters_are_not_trained(model):
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == unread_names(4)


def test_every_trainable_parameter_gets_a_nonzero_gradient(model, batch, draw):
    _, grads = gradients(model.train(), batch, draw)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [name for name in trainable if grads[name] is None or not grads[name].any()] == []


def test_frozen_embedding_gets_no_gradient(model, batch, draw):
    model.freeze_vlm_embedding()
    _, grads = gradients(model.train(), batch, draw)
    assert grads["model.vlm.model.language_model.embed_tokens.weight"] is None


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_sample_without_valid_elements_has_no_loss_and_no_gradient(model, batch, draw, value):
    action, mask = batch["action"].clone(), batch["action_mask"].clone()
    mask[1], action[1] = False, value
    output, grads = gradients(model, {**batch, "action": action, "action_mask": mask}, draw)
    assert output.per_sample_loss[1] == 0
    alone = {name: tensor[:1] for name, tensor in batch.items()} | {
        "pixel_values": batch["pixel_values"][:2]
    }
    _, expected = gradients(model, alone, {name: tensor[:1] for name, tensor in draw.items()})
    for name, grad in grads.items():
        if grad is not None:
            torch.testing.assert_close(2 * grad, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [123.0, float("inf")])
def test_padded_dimensions_change_neither_loss_nor_gradient(model, batch, draw, value):
    action = batch["action"].clone()
    action[0, :, 7:], action[1, :, 14:] = value, value
    plain, before = gradients(model, batch, draw)
    changed, after = gradients(model, {**batch, "action": action}, draw)
    assert torch.equal(plain.loss, changed.loss)
    for name, grad in before.items():
        assert grad is None or torch.equal(grad, after[name]), name


def test_repeated_tail_rows_stay_in_the_input(model, batch, draw):
    action = batch["action"].clone()
    action[1, 3:] += 1.0
    changed = model(**{**batch, "action": action}, **draw).per_sample_loss
    plain = model(**batch, **draw).per_sample_loss
    assert plain[0] == changed[0]
    assert plain[1] != changed[1]


def test_loss_does_not_depend_on_the_cut_into_micro_batches(model, batch, draw):
    whole, expected = gradients(model, batch, draw)
    model.zero_grad(set_to_none=True)
    losses = []
    for row in range(2):
        part = {name: tensor[row : row + 1] for name, tensor in (batch | draw).items()}
        part["pixel_values"] = batch["pixel_values"][2 * row : 2 * row + 2]
        loss = model(**part).loss / 2
        loss.backward()
        losses.append(loss.item())
    assert sum(losses) == pytest.approx(whole.loss.item(), rel=1e-5)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-3, atol=1e-5)


def test_draws_follow_the_sample_not_the_batch(model, batch):
    seeds = torch.tensor([11, 12])
    loss = model(**batch, sample_seed=seeds).per_sample_loss
    turned = {name: tensor.flip(0) for name, tensor in batch.items()}
    turned["pixel_values"] = batch["pixel_values"][[2, 3, 0, 1]]
    close(model(**turned, sample_seed=seeds.flip(0)).per_sample_loss.flip(0), loss.numpy())


# History


@pytest.fixture
def with_history(batch, prompt):
    """One history frame of 16 tokens in the second sample, none in the first."""
    ids = prompt["input_ids"].clone()
    ids[1, 3:19] = 6
    return {
        **prompt,
        "input_ids": ids,
        "token_type_ids": (ids == 12).long(),
        "pixel_values": batch["pixel_values"][:3],
        "history_pixel_values": batch["pixel_values"][3:],
        "history_mask": ids == 6,
    }


def velocity(model, inputs, draw):
    with torch.no_grad():
        return model.model.velocity(draw["noise"], draw["time"], model.model.prefix(**inputs))


def test_history_frames_reach_the_velocity_of_their_sample(model, with_history, draw):
    plain = velocity(model, with_history, draw)
    frames = with_history["history_pixel_values"] + 1.0
    changed = velocity(model, {**with_history, "history_pixel_values": frames}, draw)
    assert torch.equal(plain[0], changed[0])
    assert (plain[1] - changed[1]).abs().max() > 1e-3


def test_history_frames_replace_their_tokens_in_order(model, with_history):
    embeds = model.model.embed_prefix(
        with_history["input_ids"],
        with_history["pixel_values"],
        with_history["history_pixel_values"],
        with_history["history_mask"],
    )
    features = model.model.vlm.model.multi_modal_projector(
        model.visual(pixel_values=with_history["history_pixel_values"]).last_hidden_state
    )
    torch.testing.assert_close(embeds[1, 3:19], features[0])  # 16 tokens: pooling is the identity


def test_unused_history_slots_do_not_influence_the_velocity(model, prompt, draw):
    """The same prompt without its four <unused1> slots gives the same velocity."""
    use_backend(model, "sdpa")
    first = {name: tensor[:1] for name, tensor in prompt.items()} | {
        "pixel_values": prompt["pixel_values"][:2]
    }
    keep = first["input_ids"][0] != 7
    without = {n: t[:, keep] if n != "pixel_values" else t for n, t in first.items()}
    # The window counts places, so it would tell the two prompts apart.
    model.config.vlm_config.text_config.sliding_window = 4096
    part = {name: tensor[:1] for name, tensor in draw.items()}
    close(velocity(model, first, part), velocity(model, without, part).numpy())


def test_embedding_of_unused_history_slots_is_not_read(model, prompt, draw):
    plain = velocity(model, prompt, draw)
    with torch.no_grad():
        model.language_model.embed_tokens.weight[7] += 5.0
    assert torch.equal(plain, velocity(model, prompt, draw))


# Sizes, parts and options


def released_config(*, use_lm_head: bool) -> DM05Config:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "query_pre_attn_scalar": 256,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "vision_use_head": False,
    }
    vlm = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=256)
    action = Gemma3TextConfig(**{**text, "hidden_size": 1024, "intermediate_size": 4096})
    return DM05Config(vlm, action, use_lm_head=use_lm_head)


@pytest.mark.parametrize(("use_lm_head", "count"), [(False, 5_157_859_728), (True, 5_829_112_208)])
def test_released_size_has_the_released_number_of_parameters(use_lm_head, count):
    with torch.device("meta"):
        model = DM05ForConditionalGeneration(released_config(use_lm_head=use_lm_head))
    assert sum(p.numel() for p in model.parameters()) == count
    assert model.parameter_summary()["total"] == count
    assert len(model.fsdp_wrap_modules()) == 25
    assert model.fsdp_wrap_modules()[1:] == list(model.language_model.layers)[10:]


def test_parameter_summary_counts_the_trainable_part(model):
    summary = model.parameter_summary(only_trainable=True)
    assert summary["total"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert set(summary) == {
        "vlm", "action_expert", "action_in_proj", "action_out_proj", "time_mlp_in",
        "time_mlp_out", "total",
    }  # fmt: skip


def test_fsdp_units_are_the_expert_and_every_layer_of_a_shallow_model(model):
    assert model.fsdp_wrap_modules() == [model.model.action_expert, *model.language_model.layers]


@pytest.mark.parametrize(
    ("field", "value"), [("num_key_value_heads", 1), ("query_pre_attn_scalar", 1), ("head_dim", 16)]
)
def test_expert_that_does_not_fit_the_text_model_is_refused(config, field, value):
    other = copy.deepcopy(config)
    setattr(other.action_config, field, value)
    with pytest.raises(CheckpointError, match=f"{field}: {value}"):
        DM05ForConditionalGeneration(other)


def test_backends_are_set_at_all_three_sites(model):
    chosen = model.set_attention_implementation(
        llm_attn_implementation="sdpa",
        vision_attn_implementation="eager",
        action_attn_implementation="flex_attention",
        bf16=True,
        training=False,
    )
    assert chosen == {"llm": "sdpa", "vision": "eager", "action": "flex_attention"}
    assert model.model.llm_backend == "sdpa"
    assert model.visual.config._attn_implementation == "eager"
    assert model.model.action_expert.attention_backend == "flex_attention"


def test_precision_policy_reaches_every_part(model):
    model.set_precision_policy("fp32_mixed")
    parts = (model, model.config, model.model, model.model.action_expert)
    assert {part.precision_policy for part in parts} == {"fp32_mixed"}
    with pytest.raises(ConfigError, match="bf16_mixed, fp32_mixed"):
        model.set_precision_policy("fp8")


def test_forward_without_actions_is_refused(model, prompt):
    with pytest.raises(ValueError, match="`action`"):
        model(**prompt)


def test_generator_fixes_the_sample(model, prompt):
    samples = [
        model.inference_action(
            **prompt, diffusion_steps=2, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (1, 1, 2)
    ]
    assert samples[0].shape == (2, 5, 32)
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])
