"""Checkpoint folders: which tensor of a file is which parameter, both ways.

Released files use ``vision_tower.vision_model.*``; transformers ≥ 5.2x dropped the inner level, so
both spellings are read and the released one is written. ``lm_head.weight`` may be there or not.
Hugging Face's own loader reports what it could not place in a log line; here it is an error.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from opendm.errors import CheckpointError
from opendm.model.dm05.configuration import DM05Config

if TYPE_CHECKING:
    from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration

logger = logging.getLogger(__name__)

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
LM_HEAD: Final = "model.vlm.lm_head.weight"
EMBEDDING: Final = "model.vlm.model.language_model.embed_tokens.weight"

_VISION: Final = "model.vlm.model.vision_tower."
_INNER: Final = re.compile(r"^(model\.vlm\.model\.vision_tower\.)vision_model\.")


def short_name(name: str) -> str:
    """A tensor's name without the inner SigLIP level."""
    return _INNER.sub(r"\1", name)


def released_name(name: str) -> str:
    """A tensor's name as released checkpoints have it."""
    return short_name(name).replace(_VISION, _VISION + "vision_model.", 1)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder.

    Raises:
        CheckpointError: the folder or its weights are missing, or the index cannot be read.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"checkpoint folder {str(folder)!r} does not exist; give a folder with config.json and "
            f"{WEIGHTS} in --model-config.model-name-or-path"
        )
    if (folder / INDEX).is_file():
        try:
            shards = json.loads((folder / INDEX).read_text())["weight_map"].values()
            files = [folder / name for name in sorted(set(shards))]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{folder / INDEX} has no readable weight_map: {error}"
            ) from error
    else:
        files = [folder / WEIGHTS]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"checkpoint file {missing[0]} does not exist; is the copy complete?")
    return files


def read_tensors(folder: Path, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a folder with their short names, cast to ``dtype``."""
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    tensor = tensors.get_tensor(name)
                    yield short_name(name), tensor if dtype is None else tensor.to(dtype)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error


def load_config(folder: "str | PathLike[str]") -> DM05Config:
    """Read ``config.json``.

    Raises:
        CheckpointError: it is missing, is not JSON, or describes another model.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        weight_files(Path(folder))
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; a checkpoint folder needs a config.json")
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not an object")
    if values.get("model_type") != DM05Config.model_type:
        raise CheckpointError(
            f"{path} has model_type {values.get('model_type')!r}; OpenDM loads 'dm05'"
        )
    return DM05Config.from_dict(values)


def skeleton(
    model_class: "type[DM05ForConditionalGeneration]", config: DM05Config, dtype: torch.dtype | None
) -> "DM05ForConditionalGeneration":
    """The model with buffers and without weights: these are on the meta device, in ``dtype``."""
    use_portable_attention(config)
    with init_empty_weights(include_buffers=False):
        model = model_class(config)
    if dtype is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model.eval()


def load(
    model_class: "type[DM05ForConditionalGeneration]",
    folder: "str | PathLike[str]",
    *,
    config: DM05Config | None,
    dtype: torch.dtype | None,
    tensors: dict[str, Tensor] | None = None,
) -> "DM05ForConditionalGeneration":
    """Build the model without initialising it and put the folder's tensors, or these, in place."""
    config = config or load_config(folder)
    tensors = dict(read_tensors(Path(folder), dtype)) if tensors is None else tensors
    model = skeleton(model_class, config, dtype)
    head = tensors.get(LM_HEAD)
    if head is not None and not torch.equal(head, tensors.get(EMBEDDING, head)):
        logger.warning(
            "%s holds an lm_head that differs from the token embedding; each keeps its own values",
            folder,
        )
    expected = model.state_dict()
    if head is not None:
        expected.setdefault(LM_HEAD, expected[EMBEDDING])  # a head that nothing uses must fit too
    elif config.use_lm_head and EMBEDDING in tensors:
        tensors[LM_HEAD] = tensors[EMBEDDING].clone()
    _check_fit(expected, tensors, folder)
    if head is not None and not config.use_lm_head:
        model.carried_tensors[LM_HEAD] = tensors.pop(LM_HEAD)
    model.load_state_dict(tensors, assign=True, strict=True)
    return model


def use_portable_attention(config: DM05Config) -> None:
    """Instantiate with sdpa: released files record flash attention, which may not be installed.

    The backends in use are set afterwards, by ``set_attention_implementation``.
    """
    for part in (
        config,
        config.vlm_config,
        config.vlm_config.text_config,
        config.vlm_config.vision_config,
        config.action_config,
    ):
        part._attn_implementation = "sdpa"  # noqa: SLF001 - the only way before construction


def save(
    model: "DM05ForConditionalGeneration",
    folder: "str | PathLike[str]",
    *,
    state_dict: Mapping[str, Tensor] | None,
    dtype: torch.dtype | None,
) -> None:
    """Write configuration and weights; carried tensors go back into the file."""
    state = dict(model.state_dict() if state_dict is None else state_dict) | model.carried_tensors
    dtype = dtype or next(iter(state.values())).dtype
    tensors = {
        released_name(name): tensor.detach().to("cpu", dtype).contiguous().clone()
        for name, tensor in state.items()
    }
    path = write_config(model, folder, dtype)
    partial = path / f"{WEIGHTS}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod((path / "config.json").stat().st_mode & 0o777)  # safetensors leaves 0600
    os.replace(partial, path / WEIGHTS)  # noqa: PTH105 - Path.replace hides that it is atomic


def write_config(
    model: "DM05ForConditionalGeneration", folder: "str | PathLike[str]", dtype: torch.dtype
) -> Path:
    """Make ``folder`` and write ``config.json`` into it."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict()
    config |= {"architectures": ["DM05ForConditionalGeneration"], "dtype": str(dtype)[6:]}
    text = json.dumps(config, indent=2, sort_keys=True, default=str) + "\n"
    (path / "config.json").write_text(text)
    return path


def _check_fit(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], folder: "str | PathLike[str]"
) -> None:
    problems = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unknown {name}" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(found[name].shape)}, expected {list(expected[name].shape)}"
        for name in sorted(expected.keys() & found.keys())
        if found[name].shape != expected[name].shape
    ]
    if problems:
        shown = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"{folder} does not fit its config.json: {shown}{more}")
