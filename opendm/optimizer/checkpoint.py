"""A state on disk by name: every rank writes its pieces, and any number of ranks reads them.

``optimizer.json`` holds the options, every parameter's whole shape, and which file has which
elements of its state; the files are safetensors. Nothing is gathered, so no rank ever holds more
than its own part. The JSON is written last: a folder without it is not complete.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opendm.errors import CheckpointError
from opendm.optimizer.placement import Placement, is_distributed, local
from opendm.optimizer.shard_plan import Interval
from opendm.optimizer.states import NOT_OPTIONS, check_same_names, restore_state

if TYPE_CHECKING:
    from opendm.optimizer.muon_adamw import MuonAdamW

INDEX_FILE: Final = "optimizer.json"
FORMAT: Final = 1
Everyone = list[dict[str, Interval]]


def save_optimizer_state(optimizer: "MuonAdamW", folder: str | Path) -> None:
    """Write the whole state into ``folder``. Every rank must call it.

    Raises:
        CheckpointError: a shard's position is unknown, because the optimizer never saw the model.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    rank = dist.get_rank() if is_distributed() else 0
    held = {name: _interval(name, optimizer.placement(p)) for _, name, p in _named(optimizer)}
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INDEX_FILE).unlink(missing_ok=True)
    everyone = _all_gather(held)
    flat = {
        f"{name}/{key}": _flatten(local(tensor), optimizer.placement(param).dim)
        for _, name, param in _named(optimizer)
        if _writer(everyone, name, held[name]) == rank
        for key, tensor in optimizer.state[param].items()
    }
    save_file(flat, folder / _file_name(rank))
    _all_gather(held)  # every file is complete before the index names it
    if rank == 0:
        partial = folder / f".{INDEX_FILE}.partial"
        partial.write_text(json.dumps(_index(optimizer, everyone)) + "\n", encoding="utf-8")
        os.replace(partial, folder / INDEX_FILE)  # noqa: PTH105 - Path.replace hides that it is atomic
    _all_gather(held)


def load_optimizer_state(optimizer: "MuonAdamW", folder: str | Path) -> None:
    """Restore what :func:`save_optimizer_state` wrote, from any engine and number of ranks.

    Raises:
        CheckpointError: the folder is not complete, or holds another model's state.
        ConfigError: the names of parameters differ.
    """
    folder = Path(folder)
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(
            f"{folder} holds no {INDEX_FILE}; give a folder that save_optimizer_state completed"
        )
    index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    if index["format"] != FORMAT:
        raise CheckpointError(
            f"{folder / INDEX_FILE} has format {index['format']}; this version reads {FORMAT}"
        )
    check_same_names((name for _, name, _ in _named(optimizer)), index["parameters"])
    saved = {
        name: _SavedParameter(folder, name, entry) for name, entry in index["parameters"].items()
    }
    for _, name, param in _named(optimizer):
        saved[name].check_shape(optimizer.placement(param).shape)
    for group, name, param in _named(optimizer):
        placement = optimizer.placement(param)
        start, stop = _interval(name, placement)
        if stop > start:
            tensors = saved[name].read(placement, (start, stop), local(param).shape)
            state = {key: local(tensor) for key, tensor in optimizer.state[param].items()}
            restore_state(state, tensors, local(param.detach()))
        for key, value in saved[name].options.items():
            is_tensor = isinstance(group.get(key), Tensor)
            group[key] = group[key].new_tensor(value) if is_tensor else value


class _SavedParameter:
    """One parameter's entry of the index, and the files behind it."""

    def __init__(self, folder: Path, name: str, entry: dict[str, Any]) -> None:
        self._folder = folder
        self._name = name
        self._shape = tuple(entry["shape"])
        self._dim = int(entry["dim"])
        self._pieces = entry["pieces"]
        self.options = {k: tuple(v) if k == "betas" else v for k, v in entry["options"].items()}

    def check_shape(self, shape: tuple[int, ...]) -> None:
        if shape != self._shape:
            raise CheckpointError(
                f"{self._folder} holds the state of {self._name} for shape {self._shape}, and the "
                f"model has {shape}; load the state of this very model"
            )

    def read(
        self, placement: Placement, interval: Interval, shape: torch.Size
    ) -> dict[str, Tensor]:
        """The tensors of one rank's piece, in the shape in which it is held."""
        if placement.dim == self._dim:
            flat = self._read_interval(interval)
        else:
            flat = {
                key: value
                if value.ndim == 0
                else self._recut(value, placement.dim)[interval[0] : interval[1]]
                for key, value in self._read_interval((0, math.prod(self._shape))).items()
            }
        return {
            key: value if value.ndim == 0 else _unflatten(value, shape, placement.dim)
            for key, value in flat.items()
        }

    def _recut(self, flat: Tensor, dim: int) -> Tensor:
        stored = Placement(self._shape, None, self._dim).stored_shape
        return flat.view(stored).movedim(0, self._dim).movedim(dim, 0).reshape(-1)

    def _read_interval(self, interval: Interval) -> dict[str, Tensor]:
        from safetensors import safe_open

        parts: dict[str, list[Tensor]] = {}
        for start, stop, file in self._pieces:
            first, last = max(start, interval[0]), min(stop, interval[1])
            if first >= last:
                continue
            with safe_open(self._folder / file, framework="pt") as opened:
                prefix = f"{self._name}/"
                for key in (k for k in opened.keys() if k.startswith(prefix)):  # noqa: SIM118
                    tensor = opened.get_slice(key)
                    is_scalar = not tensor.get_shape()
                    part = (
                        opened.get_tensor(key)
                        if is_scalar
                        else tensor[first - start : last - start]
                    )
                    parts.setdefault(key.removeprefix(prefix), []).append(part)
        return {key: p[0] if p[0].ndim == 0 else torch.cat(p) for key, p in parts.items()}


def _named(optimizer: "MuonAdamW") -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            yield group, name, param


def _interval(name: str, placement: Placement) -> Interval:
    if placement.interval is None:
        raise CheckpointError(
            f"which part of {name} this rank holds is not known; give MuonAdamW the sharded model "
            "instead of its parameters"
        )
    return placement.interval


def _writer(everyone: Everyone, name: str, interval: Interval) -> int | None:
    """The first rank that holds the piece; None if there is nothing to write."""
    holders = (rank for rank, held in enumerate(everyone) if held.get(name) == interval)
    return None if interval[1] == interval[0] else next(holders)


def _index(optimizer: "MuonAdamW", everyone: Everyone) -> dict[str, Any]:
    parameters = {}
    for group, name, param in _named(optimizer):
        placement = optimizer.placement(param)
        pieces = sorted({held[name] for held in everyone if name in held} - {(0, 0)})
        options = {k: v for k, v in group.items() if k not in NOT_OPTIONS}
        parameters[name] = {
            "shape": placement.shape,
            "dim": placement.dim,
            "pieces": [(*p, _file_name(_writer(everyone, name, p))) for p in pieces],
            "options": {k: float(v) if isinstance(v, Tensor) else v for k, v in options.items()},
        }
    return {"format": FORMAT, "parameters": parameters}


def _file_name(rank: int | None) -> str:
    return f"optimizer-{rank:05d}.safetensors"


def _all_gather(held: dict[str, Interval]) -> Everyone:
    """What every rank holds; also a barrier that works without knowing the device."""
    if not is_distributed():
        return [held]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    return everyone


def _flatten(piece: Tensor, dim: int) -> Tensor:
    """Elements in the order of the whole, the cut axis first."""
    return piece.movedim(dim, 0).reshape(-1).contiguous() if piece.ndim > 1 else piece.contiguous()


def _unflatten(flat: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """The inverse of :func:`_flatten` for a piece of ``shape``."""
    if len(shape) <= 1:
        return flat.view(shape)
    rest = [size for axis, size in enumerate(shape) if axis != dim]
    return flat.view(shape[dim], *rest).movedim(0, dim)
