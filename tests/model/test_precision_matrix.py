"""What the two precision policies load, compute in and write, and what each of them buys."""

import copy
import json

import pytest
import torch
from precision_measures import CASES, unmoved_by_storage, velocity_errors
from safetensors import safe_open
from transformers.utils.import_utils import enable_tf32

from opendm.constants.robot import HISTORY_PAD_TOKEN_ID
from opendm.model.dm05.config import DM05ModelConfig
from opendm.model.dm05.precision import (
    conditioning_linear,
    configure_fp32_precision_runtime,
    dm05_autocast,
    inference_autocast,
    linear_fp32,
)
from opendm.trainer.engine import Engine, gather_weights

CPU = torch.device("cpu")
POLICIES = ("bf16_mixed", "fp32_mixed")


@pytest.fixture
def tf32_switches():
    """Torch's switches as they were, after the test."""
    backends = torch.backends
    switches = (backends, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [switch.fp32_precision for switch in switches]
    yield switches
    for switch, value in zip(switches, before, strict=True):
        switch.fp32_precision = value


def half(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16)


# Loading and writing


@pytest.mark.parametrize(
    ("policy", "bf16", "dtype"),
    [
        ("bf16_mixed", True, torch.bfloat16),
        ("bf16_mixed", False, torch.float32),
        ("fp32_mixed", True, torch.float32),
    ],
)
def test_loaded_and_exported_weights_have_the_documented_dtype(
    policy, bf16, dtype, tiny_checkpoint, tmp_path, tf32_switches
):
    config = DM05ModelConfig(
        model_name_or_path=str(tiny_checkpoint), precision_policy=policy, bf16=bf16
    )
    model = config.build_model()
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {torch.float32}
    parts = (model, model.config, model.model, model.model.action_expert)
    assert {part.precision_policy for part in parts} == {policy}

    trained = Engine("single", CPU, torch.bfloat16).wrap(model, [])
    assert {p.dtype for p in trained.parameters() if p.requires_grad} == {torch.float32}
    weights = gather_weights(trained, keep=True)
    model.save_pretrained(tmp_path, state_dict=weights, dtype=getattr(torch, config.export_dtype))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["dtype"], written["precision_policy"]) == (str(dtype)[6:], policy)


def test_a_run_without_autocast_computes_with_frozen_bfloat16_weights(model, batch, draw):
    """Weights loaded in bfloat16, all products in float32: the frozen table stays bfloat16."""
    model = model.to(torch.bfloat16)
    model.freeze_vlm_embedding()
    rounded = copy.deepcopy(model).float()
    wrapped = Engine("single", CPU, None).wrap(model, [])
    assert model.language_model.embed_tokens.weight.dtype == torch.bfloat16
    assert torch.equal(wrapped(**batch, **draw).loss, rounded(**batch, **draw).loss)


@pytest.mark.parametrize("frozen", [True, False])
def test_text_embeds_in_training_as_the_exported_weights_will(model, batch, frozen):
    """A scale like sqrt(2560) is no bfloat16 number: rounded on one side only, it would differ."""
    model.language_model.embed_tokens.embed_scale.fill_(2560**0.5)
    exported = copy.deepcopy(model)
    for parameter in exported.parameters():  # and not the buffers, as loading does
        parameter.data = parameter.data.bfloat16()
    trained = copy.deepcopy(exported)
    if frozen:
        trained.freeze_vlm_embedding()
    trained = Engine("single", CPU, torch.bfloat16).wrap(trained, [])
    with dm05_autocast(CPU):
        embedded = trained.model.embed_prefix(batch["input_ids"], None)
    is_read = batch["input_ids"] != HISTORY_PAD_TOKEN_ID
    expected = exported.embed_language_tokens(batch["input_ids"])
    assert embedded.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(embedded[is_read], expected[is_read])


# Computing


def test_linear_fp32_is_blind_to_autocast_and_exact_on_half_precision_inputs():
    linear, x = torch.nn.Linear(8, 6).bfloat16(), half(3, 8)
    outside = linear_fp32(x, linear)
    with dm05_autocast(CPU):
        inside = linear_fp32(x, linear)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, outside)
    exact = x.double() @ linear.weight.double().T + linear.bias.double()
    torch.testing.assert_close(inside.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_time_condition_of_fp32_mixed_is_blind_to_autocast(model, weights):
    model.set_precision_policy("fp32_mixed")
    model = model.to(weights)
    time = torch.tensor([0.001, 0.5])
    outside = model.model.time_condition(time)
    with dm05_autocast(CPU):
        inside = model.model.time_condition(time)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, outside)


@pytest.mark.parametrize(
    ("weights", "autocast", "expected"),
    [
        (torch.float32, True, torch.bfloat16),
        (torch.bfloat16, True, torch.bfloat16),
        (torch.float32, False, torch.float32),
        (torch.bfloat16, False, torch.bfloat16),
    ],
)
def test_conditioning_of_bf16_mixed_follows_weights_and_autocast(weights, autocast, expected):
    linear = torch.nn.Linear(8, 6).to(weights)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        assert conditioning_linear(half(3, 8), linear, "bf16_mixed").dtype == expected


def test_fp32_mixed_mixes_noise_and_actions_in_float32(model, batch, draw):
    """An action that arrives in bfloat16 is widened before noise is added to it."""
    model.set_precision_policy("fp32_mixed")
    rounded = {**batch, "action": batch["action"].bfloat16()}
    widened = {**batch, "action": batch["action"].bfloat16().float()}
    assert torch.equal(model(**rounded, **draw).loss, model(**widened, **draw).loss)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention"])
def test_attention_gets_queries_keys_and_values_of_one_dtype(model, prompt, draw, backend):
    """Under fp32_mixed the rotary angles are float32 and the values bfloat16."""
    from opendm.model.dm05.attention import ATTENTION

    seen, attention = [], ATTENTION[backend]

    def watch(query, key, value, mask, scale):
        seen.append({query.dtype, key.dtype, value.dtype})
        return attention(query, key, value, mask, scale)

    model.set_precision_policy("fp32_mixed")
    model.set_attention_implementation(
        llm_attn_implementation=backend, vision_attn_implementation="sdpa",
        action_attn_implementation=backend, bf16=True, training=False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, dm05_autocast(CPU):
        patch.setitem(ATTENTION, backend, watch)
        model.inference_action(**prompt, noise=draw["noise"], diffusion_steps=1)
    assert seen == [{torch.bfloat16}] * 7  # the last VLM layer stops at its keys


@pytest.mark.parametrize("policy", POLICIES)
def test_sampling_is_surrounded_by_autocast_under_fp32_mixed_alone(policy):
    with inference_autocast(CPU, policy):
        assert torch.is_autocast_enabled("cpu") == (policy == "fp32_mixed")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


# TF32


def test_fp32_mixed_turns_tf32_off_whatever_was_set_before(tf32_switches):
    enable_tf32.__wrapped__(True)  # what TrainingArguments(tf32=True) does; it remembers its calls
    for switch in tf32_switches:
        switch.fp32_precision = "tf32"  # a backend's own switch goes before the one of all
    configure_fp32_precision_runtime()
    assert {switch.fp32_precision for switch in tf32_switches} == {"ieee"}
    # torch raises here where an older switch was set beside a newer one
    assert not torch.backends.cuda.matmul.allow_tf32


# What a policy buys


def test_error_of_the_velocity_against_float64(shared_model, prompt, draw):
    errors = velocity_errors(shared_model, prompt, draw["noise"], draw["time"])
    for name, error in errors.items():
        print(f"velocity against float64, {name}: {error:.1e}")
    exact, fp32_mixed, *bf16_mixed = (errors[name] for name in CASES)
    assert exact < 1e-5
    assert fp32_mixed < 0.8 * min(bf16_mixed)
    assert max(bf16_mixed) < 2e-2


def test_a_small_step_moves_every_float32_weight_and_few_bfloat16_ones(shared_model, batch, draw):
    fractions = unmoved_by_storage(shared_model, batch | draw, lr=2.5e-5)
    for name, fraction in fractions.items():
        print(f"weights that lr 2.5e-5 leaves unchanged, {name}: {fraction:.1%}")
    in_bfloat16, *as_stored = fractions.values()
    assert in_bfloat16 > 0.5
    assert max(as_stored) < 1e-3
