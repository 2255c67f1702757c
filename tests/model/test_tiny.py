"""The tiny checkpoint: sizes, reserved tokens, and that it is made the same way every time."""

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor

from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.tiny import TOKENS_PER_IMAGE, build_tiny_checkpoint

PROMPTS = ("Pick up the red cube", "Open the drawer")
RESERVED_IDS = {
    "<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<unused0>": 6, "<unused1>": 7,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), PROMPTS, chunk_size=10)


@pytest.fixture(scope="module")
def model(folder):
    return DM05ForConditionalGeneration.from_pretrained(folder)


@pytest.fixture(scope="module")
def processor(folder):
    return AutoProcessor.from_pretrained(folder)


def test_tiny_model_has_a_few_million_parameters(model):
    assert 3e6 < sum(p.numel() for p in model.parameters()) < 6e6


@pytest.mark.parametrize("part", ["text", "action"])
def test_tiny_model_has_grouped_heads_and_both_kinds_of_layers(model, part):
    text = model.config.vlm_config.text_config
    config = text if part == "text" else model.config.action_config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}


def test_reserved_tokens_have_the_released_ids(processor):
    names = list(RESERVED_IDS)
    assert processor.tokenizer.convert_tokens_to_ids(names) == list(RESERVED_IDS.values())
    tokenizer = processor.tokenizer
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert (tokenizer.bos_token_id, tokenizer.unk_token_id) == (2, 3)


def test_config_agrees_with_the_tokenizer(model, processor):
    vlm = model.config.vlm_config
    assert vlm.text_config.vocab_size == len(processor.tokenizer)
    assert vlm.text_config.pad_token_id == processor.tokenizer.pad_token_id
    assert vlm.image_token_id == processor.tokenizer.image_token_id


@pytest.mark.parametrize("views", [1, 2])
def test_each_image_takes_sixteen_tokens(model, processor, views):
    image = Image.fromarray(np.full((60, 80, 3), 128, dtype=np.uint8))
    content = [{"type": "image"}] * views + [{"type": "text", "text": "Open the drawer."}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    inputs = processor(text=text, images=[image] * views, return_tensors="pt")
    ids = inputs["input_ids"]
    assert TOKENS_PER_IMAGE == 16
    assert (ids == model.config.vlm_config.image_token_id).sum() == 16 * views
    assert inputs["token_type_ids"].sum() == 16 * views
    assert inputs["pixel_values"].shape == (views, 3, 112, 112)
    sample = model.inference_action(**inputs, diffusion_steps=2)
    assert sample.shape == (1, 10, 32)


def test_text_survives_the_tokenizer(processor):
    text = "Pick up the red cube. 017 é"
    ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert processor.tokenizer.decode(ids) == text


def test_building_twice_gives_the_same_files(folder, tmp_path):
    again = build_tiny_checkpoint(tmp_path, PROMPTS, chunk_size=10)
    first, second = (load_file(path / "model.safetensors") for path in (folder, again))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    for name in ("config.json", "tokenizer.json", "processor_config.json"):
        assert (folder / name).read_bytes() == (again / name).read_bytes()


def test_another_seed_gives_other_weights(folder, tmp_path):
    other = build_tiny_checkpoint(tmp_path, PROMPTS, chunk_size=10, seed=1)
    name = "model.action_in_proj.weight"
    first, second = (load_file(path / "model.safetensors")[name] for path in (folder, other))
    assert not first.equal(second)
