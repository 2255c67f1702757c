"""An adapter and its base as one model: in memory for inference, or as a plain checkpoint."""

import logging
import shutil
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from opendm.errors import CheckpointError, ConfigError
from opendm.model.dm05 import checkpoint_files
from opendm.model.dm05.adapter_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE_FILE,
    check_base,
    find_base,
    is_adapter,
)
from opendm.model.dm05.configuration import DM05Config
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.lora_files import merged_tensors

logger = logging.getLogger(__name__)

OF_THE_ADAPTER: Final = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_FILE, "config.json", "manifest.json")


def load_for_inference(
    path: "str | PathLike[str]",
    config_overrides: dict[str, Any] | None = None,
    *,
    base: "str | PathLike[str] | None" = None,
    dtype: torch.dtype | None = None,
    **_kwargs: Any,
) -> DM05ForConditionalGeneration:
    """A full checkpoint, or an adapter merged into its base.

    Args:
        path: folder of either.
        config_overrides: values of the configuration to replace; an unknown one is left out, with
            a warning.
        base: where the adapter's base is, if it was moved.
        dtype: of the weights; the file's when absent.

    Raises:
        CheckpointError: something is missing or does not fit; or the base is another one than the
            adapter was trained on.
        ConfigError: ``base`` is given for a full checkpoint.
    """
    folder = Path(path)
    if not is_adapter(folder):
        if base is not None:
            raise ConfigError(
                f"{folder} is a full checkpoint, which has no base; leave the base {base} out"
            )
        config = _config(folder, config_overrides)
        return DM05ForConditionalGeneration.from_pretrained(folder, config=config, dtype=dtype)
    source = find_base(folder, base)
    check_base(folder, source)
    config = _config(config_folder(folder, source), config_overrides)
    tensors = dict(merged_tensors(folder, source, dtype))
    return checkpoint_files.load(
        DM05ForConditionalGeneration, folder, config=config, dtype=dtype, tensors=tensors
    )


def config_folder(folder: Path, base: "str | PathLike[str] | None" = None) -> Path:
    """Where the model's ``config.json`` lies: an adapter of another program has none of its own.

    Raises:
        CheckpointError: it has none and its base is not where it was.
    """
    has_none = is_adapter(folder) and not (folder / "config.json").is_file()
    return find_base(folder, base) if has_none else folder


def merge_adapter(adapter: Path, output: Path, base: "str | PathLike[str] | None" = None) -> None:
    """Write an adapter and its base as a plain checkpoint in the base's dtype.

    Args:
        adapter: folder of the adapter.
        output: folder to make.
        base: where the adapter's base is, if it was moved.

    Raises:
        CheckpointError: as of ``load_for_inference``; or ``output`` exists, or ``adapter`` is no
            adapter, such as a merged one.
    """
    if not is_adapter(adapter):
        raise CheckpointError(
            f"{adapter} is not an adapter (no {ADAPTER_CONFIG} there); a full checkpoint, as one "
            "that was merged already, is used as it is"
        )
    if output.exists():
        raise CheckpointError(f"{output} exists; give --output a folder that does not")
    model = load_for_inference(adapter, base=base)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial, dtype=model.dtype)
        for file in sorted(path for path in adapter.iterdir() if path.is_file()):
            if file.name not in OF_THE_ADAPTER:
                shutil.copyfile(file, partial / file.name)
        partial.rename(output)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{output} could not be written: {error}") from error


def _config(folder: Path, overrides: dict[str, Any] | None) -> DM05Config:
    config = checkpoint_files.load_config(folder)
    known = config.to_dict()
    for key, value in (overrides or {}).items():
        if key in known:
            setattr(config, key, value)
        else:
            logger.warning("the configuration has no %r; it is left out", key)
    return config
