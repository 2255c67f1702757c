"""The processor of a checkpoint: tokenizer, chat template and image preparation."""

from pathlib import Path
from typing import Any, Final

from transformers import AutoProcessor

from opendm.constants.robot import (
    HISTORY_PAD_TOKEN,
    HISTORY_PAD_TOKEN_ID,
    HISTORY_TOKEN,
    HISTORY_TOKEN_ID,
)
from opendm.errors import CheckpointError, ConfigError

EXPECTED_IDS: Final = {
    "pad": 0, "eos": 1, "bos": 2, "unk": 3,
    HISTORY_TOKEN: HISTORY_TOKEN_ID, HISTORY_PAD_TOKEN: HISTORY_PAD_TOKEN_ID,
}  # fmt: skip
"""Ids that the model relies on."""


def load_processor(path: "str | Path") -> Any:
    """The processor of a checkpoint folder; nothing is downloaded.

    Raises:
        CheckpointError: the folder is missing or has no processor.
        ConfigError: its tokenizer has other reserved ids.
    """
    if not Path(path).is_dir():
        raise CheckpointError(f"checkpoint folder {str(path)!r} does not exist; check the path")
    try:
        processor = AutoProcessor.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise _unusable(path, f"{type(error).__name__}: {error}") from error
    if not processor.chat_template:
        raise _unusable(path, "no chat template")
    check_reserved_ids(processor, str(path))
    return processor


def _unusable(path: "str | Path", why: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint folder {str(path)!r} has no usable processor ({why}); it needs "
        "processor_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja"
    )


def check_reserved_ids(processor: Any, where: str) -> None:
    """Refuse a tokenizer whose reserved ids are not those of the released models.

    Raises:
        ConfigError: an id differs; the message has all of them.
    """
    tokenizer = processor.tokenizer
    found = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos", "bos", "unk")}
    for token in (HISTORY_TOKEN, HISTORY_PAD_TOKEN):
        found[token] = tokenizer.convert_tokens_to_ids(token)
    if found != EXPECTED_IDS:
        raise ConfigError(
            f"the tokenizer of {where!r} has the ids {found}; the model expects {EXPECTED_IDS}; "
            "use the checkpoint's own tokenizer files"
        )


def image_size(processor: Any) -> int:
    """Side in pixels of the square pictures that the checkpoint sees."""
    return int(processor.image_processor.size["height"])
