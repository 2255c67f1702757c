"""Checkpoint folders: round trips, both spellings of names, and what is refused."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from opendm.errors import CheckpointError
from opendm.model.dm05.checkpoint_files import EMBEDDING, LM_HEAD, released_name, short_name
from opendm.model.dm05.configuration import DM05Config
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.tiny import tiny_config

WEIGHTS = "model.safetensors"
PATCH = "model.vlm.model.vision_tower.vision_model.embeddings.patch_embedding.weight"
LOGGER = "opendm.model.dm05.checkpoint_files"
load = DM05ForConditionalGeneration.from_pretrained


@pytest.fixture(scope="module")
def small(build):
    return build(tiny_config(100, chunk_size=5, num_layers=2, hidden_size=64))


@pytest.fixture
def folder(small, tmp_path):
    small.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def edit(folder):
    """Change the tensors of the saved file."""

    def change(function):
        tensors = load_file(folder / WEIGHTS)
        save_file(function(tensors), folder / WEIGHTS)

    return change


def same(state, other) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[n], other[n]) for n in state)


def test_round_trip_changes_no_bit(small, folder):
    loaded = load(folder)
    assert same(small.state_dict(), loaded.state_dict())
    assert loaded.config.to_dict()["vlm_config"] == small.config.to_dict()["vlm_config"]
    assert (loaded.config.chunk_size, loaded.config.action_dim) == (5, 32)


def test_loaded_model_computes_what_the_saved_one_does(small, folder):
    ids = torch.arange(20, 40)[None]
    noise = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    samples = [
        m.inference_action(ids, diffusion_steps=2, noise=noise) for m in (small, load(folder))
    ]
    assert torch.equal(*samples)


def test_nothing_of_a_loaded_model_is_left_on_the_meta_device(folder):
    model = load(folder)
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_loading_keeps_what_is_trainable(small, folder):
    wanted = {n for n, p in small.named_parameters() if p.requires_grad}
    assert {n for n, p in load(folder).named_parameters() if p.requires_grad} == wanted


def test_files_have_the_released_names(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", WEIGHTS]
    names = set(load_file(folder / WEIGHTS))
    vlm = "model.vlm.model"
    assert {
        PATCH,
        f"{vlm}.vision_tower.vision_model.encoder.layers.1.self_attn.out_proj.bias",
        f"{vlm}.vision_tower.vision_model.post_layernorm.weight",
        f"{vlm}.multi_modal_projector.mm_input_projection_weight",
        f"{vlm}.multi_modal_projector.mm_soft_emb_norm.weight",
        f"{vlm}.language_model.embed_tokens.weight",
        f"{vlm}.language_model.layers.1.self_attn.k_norm.weight",
        f"{vlm}.language_model.norm.weight",
        "model.action_expert.layers.1.pre_feedforward_layernorm.weight",
        "model.action_expert.norm.weight",
        "model.action_expert.input_time_modulators.1.bias",
        "model.action_expert.mlp_time_modulators.0.weight",
        "model.action_expert.final_time_modulator.weight",
        "model.action_in_proj.weight",
        "model.action_out_proj.bias",
        "model.time_mlp_in.weight",
        "model.time_mlp_out.bias",
    } <= names
    assert not {n for n in names if "vision_tower" in n and "vision_tower.vision_model." not in n}
    assert LM_HEAD not in names


def test_config_file_says_what_the_released_one_does(folder):
    values = json.loads((folder / "config.json").read_text())
    assert values["model_type"] == "dm05"
    assert values["architectures"] == ["DM05ForConditionalGeneration"]
    assert values["dtype"] == "float32"
    assert values["action_dim"] == 32
    assert values["chunk_size"] == 5
    assert values["precision_policy"] == "bf16_mixed"


def test_names_map_back_and_forth():
    assert released_name(short_name(PATCH)) == released_name(PATCH) == PATCH
    assert short_name(PATCH) == PATCH.replace("vision_model.", "")
    assert released_name(EMBEDDING) == short_name(EMBEDDING) == EMBEDDING


def test_file_without_the_inner_vision_level_loads(small, folder, edit):
    edit(lambda tensors: {short_name(n): t for n, t in tensors.items()})
    assert same(small.state_dict(), load(folder).state_dict())


def test_weights_load_in_the_dtype_asked_for(folder):
    assert {p.dtype for p in load(folder, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


def test_weights_save_in_the_dtype_asked_for(small, tmp_path):
    small.save_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / WEIGHTS).values()} == {torch.bfloat16}
    assert {p.dtype for p in load(tmp_path).parameters()} == {torch.bfloat16}


def test_given_state_dict_is_what_is_saved(small, tmp_path):
    state = {name: tensor + 1 for name, tensor in small.state_dict().items()}
    small.save_pretrained(tmp_path, state_dict=state)
    assert same(state, load(tmp_path).state_dict())


def test_sharded_folder_loads(small, folder):
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same(small.state_dict(), load(folder).state_dict())


def test_hugging_face_auto_classes_know_the_model(small, folder):
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config, DM05Config)
    assert config.vlm_config.text_config.num_hidden_layers == 2
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, DM05ForConditionalGeneration)
    assert same(small.state_dict(), model.state_dict())


def test_recorded_flash_attention_does_not_hinder_loading(folder):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["vlm_config"]["vision_config"]["_attn_implementation"] = "flash_attention_2"
    values["vlm_config"]["vision_config"]["attn_implementation"] = "flash_attention_2"
    path.write_text(json.dumps(values))
    assert load(folder).visual.config._attn_implementation == "sdpa"


# The vocabulary head


@pytest.fixture
def head(small, edit):
    """A stored head with values of its own."""
    shape = small.state_dict()[EMBEDDING].shape
    head = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    edit(lambda tensors: tensors | {LM_HEAD: head})
    return head


def test_head_that_nothing_uses_is_carried_bit_for_bit(folder, head, tmp_path):
    model = load(folder)
    assert model.lm_head is None
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(load_file(tmp_path / "again" / WEIGHTS)[LM_HEAD], head)


def test_head_in_use_keeps_the_stored_values(small, folder, head):
    config = DM05Config.from_pretrained(folder)
    config.use_lm_head = True
    model = load(folder, config=config)
    assert torch.equal(model.lm_head.weight, head)
    assert torch.equal(model.state_dict()[EMBEDDING], small.state_dict()[EMBEDDING])


def test_head_in_use_survives_a_round_trip(folder, head, tmp_path):
    config = DM05Config.from_pretrained(folder)
    config.use_lm_head = True
    load(folder, config=config).save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert torch.equal(again.lm_head.weight, head)


def test_head_in_use_starts_as_the_embedding_where_none_is_stored(folder):
    config = DM05Config.from_pretrained(folder)
    config.use_lm_head = True
    model = load(folder, config=config)
    assert torch.equal(model.lm_head.weight, model.state_dict()[EMBEDDING])
    assert model.lm_head.weight.data_ptr() != model.state_dict()[EMBEDDING].data_ptr()


def test_differing_head_warns_once_and_leaves_the_embedding_alone(small, folder, head, caplog):
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        model = load(folder)
    assert [record.name for record in caplog.records].count(LOGGER) == 1
    assert torch.equal(model.state_dict()[EMBEDDING], small.state_dict()[EMBEDDING])


def test_equal_head_does_not_warn(folder, edit, caplog):
    edit(lambda tensors: tensors | {LM_HEAD: tensors[EMBEDDING].clone()})
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        load(folder)
    assert not caplog.records


# What is refused


def refused(folder, *words, **options):
    with pytest.raises(CheckpointError) as error:
        load(folder, **options)
    for word in words:
        assert word in str(error.value)


def test_unknown_tensor_is_refused(folder, edit):
    edit(lambda tensors: tensors | {"model.extra.weight": torch.zeros(1)})
    refused(folder, "unknown model.extra.weight")


def test_missing_tensor_is_refused(folder, edit):
    edit(lambda tensors: {n: t for n, t in tensors.items() if n != PATCH})
    refused(folder, f"missing {short_name(PATCH)}")


def test_wrong_shape_is_refused(folder, edit):
    edit(lambda tensors: tensors | {"model.time_mlp_in.bias": torch.zeros(3)})
    refused(folder, "model.time_mlp_in.bias has shape [3], expected [64]")


def test_wrong_shape_of_a_carried_head_is_refused(folder, edit):
    edit(lambda tensors: tensors | {LM_HEAD: torch.zeros(3, 64)})
    refused(folder, f"{LM_HEAD} has shape [3, 64], expected [100, 64]")


def test_missing_embedding_is_refused_where_the_head_would_start_from_it(folder, edit):
    edit(lambda tensors: {n: t for n, t in tensors.items() if n != EMBEDDING})
    config = DM05Config.from_pretrained(folder)
    config.use_lm_head = True
    refused(folder, f"missing {EMBEDDING}", config=config)


def test_missing_folder_is_refused(tmp_path):
    refused(tmp_path / "nowhere", "nowhere", "does not exist")


def test_missing_config_is_refused(folder):
    (folder / "config.json").unlink()
    refused(folder, "config.json", "does not exist")


def test_broken_config_is_refused(folder):
    (folder / "config.json").write_text("{")
    refused(folder, "config.json is not JSON")


def test_another_model_is_refused(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    refused(folder, "'gemma3'", "'dm05'")


def test_missing_weights_are_refused(folder):
    (folder / WEIGHTS).unlink()
    refused(folder, WEIGHTS, "does not exist")


@pytest.mark.parametrize("keep", [0, 5, 100, -10])
def test_truncated_weights_are_refused(folder, keep):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:keep])
    refused(folder, WEIGHTS, "not a readable safetensors file")


def test_missing_shard_is_refused(folder):
    index = {"weight_map": {EMBEDDING: "model-00001-of-00001.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    refused(folder, "model-00001-of-00001.safetensors", "does not exist")


@pytest.mark.parametrize("content", ["{", "{}"])
def test_broken_index_is_refused(folder, content):
    (folder / f"{WEIGHTS}.index.json").write_text(content)
    refused(folder, f"{WEIGHTS}.index.json")


def test_every_misfit_is_counted_in_one_error(folder, edit):
    edit(lambda tensors: tensors | {f"extra.{i}": torch.zeros(1) for i in range(8)})
    refused(folder, "unknown extra.0", "and 3 more")
