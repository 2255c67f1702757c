"""What a resume needs beside the exported model: weights, optimizer, schedule, random states.

Each rank writes its own pieces (``state/state-00000.safetensors`` and so on), rank 0 writes
``state/state.json``. Any engine on any number of ranks reads them bit for bit. Nothing is pickled.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opendm.errors import CheckpointError
from opendm.optimizer.group_options import plain_options, restore_options
from opendm.optimizer.pieces import Piece, PieceReader, PieceWriter
from opendm.optimizer.placement import Locator, Placement, local
from opendm.optimizer.selection import canonical_name
from opendm.optimizer.states import check_same_names, restore_state
from opendm.trainer.random_states import capture_random_states, restore_random_states

logger = logging.getLogger(__name__)

STATE_FOLDER: Final = "state"
STATE_FILE: Final = "state.json"
STEM: Final = "state"
FORMAT: Final = 1
WEIGHT: Final = "weight"
EMA: Final = "ema"
RANDOM: Final = "random"


@runtime_checkable
class Scheduler(Protocol):
    """A schedule of torch, or accelerate's wrapper of one."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""

    def step(self) -> None:
        """Go one step on and set the rates."""


def save_train_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler,
    counters: Mapping[str, Any],
    *,
    ema: Mapping[str, Tensor] | None = None,
) -> None:
    """Write ``folder/state``. Every rank must call it; none waits for another while it writes.

    Args:
        folder: of the checkpoint.
        model: as its engine wraps it.
        optimizer: of the model's parameters.
        scheduler: of the optimizer.
        counters: what else the run counts, as JSON knows it.
        ema: averages by the name of every trainable parameter, sharded like it.

    Raises:
        CheckpointError: the state cannot be written by name, on every rank; or this rank's file
            could not be written.
    """
    groups = _named_groups(model, optimizer)
    averages = _averages(model, ema)
    writer = PieceWriter(STEM, lambda: _pieces(model, optimizer, averages))
    random_states = json.dumps(capture_random_states(), allow_nan=False)
    writer.write(folder / STATE_FOLDER, {RANDOM: random_states})
    rank, world_size = _place()
    if rank != 0:
        return
    parameters = writer.index()
    for name, param in _trainable(model):
        parameters[name]["dtype"] = str(param.dtype)
    for group, names in groups:
        for name in names:
            parameters[name]["options"] = plain_options(group)
    state = {
        "format": FORMAT,
        "world_size": world_size,
        "counters": dict(counters),
        "scheduler": _plain_schedule(scheduler),
        "parameters": parameters,
    }
    path = folder / STATE_FOLDER / STATE_FILE
    try:
        path.write_text(json.dumps(state, allow_nan=False, default=float) + "\n", encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def read_counters(folder: Path) -> dict[str, Any]:
    """What a run had counted when it wrote the state in ``folder``.

    Raises:
        CheckpointError: the state is missing or cannot be read.
    """
    return dict(_read_state(folder / STATE_FOLDER / STATE_FILE)["counters"])


def load_train_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Scheduler,
    *,
    ema: Mapping[str, Tensor] | None = None,
    keep_rates: bool = False,
) -> dict[str, Any]:
    """Restore what :func:`save_train_state` wrote, from any engine and number of ranks.

    Names, shapes and dtypes are checked before anything is changed. Random states are restored
    where the number of ranks is the saved one. Averages that were not saved start from the
    weights. Ranks do not wait for each other.

    Args:
        folder: of the checkpoint.
        model: as its engine wraps it, with the trainable parameters that were saved.
        optimizer: of the model's parameters.
        scheduler: of the optimizer.
        ema: averages to restore, by the name of every trainable parameter.
        keep_rates: keep this run's rates, options and schedule, and take only the place in it.

    Returns:
        The saved counters.

    Raises:
        CheckpointError: the state is missing, cannot be read, or is of another model.
        ConfigError: the names of parameters differ.
    """
    state = _read_state(folder / STATE_FOLDER / STATE_FILE)
    saved = state["parameters"]
    reader = PieceReader(folder / STATE_FOLDER, STEM, saved)
    placements = _checked_placements(model, reader, saved)
    groups = _named_groups(model, optimizer)
    averages = _averages(model, ema)
    rank, world_size = _place()
    same_ranks = world_size == state["world_size"]
    random_states = json.loads(reader.metadata(rank)[RANDOM]) if same_ranks else None
    for name, param in _trainable(model):
        tensors = reader.read(name, placements[name], local(param).shape)
        if tensors:
            _restore(param, optimizer, tensors, averages.get(name))
    if keep_rates:
        _take_place(scheduler, state["scheduler"])
    else:
        for group, names in groups:
            restore_options(group, saved[names[0]]["options"])
        scheduler.load_state_dict({**scheduler.state_dict(), **state["scheduler"]})
    if random_states is not None:
        restore_random_states(random_states)
    else:
        logger.info(
            "the checkpoint is of %d ranks and this run has %d: random states start anew",
            state["world_size"], world_size,
        )  # fmt: skip
    return state["counters"]


def _averages(model: nn.Module, ema: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    averages = {canonical_name(name): tensor for name, tensor in (ema or {}).items()}
    names = [name for name, _ in _trainable(model)]
    if averages and set(averages) != set(names):
        raise CheckpointError(
            f"averages of {len(averages)} parameters were given and the model trains {len(names)} "
            "of other names; average every trainable parameter"
        )
    return averages


def _pieces(
    model: nn.Module, optimizer: torch.optim.Optimizer, ema: Mapping[str, Tensor]
) -> dict[str, Piece]:
    locator = Locator(model)
    pieces = {}
    for name, param in _trainable(model):
        tensors = {WEIGHT: param.detach(), **_state_of(name, param, optimizer)}
        if name in ema:
            tensors[EMA] = ema[name]
        pieces[name] = Piece(locator.locate(name, param), tensors)
    return pieces


def _state_of(
    name: str, param: nn.Parameter, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    state = optimizer.state.get(param, {})
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.shape not in (param.shape, torch.Size()):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {key} of {name}, which is neither a number nor "
                "of the parameter's shape; only such tensors can be moved between ranks"
            )
    return state


def _checked_placements(
    model: nn.Module, reader: PieceReader, saved: Mapping[str, Any]
) -> dict[str, Placement]:
    locator = Locator(model)
    named = dict(_trainable(model))
    check_same_names(named, saved)
    placements = {name: locator.locate(name, param) for name, param in named.items()}
    for name, param in named.items():
        reader.check_shape(name, placements[name].shape)
        if saved[name]["dtype"] != str(param.dtype):
            raise CheckpointError(
                f"{name} was saved as {saved[name]['dtype']} and is stored as {param.dtype}; "
                "resume in the precision of the run"
            )
    return placements


def _restore(
    param: nn.Parameter,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    average: Tensor | None,
) -> None:
    weight = tensors.pop(WEIGHT)
    local(param.detach()).copy_(weight)
    saved_average = tensors.pop(EMA, weight)
    if average is not None:
        local(average).copy_(saved_average)
    state = optimizer.state[param]
    for key, value in tensors.items():
        if key not in state:
            state[key] = _new_state_tensor(key, value, param, optimizer)
    restore_state({key: local(value) for key, value in state.items()}, tensors, weight)


def _new_state_tensor(
    key: str, value: Tensor, param: nn.Parameter, optimizer: torch.optim.Optimizer
) -> Tensor:
    """For optimizers that make their state in the first step; where they would make it."""
    if key == "step":
        group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
        on_device = group.get("capturable") or group.get("fused")
        return torch.zeros_like(value, device=local(param).device if on_device else None)
    if value.ndim == 0:
        return torch.zeros_like(value, device=local(param).device)
    return torch.empty_like(param.detach(), dtype=value.dtype)


def _trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, param in model.named_parameters():
        if param.requires_grad:
            yield canonical_name(name), param


def _named_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[tuple[dict[str, Any], list[str]]]:
    names = {param: name for name, param in _trainable(model)}
    groups = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in names:
                raise CheckpointError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} "
                    "that is not among the model's trainable ones; make it from the wrapped model, "
                    "and reshard weights that an evaluation has gathered"
                )
        if group["params"]:
            groups.append((group, [names[param] for param in group["params"]]))
    return groups


def _plain_schedule(scheduler: Scheduler) -> dict[str, Any]:
    """Without the functions of the rate: they are the configuration's."""
    return {key: value for key, value in scheduler.state_dict().items() if key != "lr_lambdas"}


def _take_place(scheduler: Scheduler, saved: Mapping[str, Any]) -> None:
    """Go on at the saved step of this run's own schedule, which sets the rates there."""
    before = {key: saved[key] - 1 for key in ("last_epoch", "_step_count")}
    scheduler.load_state_dict({**scheduler.state_dict(), **before})
    scheduler.step()


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; give a checkpoint that was saved without "
            "--trainer-config.save-only-model"
        ) from error
    if state["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {state['format']}; this version reads {FORMAT}")
    return state


def _place() -> tuple[int, int]:
    """Rank and number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
