"""Wrong bases and altered adapters are refused wherever an adapter is read. About 8 s."""

import json
import logging
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from opendm.data.processor import load_processor
from opendm.errors import CheckpointError, ConfigError
from opendm.model.dm05.checkpoint_files import load_config, weight_files
from opendm.model.dm05.config import DM05ModelConfig
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.dm05_lora import (
    DM05LoraConfig,
    apply_lora_to_dm05_model,
    load_dm05_model_for_inference,
)
from opendm.model.dm05.lora_merge import merge_adapter
from opendm.model.dm05.tiny import random_model, tiny_config

SMALL = DM05LoraConfig(r=4, lora_alpha=6)
WEIGHTS, CONFIG, NOTE = "adapter_model.safetensors", "adapter_config.json", "base_model.json"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, an adapter of it in ``adapter``, and of another run in ``other``."""
    place = tmp_path_factory.mktemp("lora")
    save_base(place / "base", seed=0)
    for name, seed in (("adapter", 0), ("other", 1)):
        save_adapter(place / name, place / "base", seed)
    return place


def save_base(folder, seed, dtype=torch.float32):
    config = tiny_config(64, chunk_size=4, num_layers=2, hidden_size=32)
    random_model(config, seed).save_pretrained(folder, dtype=dtype)


def save_adapter(folder, base, seed):
    model = DM05ForConditionalGeneration.from_pretrained(base)
    apply_lora_to_dm05_model(model, SMALL, base, seed=seed)
    with torch.no_grad():
        for name in model.adapter.names:
            model.get_parameter(name).add_(0.01)  # a new one is merged into the same base
    model.save_pretrained(folder)


def flip(name):
    """Flip one bit, in the last value."""

    def change(folder):
        data = bytearray((folder / name).read_bytes())
        data[-2] ^= 0x10
        (folder / name).write_bytes(data)

    return change


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-8])


def text(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def gone(name):
    return lambda folder: (folder / name).unlink()


def edit(name, **changes):
    def change(folder):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))

    return change


def inner(name, part, **changes):
    def change(folder):
        content = json.loads((folder / name).read_text())
        edit(name, **{part: content[part] | changes})(folder)

    return change


def tensors(edit_tensors):
    def change(folder):
        found = load_file(folder / WEIGHTS)
        edit_tensors(found)
        save_file(found, folder / WEIGHTS)

    return change


def other(name):
    return lambda folder: shutil.copy(folder.parent / "other" / name, folder / name)


def base_file(name):
    return lambda folder: shutil.copy(folder.parent / "base" / name, folder / name)


def replace_by_other(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "other", folder)


def anew(**how):
    def change(folder):
        shutil.rmtree(folder)
        save_base(folder, **how)

    return change


def merged(folder):
    """The base was replaced by what came of merging the adapter into it."""
    output = folder.parent / "merged"
    merge_adapter(folder.parent / "adapter", output, folder)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(output / name, folder / name)


FAULTS = {
    "base: one bit": ("base", flip("model.safetensors"), "is not the base"),
    "base: cut short": ("base", cut("model.safetensors"), "is not the base"),
    "base: no weights": ("base", gone("model.safetensors"), "does not exist"),
    "base: other weights": ("base", anew(seed=1), "is not the base"),
    "base: in bfloat16": ("base", anew(seed=0, dtype=torch.bfloat16), "is not the base"),
    "base: merged already": ("base", merged, "is not the base"),
    "base: other epsilon": (
        "base", inner("config.json", "action_config", rms_norm_eps=0.3), "config.json was altered",
    ),
    "base: no config": ("base", gone("config.json"), "is not a checkpoint folder"),
    "base: gone": ("base", shutil.rmtree, "if it was moved"),
    "base: an adapter": ("base", replace_by_other, "is itself an adapter"),
    "base: an adapter, too": ("base", other(CONFIG), r"base holds an adapter \(adapter_config"),
    "adapter: a full checkpoint, too": (
        "adapter", base_file("model.safetensors"), r"a full checkpoint \(model.safetensors\)",
    ),
    "adapter: a sharded checkpoint, too": (
        "adapter", text("model.safetensors.index.json", b"{}"), "either could be meant",
    ),
    "weights: one bit": ("adapter", flip(WEIGHTS), "not as it was written"),
    "weights: cut short": ("adapter", cut(WEIGHTS), "not as it was written"),
    "weights: gone": ("adapter", gone(WEIGHTS), "cannot be read"),
    "weights: one tensor less": (
        "adapter", tensors(lambda found: found.popitem()), "not as it was written",
    ),
    "weights: one tensor more": (
        "adapter", tensors(lambda found: found.update(more=torch.ones(1))),
        "not as it was written",
    ),
    "weights: of another run": ("adapter", other(WEIGHTS), "not as it was written"),
    "alpha": ("adapter", edit(CONFIG, lora_alpha=12), "not as it was written"),
    "rank": ("adapter", edit(CONFIG, r=2), "not as it was written"),
    "rank as text": ("adapter", edit(CONFIG, r="4"), "a whole number"),
    "unknown bias": ("adapter", edit(CONFIG, bias="weird"), "none, all, lora_only"),
    "targets": ("adapter", edit(CONFIG, target_modules=["q_proj"]), "not as it was written"),
    "targets of another kind": ("adapter", edit(CONFIG, target_modules=[1]), "a list of names"),
    "saved modules as text": ("adapter", edit(CONFIG, modules_to_save="x"), "a list of names"),
    "rank-stabilised scale": ("adapter", edit(CONFIG, use_rslora=True), "cannot load"),
    "base changed at the start": ("adapter", edit(CONFIG, init_lora_weights="pissa"), "pissa"),
    "an option of later versions": ("adapter", edit(CONFIG, newest={"a": 1}), "cannot load"),
    "config: a list": ("adapter", text(CONFIG, b"[]"), "peft_type"),
    "config: not UTF-8": ("adapter", text(CONFIG, b"\xff"), "cannot be read"),
    "model config: other epsilon": (
        "adapter", inner("config.json", "action_config", rms_norm_eps=0.3),
        "not as it was written",
    ),
    "model config: gone": ("adapter", gone("config.json"), "not as it was written"),
    "note: gone": ("adapter", gone(NOTE), "is the copy complete"),
    "note: a list": ("adapter", text(NOTE, b"[]"), "cannot be read"),
    "note: other hash of the base": ("adapter", edit(NOTE, sha256="0"), "is not the base"),
    "note: other hash of the weights": (
        "adapter", inner(NOTE, "files", **{WEIGHTS: "0"}), "not as it was written",
    ),
}  # fmt: skip


@pytest.fixture
def copy(place, tmp_path):
    """A copy of base and adapters that a test may damage; the adapter names the copied base."""
    folder = tmp_path / "place"
    shutil.copytree(place, folder)
    edit(CONFIG, base_model_name_or_path=str(folder / "base"))(folder / "adapter")
    return folder


def go_on(adapter):
    config = DM05ModelConfig(str(adapter), lora_config=SMALL, bf16=False)
    return config.build_model(use_lora=True)


def test_copies_that_nothing_was_done_to_are_accepted(copy):
    assert load_dm05_model_for_inference(copy / "adapter").adapter is None
    assert go_on(copy / "adapter").adapter is not None


def test_there_are_more_kinds_of_faults_than_promised():
    assert len(FAULTS) >= 20


@pytest.mark.parametrize("kind", FAULTS)
def test_a_wrong_base_or_an_altered_adapter_is_refused(kind, copy):
    where, change, expected = FAULTS[kind]
    change(copy / where)
    for read in (
        load_dm05_model_for_inference,
        go_on,
        lambda adapter: merge_adapter(adapter, copy / "output"),
    ):
        with pytest.raises(CheckpointError, match=expected) as caught:
            read(copy / "adapter")
        assert len(str(caught.value).splitlines()) == 1
    assert not (copy / "output").exists()


def test_an_adapter_of_another_program_is_read_with_one_warning(copy, caplog):
    for name in (NOTE, "config.json"):
        (copy / "adapter" / name).unlink()
    load_dm05_model_for_inference(copy / "adapter")
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "cannot be checked" in warnings[0]


def test_a_new_adapter_names_its_base_in_one_place(place, tmp_path):
    save_base(tmp_path / "B", seed=1)
    lora = DM05LoraConfig(r=4, lora_alpha=6, base_model=str(tmp_path / "B"))
    config = DM05ModelConfig(str(place / "base"), lora_config=lora)
    for start in (
        lambda: config.checked_base_hash(None),
        lambda: config.build_model(use_lora=True),
    ):
        with pytest.raises(ConfigError, match=r"lora-config\.base-model .*B says where"):
            start()


def test_a_base_that_is_not_there_is_named_by_its_flag(place):
    base, gone = str(place / "base"), str(place / "gone")
    for given, moved_to, expected in (
        (base, gone, f"lora-config.base-model '{gone}' is not a checkpoint folder"),
        (gone, None, "was moved, say where it is: --model-config.lora-config.base-model"),
    ):
        config = DM05ModelConfig(given, lora_config=DM05LoraConfig(base_model=moved_to))
        with pytest.raises(CheckpointError, match=re.escape(expected)):
            config.validate(use_lora=True)
    DM05ModelConfig(gone, lora_config=DM05LoraConfig(base_model=base)).validate(use_lora=True)


def test_a_full_checkpoint_has_no_base(place):
    with pytest.raises(ConfigError, match="is a full checkpoint, which has no base"):
        load_dm05_model_for_inference(place / "base", base=place / "base")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"7", b'"dm05"', b"{"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_broken_json_file_of_a_checkpoint_is_named(name, content, copy):
    (copy / "base" / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_config(copy / "base") if name == "config.json" else weight_files(copy / "base")


def without(name, content=None):
    def change(folder):
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_text(content)

    return change


@pytest.mark.parametrize(
    "change",
    [
        without("chat_template.jinja"), without("tokenizer_config.json", "[]"),
        without("tokenizer.json", "x"), without("processor_config.json", "{}"),
    ],
)  # fmt: skip
def test_a_broken_processor_is_one_line_that_says_what_it_needs(change, tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "tiny")
    change(folder)
    with pytest.raises(CheckpointError, match=r"no usable processor .* chat_template\.jinja$"):
        load_processor(folder)
