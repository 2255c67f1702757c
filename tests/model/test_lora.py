"""Adapters in a model and in files; PEFT's own loader is the reference. About 6 s."""

import hashlib
import json
import logging
import shutil

import pytest
import torch
from accelerate import init_empty_weights
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from test_dm05_arch import released_config

from opendm.cli import main
from opendm.errors import CheckpointError, ConfigError
from opendm.model.dm05 import checkpoint_files, lora
from opendm.model.dm05.adapter_folder import find_base, is_adapter, weights_hash
from opendm.model.dm05.checkpoint_files import released_name
from opendm.model.dm05.config import DM05ModelConfig
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.dm05_lora import (
    DM05LoraConfig,
    apply_lora_to_dm05_model,
    load_dm05_model_for_inference,
    unwrap_dm05_model,
)
from opendm.model.dm05.lora_merge import merge_adapter
from opendm.model.dm05.lora_targets import resolve
from opendm.model.dm05.tiny import random_model, tiny_config
from opendm.optimizer.selection import is_default_muon_parameter, mark_muon_parameters

SMALL = DM05LoraConfig(r=4, lora_alpha=6)
MODULATOR = "model.action_expert.input_time_modulators.0"


def plain():
    return random_model(tiny_config(64, chunk_size=4, num_layers=2, hidden_size=32))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    plain().save_pretrained(folder, dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(13, 64, (2, 24), generator=generator)
    ids[:, 2:18] = 12
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == 12).long(),
        "pixel_values": torch.randn(2, 3, 112, 112, generator=generator),
        "action": torch.randn(2, 4, 32, generator=generator),
        "sample_seed": torch.arange(2),
    }


def adapted(base, config=SMALL, dtype=None, **changes):
    model = DM05ForConditionalGeneration.from_pretrained(base, dtype=dtype)
    return apply_lora_to_dm05_model(model, config, base, **changes)


def disturb(model):
    """Values that an adapter may have after training, the same on every call."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in model.adapter.names:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def trained(base):
    return disturb(adapted(base)).eval()


@pytest.fixture(scope="module")
def adapter(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    trained.save_pretrained(folder)
    return folder


def loss(model, batch):
    with torch.no_grad():
        return model(**batch)["loss"]


def test_the_released_size_has_the_published_number_of_elements(caplog, tmp_path):
    caplog.set_level(logging.INFO)
    with init_empty_weights(include_buffers=False):
        model = DM05ForConditionalGeneration(released_config(use_lm_head=True))
    (tmp_path / "config.json").touch()
    apply_lora_to_dm05_model(model, DM05LoraConfig(), tmp_path, base_sha256="")
    assert lora.element_counts(model) == (324_281_376, 1_523_712)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trainable == 324_281_376 - 1_523_712
    assert "324,281,376 elements" in caplog.text
    assert "1,523,712 of them" in caplog.text


def test_a_new_adapter_changes_nothing(base, batch):
    assert torch.equal(loss(adapted(base), batch), loss(plain().eval(), batch))


def test_first_values_depend_on_the_seed_alone(base):
    states = []
    for disturbance, seed in ((1, 0), (2, 0), (1, 7)):
        torch.manual_seed(disturbance)
        states.append(
            {n: p for n, p in adapted(base, seed=seed).named_parameters() if "lora_" in n}
        )
    first, again, other = states
    assert all(torch.equal(first[name], again[name]) for name in first)
    factors = [name for name in first if "lora_A" in name]
    assert not any(torch.equal(first[name], other[name]) for name in factors)
    assert all(first[name].std() > 0 for name in factors)


def test_a_bfloat16_base_stays_as_it_is_under_float32_adapters(base):
    before = DM05ForConditionalGeneration.from_pretrained(base, dtype=torch.bfloat16).state_dict()
    model = adapted(base, dtype=torch.bfloat16)
    kinds = {(name in model.adapter.names, p.dtype) for name, p in model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    weights = {n.replace(".base_layer", "").replace(".original_module", ""): p
               for n, p in model.named_parameters() if n not in model.adapter.names}  # fmt: skip
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_every_trainable_weight_gets_a_gradient_and_no_other_adapter_could(base, batch):
    model = disturb(adapted(base))
    for name in model.adapter.unread:
        model.get_parameter(name).requires_grad_(True)
    model(**batch)["loss"].backward()
    without = {n for n in model.adapter.names if model.get_parameter(n).grad is None}
    assert without == model.adapter.unread
    assert without


@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
def test_peft_loads_the_folder_and_computes_the_same(bias, base, batch, tmp_path):
    model = disturb(adapted(base, DM05LoraConfig(r=4, bias=bias))).eval()
    model.save_pretrained(tmp_path)
    reference = PeftModel.from_pretrained(plain().eval(), tmp_path)
    assert torch.equal(loss(model, batch), reference(**batch)["loss"])
    merged = load_dm05_model_for_inference(tmp_path)
    torch.testing.assert_close(loss(merged, batch), loss(model, batch), atol=1e-5, rtol=0)


def test_a_written_adapter_goes_on_bit_for_bit(base, adapter, trained):
    model = adapted(base, seed=9)
    lora.load_adapter(model, adapter)
    flags = DM05ModelConfig(str(base), lora_config=SMALL, bf16=False)
    resumed = flags.build_model(use_lora=True, read_from=adapter, lora_seed=9)
    for name in trained.adapter.names:
        assert torch.equal(model.get_parameter(name), trained.get_parameter(name))
        assert torch.equal(resumed.get_parameter(name), trained.get_parameter(name))


# Merging


def test_merged_weights_compute_what_the_adapter_does(adapter, trained, batch, tmp_path, base):
    output = tmp_path / "merged"
    assert main(["merge", "--adapter", str(adapter), "--output", str(output)]) == 0
    merged = DM05ForConditionalGeneration.from_pretrained(output)
    inputs = {k: v for k, v in batch.items() if k not in ("action", "sample_seed")}
    noise = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
    actions = [m.inference_action(**inputs, noise=noise) for m in (merged, trained, plain().eval())]
    torch.testing.assert_close(actions[0], actions[1], atol=1e-5, rtol=0)
    assert (actions[1] - actions[2]).abs().max() > 0.01
    assert not is_adapter(output)
    assert merged.state_dict().keys() == plain().state_dict().keys()


def test_the_merged_checkpoint_has_the_dtype_of_the_base(trained, tmp_path, batch):
    half = tmp_path / "half"
    plain().save_pretrained(half, dtype=torch.bfloat16)
    model = disturb(adapted(half))
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    # rounded once, from the float32 sum
    name = "model.action_expert.layers.0.mlp.up_proj"
    layer = model.get_submodule(name)
    exact = layer.base_layer.weight.double() + 1.5 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    assert torch.equal(tensors[f"{name}.weight"], exact.float().bfloat16())


def test_a_merge_in_bfloat16_errs_as_bfloat16_itself_does(tmp_path, batch):
    """The sum is rounded once more, by at most what rounding the base had cost already."""
    half = tmp_path / "half"
    plain().save_pretrained(half, dtype=torch.bfloat16)
    model = adapted(half)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in sorted(model.adapter.names):
            if "lora_B" in name:
                parameter = model.get_parameter(name)
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    exact = load_dm05_model_for_inference(tmp_path / "adapter", dtype=torch.float32).state_dict()
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in exact.items():
        error = (merged[released_name(name)].double() - tensor.double()).abs()
        assert (error <= 2**-8 * tensor.double().abs()).all(), name
    inputs = {k: v for k, v in batch.items() if k not in ("action", "sample_seed")}
    noise = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))

    def actions(folder, dtype):
        loaded = load_dm05_model_for_inference(folder, dtype=dtype)
        return loaded.inference_action(**inputs, noise=noise.to(dtype)).float()

    wide, narrow = torch.float32, torch.bfloat16
    effect, rounding, of_base = (
        (a - b).square().mean().sqrt()
        for a, b in (
            (actions(tmp_path / "adapter", wide), actions(half, wide)),
            (actions(tmp_path / "merged", narrow), actions(tmp_path / "adapter", wide)),
            (actions(half, narrow), actions(half, wide)),
        )
    )
    print(f"effect {effect:.1e}, merged {rounding:.1e}, base {of_base:.1e}")
    assert rounding < 2 * of_base
    assert effect > of_base


def test_a_merge_on_a_full_disk_leaves_nothing(adapter, tmp_path, monkeypatch, capsys):
    def full(*_args, **_kwargs):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint_files, "save_file", full)
    words = ["merge", "--adapter", str(adapter), "--output", str(tmp_path / "merged")]
    assert main(words) == 2
    assert "No space left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_second_merge_is_refused(adapter, tmp_path, capsys):
    merge_adapter(adapter, tmp_path / "merged")
    for words, expected in (
        (["--adapter", tmp_path / "merged", "--output", tmp_path / "twice"], "is not an adapter"),
        (["--adapter", adapter, "--output", tmp_path / "merged"], "exists"),
        (["--adapter", adapter, "--base", tmp_path / "merged", "--output", tmp_path / "twice"],
         "merged already"),
    ):  # fmt: skip
        assert main(["merge", *map(str, words)]) == 2
        assert expected in capsys.readouterr().err
    assert not (tmp_path / "twice").exists()


# The base


def test_a_moved_base_is_asked_for_and_proved_by_its_hash(adapter, base, batch, trained, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "gone")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"gone.*--model-config\.lora-config\.base-model"):
        load_dm05_model_for_inference(folder)
    shutil.copytree(base, tmp_path / "moved")
    model = load_dm05_model_for_inference(folder, base=tmp_path / "moved")
    torch.testing.assert_close(loss(model, batch), loss(trained, batch), atol=1e-5, rtol=0)


def test_an_altered_base_is_refused(adapter, base, tmp_path):
    shutil.copytree(base, tmp_path / "altered")
    path = tmp_path / "altered" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is not the base of the adapter"):
        load_dm05_model_for_inference(adapter, base=tmp_path / "altered")


def test_an_adapter_is_no_base(adapter):
    with pytest.raises(CheckpointError, match="is itself an adapter"):
        find_base(adapter, adapter)


def test_the_hash_of_a_base_is_that_of_its_file(base):
    data = (base / "model.safetensors").read_bytes()
    assert weights_hash(base) == hashlib.sha256(data).hexdigest()


# What does not fit


def forget_hashes(folder):
    """As an adapter of another program, whose files nothing proves."""
    for name in ("base_model.json", "config.json"):
        (folder / name).unlink()


@pytest.mark.parametrize(
    "key",
    [
        f"base_model.model.{MODULATOR}.weight",
        "base_model.model.model.action_in_proj.bias",
        "base_model.model.model.action_expert.layers.0.mlp.up_proj.lora_B.weight",
    ],
)
def test_a_tensor_that_the_file_lacks_is_named(key, adapter, base, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors[key]
    save_file(tensors, folder / "adapter_model.safetensors")
    forget_hashes(folder)
    with pytest.raises(CheckpointError, match=f"missing {key}"):
        load_dm05_model_for_inference(folder)
    with pytest.raises(CheckpointError, match=f"missing {key}"):
        lora.load_adapter(adapted(base), folder)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"r": 8}, "has r 4 and this run asks for 8"),
        ({"lora_alpha": 8}, "--model-config.lora-config.lora-alpha"),
        ({"target_modules": "q_proj,v_proj"}, "--model-config.lora-config.target-modules"),
        ({"modules_to_save": ["action_in_proj"]}, "--model-config.lora-config.modules-to-save"),
        ({"bias": "all"}, "--model-config.lora-config.bias"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(change, expected, adapter, base):
    config = DM05LoraConfig(**({"r": 4, "lora_alpha": 6} | change))
    with pytest.raises(CheckpointError, match=expected):
        lora.load_adapter(adapted(base, config), adapter)


def test_a_model_takes_one_adapter(base):
    with pytest.raises(CheckpointError, match="carries an adapter already"):
        apply_lora_to_dm05_model(adapted(base), SMALL, base)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"target_modules": "q_porj"}, "'q_porj' fits no module; the nearest are: .*q_proj"),
        ({"modules_to_save": ["action_in"]}, "nearest are: .*action_in_proj"),
        ({"target_modules": "action_in_proj", "modules_to_save": []}, "take no adapter"),
        ({"r": 0}, "--model-config.lora-config.r 0"),
        ({"lora_dropout": 1.0}, "lora-dropout 1.0"),
        ({"bias": "some"}, "none, all, lora_only"),
    ],
)
def test_a_wrong_setting_is_named(change, expected, base):
    with pytest.raises(ConfigError, match=expected):
        adapted(base, DM05LoraConfig(**change))


@pytest.mark.parametrize(
    "alias", ["dm05_time_modulators", "dm05_action_time_modulators", "action_time_modulators"]
)
def test_an_alias_stands_for_every_time_modulator(alias):
    expected = ["final_time_modulator", *(f"{kind}_time_modulators.{i}" for kind in ("input", "mlp")
                                          for i in range(2))]  # fmt: skip
    assert resolve(plain(), "q_proj", [alias]) == (["q_proj"], sorted(expected))


def test_muon_takes_no_adapter(base):
    model = adapted(base)
    assert not [n for n, p in model.named_parameters() if is_default_muon_parameter(n, p)]
    with pytest.raises(ConfigError, match="LoRA's adapters go to AdamW"):
        mark_muon_parameters(model)


def test_the_summary_counts_and_names_what_trains(base, tmp_path):
    model = adapted(base)
    lora.write_summary(model, SMALL, tmp_path / "deep" / "summary.json")
    summary = json.loads((tmp_path / "deep" / "summary.json").read_text())
    listed = {item["name"]: item["numel"] for item in summary["trainable_parameters"]}
    assert listed == {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    assert summary["trainable_total"] == sum(listed.values())
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert summary["frozen_total"] == frozen
    assert summary["unexpected_trainable_parameters"] == []
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["summary.json"]


def test_a_summary_that_cannot_be_written_is_a_wrong_flag_and_leaves_nothing(base, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "file" / "summary.json"):
        with pytest.raises(ConfigError, match=r"--model-config\.lora-config\.dump-trainable-path"):
            lora.write_summary(adapted(base), SMALL, path)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


def test_inference_overrides_what_the_configuration_has_and_names_what_it_lacks(adapter, caplog):
    model = load_dm05_model_for_inference(adapter, {"chunk_size": 3, "chunk": 5})
    assert model.config.chunk_size == 3
    assert "no 'chunk'" in caplog.text
    assert unwrap_dm05_model(torch.nn.Sequential(model)) is model
