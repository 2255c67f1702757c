"""Where the local elements of each parameter lie in the whole, under every engine.

The one place that reads what FSDP1, FSDP2, DTensor and DDP know about a parameter. FSDP1 keeps
positions in private attributes of flat parameters; ``tests/optimizer/test_sharded.py`` reads them.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from opendm.errors import ConfigError
from opendm.optimizer.selection import SHAPE_MARK
from opendm.optimizer.shard_plan import Interval

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Placement:
    """The piece of one parameter that this rank holds."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    interval: Interval | None
    """Elements ``[start, stop)`` of the whole, flattened; None: only their number is known."""
    dim: int = 0
    """Axis that is cut; it comes first where the whole is flattened."""
    group: dist.ProcessGroup | None = None
    """Ranks that hold the other pieces or copies; None: there are no others."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The whole shape with the cut axis first."""
        rest = (size for axis, size in enumerate(self.shape) if axis != self.dim)
        return (self.shape[self.dim], *rest) if self.shape else ()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds: DTensors hide it."""
    if is_dtensor(tensor):
        return tensor.to_local()
    return tensor


def local_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient of the local part, in the parameter's own placement.

    Raises:
        ConfigError: the gradient has another size, as inside FSDP's ``no_sync``.
    """
    grad = param.grad
    if grad is None:
        return None
    if is_dtensor(param) and is_dtensor(grad):
        if grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
        return local(grad)
    if grad.shape != param.shape:
        raise ConfigError(
            "a gradient has another shape than the shard it stands at: FSDP's no_sync leaves "
            "gradients unsharded. Run the last backward pass before step() outside no_sync"
        )
    return grad


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is a DTensor; none exists before there is a process group."""
    if not is_distributed():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def is_distributed() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


class Locator:
    """Finds the placement of every parameter of a model, or of parameters without one.

    Args:
        model: the model as it is trained, or None where only parameters are known.
        process_group: where no model tells: the ranks over which marked flat shards and plain
            copies are spread.
    """

    def __init__(
        self, model: nn.Module | None, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self._process_group = process_group
        self._known: dict[int, Placement] = {}
        if model is not None and is_distributed():
            self._known.update(_ddp_placements(model))
            self._known.update(_fsdp1_placements(model))

    def any_group(self, params: Iterable[nn.Parameter]) -> dist.ProcessGroup | None:
        """The process group of the first of these parameters that has one."""
        groups = (self.locate_if_possible(param).group for param in params)
        return next((group for group in groups if group is not None), None)

    def locate_if_possible(self, param: nn.Parameter) -> Placement:
        """As ``locate``; where that refuses, the shape alone, which is all that AdamW needs."""
        try:
            return self.locate("", param)
        except ConfigError:
            return Placement(tuple(param.shape), None)

    def locate(self, name: str, param: nn.Parameter) -> Placement:
        """The placement of one parameter.

        Raises:
            ConfigError: a DTensor is cut in a way that cannot be put together again.
        """
        if is_dtensor(param):
            return _dtensor_placement(name, param)
        if id(param) in self._known:
            return self._known[id(param)]
        marked = vars(param).get(SHAPE_MARK)
        shape = tuple(param.shape)
        if marked is not None and marked != shape:
            group = self._process_group or (dist.group.WORLD if is_distributed() else None)
            return Placement(marked, None, group=_shared(group))
        return Placement(shape, (0, param.numel()), group=_shared(self._process_group))


def _shared(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return None if group is None or dist.get_world_size(group) == 1 else group


def _ddp_placements(model: nn.Module) -> Iterator[tuple[int, Placement]]:
    from torch.nn.parallel import DistributedDataParallel

    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            group = _shared(module.process_group)
            for param in module.parameters():
                yield id(param), Placement(tuple(param.shape), (0, param.numel()), group=group)


def _fsdp1_placements(model: nn.Module) -> Iterator[tuple[int, Placement]]:
    if "FullyShardedDataParallel" not in vars(torch.distributed.fsdp):
        return  # a torch without FSDP1
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    hybrid = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)  # noqa: SLF001
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = unit._handle  # noqa: SLF001 - no public way to a shard's position
        if handle is None:
            continue
        flat = handle.flat_param
        if flat._params is None:  # noqa: SLF001
            raise ConfigError(
                "FSDP was given use_orig_params=False, which hides the parameters in flat ones; "
                "wrap the model with use_orig_params=True"
            )
        group = handle.process_group
        if unit.sharding_strategy in hybrid:
            group = _with_replicas(group, unit._inter_node_pg.size())  # noqa: SLF001
        for param, shape, info in zip(
            flat._params,  # noqa: SLF001
            flat._shapes,  # noqa: SLF001
            flat._shard_param_infos,  # noqa: SLF001
            strict=True,
        ):
            interval = (0, math.prod(shape))
            if handle.uses_sharded_strategy:
                interval = (
                    (info.intra_param_start_idx, info.intra_param_end_idx + 1)
                    if info.in_shard
                    else (0, 0)
                )
            yield id(param), Placement(tuple(shape), interval, group=_shared(group))


def _with_replicas(shards: dist.ProcessGroup, num_replicas: int) -> dist.ProcessGroup:
    """The group of shards and their copies.

    It exists only where it is the whole job; elsewhere each copy orthogonalises for itself, since
    no group is ever created.
    """
    whole = dist.get_world_size(shards) * num_replicas == dist.get_world_size()
    return dist.group.WORLD if whole else shards  # type: ignore[return-value]


def _dtensor_placement(name: str, param: "DTensor") -> Placement:
    from torch.distributed.tensor import Replicate, Shard

    mesh = param.device_mesh
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    cut = [axis for axis in axes if type(param.placements[axis]) is Shard]
    copied = [axis for axis in axes if isinstance(param.placements[axis], Replicate)]
    if len(cut) > 1 or len(cut) + len(copied) < len(axes):
        raise ConfigError(
            f"{name} is distributed as {param.placements}, which the optimizer cannot put "
            "together; it takes DTensors cut along one mesh axis by Shard and copied along the "
            "others. Shard it so, or leave it out in the predicate"
        )
    shape = tuple(param.shape)
    num_copies = math.prod(mesh.size(axis) for axis in copied)
    if not cut:
        group = mesh.get_group(axes[0]) if len(axes) == 1 else None
        if len(axes) > 1 and num_copies == dist.get_world_size():
            group = dist.group.WORLD
        return Placement(shape, (0, math.prod(shape)), group=group)
    group = mesh.get_group(cut[0])
    if copied:
        group = _with_replicas(group, num_copies)
    dim = next(p.dim for p in (param.placements[cut[0]],) if isinstance(p, Shard)) % len(shape)
    row = math.prod(shape) // shape[dim] if shape[dim] else 0
    start, stop = _chunk(shape[dim], mesh.size(cut[0]), mesh.get_local_rank(cut[0]))
    interval = (start * row, stop * row) if stop > start else (0, 0)
    return Placement(shape, interval, dim, group)


def _chunk(size: int, num_chunks: int, index: int) -> Interval:
    """Rows of one rank as ``torch.chunk`` cuts them: the last ranks may get none."""
    length = -(-size // num_chunks)
    return min(index * length, size), min((index + 1) * length, size)
