"""Low-rank adapters in a DM0.5 model (Hu et al. 2022, arXiv:2106.09685), by PEFT's layers.

The layers go into the model itself, so that it keeps its class, its methods and its FSDP units.
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from opendm.errors import CheckpointError, ConfigError
from opendm.model.dm05.adapter_folder import (
    BASE_KEY,
    MODEL_CONFIG,
    Adapter,
    BaseRecord,
    file_hash,
    read_adapter_config,
    weights_hash,
)
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.lora_files import read_adapter
from opendm.model.dm05.lora_targets import resolve

if TYPE_CHECKING:
    from peft import LoraConfig

    from opendm.model.dm05.dm05_lora import DM05LoraConfig

logger = logging.getLogger(__name__)

FACTORS: Final = ("lora_A", "lora_B")
REPLACED: Final = ".original_module."
KAIMING_SLOPE: Final = 5**0.5
"""PEFT's and torch's choice for the first factor; the second starts at zero."""


def add_adapter(
    model: DM05ForConditionalGeneration,
    lora_config: "DM05LoraConfig",
    base: "str | PathLike[str]",
    *,
    seed: int = 0,
    base_sha256: str | None = None,
) -> DM05ForConditionalGeneration:
    """Freeze ``model`` and put adapters into it, in float32.

    Args:
        model: without an adapter; its weights may be on the meta device.
        lora_config: targets and sizes.
        base: where the model's weights come from.
        seed: of the first values; the same seed gives the same adapter on every rank and run.
        base_sha256: ``weights_hash`` of the base, where it is known already.

    Returns:
        The same model.

    Raises:
        ConfigError: a target fits no module.
        CheckpointError: the model carries an adapter already, or the base cannot be read.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if model.adapter is not None:
        raise CheckpointError("the model carries an adapter already; it takes one")
    lora_config.validate()
    targets, saved = resolve(model, lora_config.target_modules, lora_config.modules_to_save)
    unread = {id(parameter) for parameter in model.model.unread_parameters()}
    path = str(Path(base).resolve())
    peft_config = LoraConfig(
        r=lora_config.r,
        lora_alpha=lora_config.lora_alpha,
        lora_dropout=lora_config.lora_dropout,
        bias=lora_config.bias,
        target_modules=targets,
        modules_to_save=saved or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
    )
    config = _plain(peft_config)
    inject_adapter_in_model(peft_config, model, low_cpu_mem_usage=model.device.type == "meta")
    trainable = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and REPLACED not in name
    }
    for parameter in trainable.values():
        parameter.data = parameter.data.float()
    _initialise(model, seed)
    idle = _freeze_unread(model, unread, trainable)
    model.adapter = Adapter(
        config=config,
        base=BaseRecord(
            path,
            weights_hash(base) if base_sha256 is None else base_sha256,
            file_hash(Path(base) / MODEL_CONFIG),
        ),
        names=frozenset(trainable),
        unread=frozenset(idle),
    )
    logger.info("%s", describe(model))
    return model


def load_adapter(model: DM05ForConditionalGeneration, folder: Path) -> None:
    """Go on with the adapter of ``folder``, exactly as it was written.

    Raises:
        CheckpointError: it has other targets or sizes than the model's, or tensors are missing.
    """
    check_same_adapter(model, folder)
    assert model.adapter is not None
    parameters = dict(model.named_parameters())
    tensors = read_adapter(folder, {n: tuple(parameters[n].shape) for n in model.adapter.names})
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def check_same_adapter(model: DM05ForConditionalGeneration, folder: Path) -> None:
    """Check that a folder's adapter is of the kind that the model carries.

    Raises:
        CheckpointError: names what differs, and the flag.
    """
    assert model.adapter is not None
    saved, now = read_adapter_config(folder), model.adapter.config
    for key in ("r", "lora_alpha", "bias", "target_modules", "modules_to_save"):
        before, after = saved.get(key), now[key]
        if isinstance(after, list):
            before, after = sorted(before or []), sorted(after)
        if before != after:
            raise CheckpointError(
                f"the adapter {folder} has {key} {before} and this run asks for {after}; give "
                f"--model-config.lora-config.{key.replace('_', '-')} as the adapter has it"
            )


def describe(model: DM05ForConditionalGeneration) -> str:
    """The numbers of elements that an adapter has and that can learn, as one line."""
    total, idle = element_counts(model)
    return (
        f"LoRA: {total:,} elements of adapters and of modules saved in full; {idle:,} of them "
        "stand behind the last VLM layer's keys and values, where no gradient comes"
    )


def element_counts(model: DM05ForConditionalGeneration) -> tuple[int, int]:
    """Elements of the adapter, and those of them that no loss depends on."""
    assert model.adapter is not None
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return (
        sum(sizes[name] for name in model.adapter.names),
        sum(sizes[name] for name in model.adapter.unread),
    )


def write_summary(
    model: DM05ForConditionalGeneration, lora_config: "DM05LoraConfig", path: Path
) -> None:
    """Write which parameters train, as JSON; one process does, and readers see it whole.

    Raises:
        ConfigError: it cannot be written there.
    """
    text = json.dumps(summary(model, lora_config), indent=2) + "\n"
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)  # noqa: PTH105 - Path.replace hides that it is atomic
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise ConfigError(
            f"the summary {path} cannot be written: {error}; name another place in "
            "--model-config.lora-config.dump-trainable-path, or another --trainer-config.output-dir"
        ) from error


def summary(model: DM05ForConditionalGeneration, lora_config: "DM05LoraConfig") -> dict[str, Any]:
    """Counts, names and shapes of what trains."""
    assert model.adapter is not None
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    num_trainable = sum(p.numel() for p in trainable.values())
    num_frozen = sum(p.numel() for p in model.parameters()) - num_trainable
    total, idle = element_counts(model)
    return {
        "style": lora_config.style,
        "target_modules": model.adapter.config["target_modules"],
        "modules_to_save": model.adapter.config["modules_to_save"],
        "r": lora_config.r,
        "lora_alpha": lora_config.lora_alpha,
        "lora_dropout": lora_config.lora_dropout,
        "trainable_total": num_trainable,
        "frozen_total": num_frozen,
        "trainable_ratio": num_trainable / (num_trainable + num_frozen),
        "adapter_total": total,
        "adapter_without_gradient": idle,
        "trainable_parameters": [
            {"name": name, "shape": list(p.shape), "numel": p.numel()}
            for name, p in trainable.items()
        ],
        "lora_parameter_names": [name for name in trainable if "lora_" in name],
        "unexpected_trainable_parameters": sorted(trainable.keys() - model.adapter.names),
    }


def unwrap(model: nn.Module) -> DM05ForConditionalGeneration:
    """The model inside what DDP, FSDP and PEFT put around it.

    Raises:
        TypeError: there is none.
    """
    for module in model.modules():
        if isinstance(module, DM05ForConditionalGeneration):
            return module
    raise TypeError(f"{type(model).__name__} holds no DM0.5 model")


def _plain(peft_config: "LoraConfig") -> dict[str, Any]:
    """The content of the file, with names in order: PEFT holds them in sets."""
    config = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in peft_config.to_dict().items()
    }
    config = json.loads(json.dumps(config, default=str))
    return config | {"inference_mode": True, BASE_KEY: peft_config.base_model_name_or_path}


def _initialise(model: nn.Module, seed: int) -> None:
    """First values from ``seed`` alone: not from the state that a process has come to."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not any(f".{factor}." in name for factor in FACTORS) or parameter.is_meta:
            continue
        with torch.no_grad():
            if f".{FACTORS[1]}." in name:
                parameter.zero_()
            else:
                nn.init.kaiming_uniform_(parameter, a=KAIMING_SLOPE, generator=generator)


def _freeze_unread(
    model: nn.Module, unread: Iterable[int], trainable: dict[str, nn.Parameter]
) -> list[str]:
    """Freeze adapters of layers that no loss reads: DDP waits for every gradient it is promised."""
    unread = set(unread)
    layers = {
        name.removesuffix(".base_layer.weight")
        for name, parameter in model.named_parameters()
        if id(parameter) in unread and name.endswith(".base_layer.weight")
    }
    idle = [
        name
        for name, parameter in trainable.items()
        if id(parameter) in unread or name.split(".lora_")[0] in layers
    ]
    for name in idle:
        trainable[name].requires_grad_(False)  # noqa: FBT003 - torch's signature
    return idle
