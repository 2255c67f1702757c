"""Words of a registration that would stand in every prompt as special tokens are refused."""

import pytest

from opendm.dataset import register
from opendm.dataset.register import import_catalogue, register_dataset
from opendm.errors import ConfigError

GOOD = {
    "jsonl_dir": "a", "image_dir": "b", "image_keys": ["images_1", "images_2"],
    "image_prompts": ["Head", "Left wrist"], "robot_type": "My arm", "speed": "< 0.5 m/s > 0.1",
    "control_mode": "end effector",
}  # fmt: skip


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(register, "CONVERSATION_DATA", {})
    return register


@pytest.mark.parametrize("field", ["robot_type", "control_mode", "speed", "image_prompts"])
@pytest.mark.parametrize(
    "token",
    ["<image_soft_token>", "<start_of_image>", "<end_of_turn>", "<unused0>", "[multimodal]"],
)
def test_a_special_token_is_refused_with_its_field(registry, field, token):
    word = f"Left {token} wrist"
    fields = GOOD | {field: ["Head", word] if field == "image_prompts" else word}
    with pytest.raises(ConfigError) as refused:
        register_dataset({"mine": fields})
    assert f"dataset 'mine': {field} holds {token!r}" in str(refused.value)
    assert registry.CONVERSATION_DATA == {}


def test_every_special_token_of_the_tiny_tokenizer_is_one(tiny_checkpoint):
    from opendm.data.processor import load_processor

    tokens = load_processor(tiny_checkpoint).tokenizer.all_special_tokens
    assert "<start_of_image>" in tokens
    for token in tokens:
        with pytest.raises(ConfigError, match="speed holds"):
            register_dataset({"mine": GOOD | {"speed": f"fast{token}"}})


def test_plain_words_and_the_whole_catalogue_are_taken(registry, monkeypatch):
    register_dataset({"mine": GOOD})
    assert registry.CONVERSATION_DATA["mine"] == GOOD
    monkeypatch.setattr(register, "_imported", set())
    import_catalogue([])
    assert "demo" in registry.CONVERSATION_DATA
