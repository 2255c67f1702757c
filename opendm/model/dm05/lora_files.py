"""The weights of an adapter's file, which are PEFT's names of them, and merging them into a base.

Every tensor that the configuration calls for must be there, and no other: PEFT itself leaves a
module that a file lacks as it was, and says so in a log line.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from opendm.errors import CheckpointError
from opendm.model.dm05.adapter_folder import (
    ADAPTER_WEIGHTS,
    Adapter,
    check_own_file,
    file_hash,
    read_adapter_config,
    write_adapter_config,
    write_base_record,
)
from opendm.model.dm05.checkpoint_files import read_tensors, short_name
from opendm.model.dm05.lora_targets import matches

PREFIX: Final = "base_model.model."
DEFAULT: Final = ".default."
SAVED: Final = ".modules_to_save"
FACTOR_ENDS: Final = (".lora_A.weight", ".lora_B.weight")


def file_name(name: str) -> str:
    """What a parameter of a model with an adapter is called in the adapter's file."""
    return PREFIX + name.replace(SAVED, "").replace(DEFAULT, ".")


def write_adapter(folder: Path, adapter: Adapter, state: Mapping[str, Tensor]) -> None:
    """Write an adapter: its configuration, its weights in float32, and the note of its base.

    Args:
        folder: exists, with ``config.json``.
        adapter: of the model.
        state: the model's parameters by name; those of the adapter are taken.
    """
    write_adapter_config(folder, adapter)
    tensors = {
        file_name(name): state[name].detach().to("cpu", torch.float32).contiguous().clone()
        for name in sorted(adapter.names)
    }
    partial = folder / f"{ADAPTER_WEIGHTS}.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod((folder / "adapter_config.json").stat().st_mode & 0o777)
    os.replace(partial, folder / ADAPTER_WEIGHTS)  # noqa: PTH105 - Path.replace hides it
    write_base_record(folder, adapter)


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of a file by the names of the model's parameters.

    Args:
        folder: of the adapter.
        shapes: of every parameter of the model's adapter.

    Raises:
        CheckpointError: a tensor is missing, left over or of another shape.
    """
    found = read_file(folder)
    named = {file_name(name): name for name in shapes}
    _check_names(named.keys(), found.keys(), folder)
    for key, name in named.items():
        if tuple(found[key].shape) != shapes[name]:
            raise CheckpointError(
                f"{folder / ADAPTER_WEIGHTS}: {key} has shape {list(found[key].shape)}, expected "
                f"{list(shapes[name])}; the adapter is of another base or rank"
            )
    return {name: found[key] for key, name in named.items()}


def read_file(folder: Path) -> dict[str, Tensor]:
    """The tensors of a file as it names them, without the inner SigLIP level of older libraries.

    Raises:
        CheckpointError: it cannot be read, or was altered since it was written.
    """
    path = folder / ADAPTER_WEIGHTS
    check_own_file(folder, ADAPTER_WEIGHTS, file_hash(path))
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; is the copy complete?") from error
    return {PREFIX + short_name(name.removeprefix(PREFIX)): t for name, t in tensors.items()}


def merged_tensors(
    adapter: Path, base: Path, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``base`` with the adapter in them, by their short names.

    Args:
        adapter: folder of the adapter.
        base: folder of its base.
        dtype: of the tensors; the base's when absent. The sum itself is taken in float32.

    Raises:
        CheckpointError: a tensor of the adapter is missing or fits nothing in the base.
    """
    config = read_adapter_config(adapter)
    scale = config["lora_alpha"] / config["r"]
    found = read_file(adapter)
    base_tensors = dict(read_tensors(base, dtype))
    places = expected_places(base_tensors, config)
    _check_names(places.keys(), found.keys(), adapter)
    replaced = {name: key for key, name in places.items() if not key.endswith(FACTOR_ENDS)}
    factored = {
        name: key.removesuffix(FACTOR_ENDS[0])
        for key, name in places.items()
        if key.endswith(FACTOR_ENDS[0])
    }
    for name, tensor in base_tensors.items():
        if name in replaced:
            yield name, found[replaced[name]].to(tensor.dtype)
        elif name in factored:
            first, second = (found[factored[name] + end] for end in FACTOR_ENDS)
            yield name, merged_weight(tensor, first, second, scale)
        else:
            yield name, tensor


def merged_weight(
    weight: Float[Tensor, "o i"],
    first: Float[Tensor, "r i"],
    second: Float[Tensor, "o r"],
    scale: float,
) -> Float[Tensor, "o i"]:
    """``W + scale B A`` (arXiv:2106.09685, equation 3), rounded once to the dtype of ``W``."""
    return (weight.float() + scale * (second.float() @ first.float())).to(weight.dtype)


def expected_places(base: Mapping[str, Tensor], config: Mapping[str, object]) -> dict[str, str]:
    """Every name that an adapter's file must hold, and the base's tensor that it belongs to."""
    targets, saved = _names(config, "target_modules"), _names(config, "modules_to_save")
    places = {}
    for name, tensor in base.items():
        module, _, kind = name.rpartition(".")
        if any(matches(module, part) for part in saved):
            places[PREFIX + name] = name
            continue
        is_target = kind in ("weight", "bias") and any(matches(module, part) for part in targets)
        if is_target and kind == "weight" and tensor.ndim == 2:
            places |= {f"{PREFIX}{module}{end}": name for end in FACTOR_ENDS}
        trained = {"all": True, "lora_only": is_target}.get(str(config.get("bias")), False)
        if kind == "bias" and trained:
            key = f"{module}.base_layer.bias" if is_target else name
            places[PREFIX + key] = name
    return places


def _names(config: Mapping[str, object], key: str) -> list[str]:
    value = config.get(key) or []
    assert isinstance(value, list)
    return [str(name) for name in value]


def _check_names(expected: object, found: object, folder: Path) -> None:
    wanted, given = set(expected), set(found)  # type: ignore[call-overload]
    problems = [f"missing {name}" for name in sorted(wanted - given)]
    problems += [f"unknown {name}" for name in sorted(given - wanted)]
    if problems:
        shown = "; ".join(problems[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{folder / ADAPTER_WEIGHTS} does not fit its adapter_config.json and base: {shown}"
            f"{more}; is the copy complete?"
        )
