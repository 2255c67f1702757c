"""One process, DDP or FSDP1: everything in OpenDM that adapts to torch's and accelerate's engines.

The model is wrapped here, by torch's own classes, and handed to the ``Trainer`` as wrapped already.
Asking accelerate for FSDP instead fails silently: on a CPU it trains with DDP, and with accelerate
1.15 ``shard_grad_op`` becomes FULL_SHARD on every device.
"""

import functools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel

from opendm.errors import EngineError

EngineName = Literal["single", "ddp", "fsdp1"]
FSDP_PREFIX: Final = "_fsdp_wrapped_module."


@dataclass(frozen=True, slots=True)
class Engine:
    """What wraps the model, and in which precision it computes."""

    name: EngineName
    device: torch.device
    compute_dtype: torch.dtype | None
    """Autocast dtype; None computes in the dtype of the weights."""
    shard_in_compute_dtype: bool = True
    """Whether FSDP hands out weights in ``compute_dtype`` (``bf16_mixed``) or as stored."""

    def wrap(self, model: nn.Module, units: Sequence[nn.Module]) -> nn.Module:
        """Wrap ``model``; ``units`` are FSDP's boundaries below the root.

        Trainable weights are stored in float32 on every engine (FSDP1 wants one dtype per unit,
        so there the frozen ones are too).
        """
        store_in_fp32(model, frozen_too=self.name == "fsdp1")
        if self.name == "single":
            return model.to(self.device)
        if self.name == "ddp":
            on_gpu = self.device.type == "cuda"
            return DistributedDataParallel(
                model.to(self.device),
                device_ids=[self.device] if on_gpu else None,
                gradient_as_bucket_view=True,
            )
        return self._wrap_fsdp1(model, units)

    def _wrap_fsdp1(self, model: nn.Module, units: Sequence[nn.Module]) -> nn.Module:
        chosen = {id(unit) for unit in units}
        if self.device.type != "cuda":
            broadcast_from_rank_0(model)
        with warnings.catch_warnings():
            # frozen and trainable parameters share units on purpose; torch lists all of them
            warnings.filterwarnings(
                "ignore", message="FSDP's|.*requires_grad", category=UserWarning
            )
            wrapped = self._fully_shard(model, chosen)
        assert_fsdp1(wrapped, num_units=len(chosen) + 1)
        return wrapped

    def _fully_shard(self, model: nn.Module, chosen: set[int]) -> FullyShardedDataParallel:
        on_gpu = self.device.type == "cuda"
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in chosen),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            mixed_precision=self._mixed_precision(),
            device_id=self.device,
            sync_module_states=on_gpu,
            use_orig_params=True,
        )

    def _mixed_precision(self) -> MixedPrecision:
        dtype = self.compute_dtype if self.shard_in_compute_dtype else None
        return MixedPrecision(
            param_dtype=dtype or torch.float32,
            reduce_dtype=torch.float32,
            buffer_dtype=torch.float32,  # rotary frequencies lose their meaning in bfloat16
            cast_root_forward_inputs=False,  # actions, noise and times stay float32
        )

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip and return the norm over all ranks' shards (torch's function sees one rank's)."""
        if isinstance(model, FullyShardedDataParallel):
            return model.clip_grad_norm_(max_norm)
        parameters = [p for p in model.parameters() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def describe(self, model: nn.Module) -> str:
        """Engine, strategy and number of units, read off the wrapped model."""
        if isinstance(model, FullyShardedDataParallel):
            units = FullyShardedDataParallel.fsdp_modules(model)
            strategy = model.sharding_strategy.name
            return f"FSDP1 {strategy} x{dist.get_world_size()}, {len(units)} units"
        if isinstance(model, DistributedDataParallel):
            return f"DDP x{dist.get_world_size()}"
        return "one process"

    def assert_got(self, model: nn.Module) -> None:
        """Check that the wrapped model is what this engine promises.

        Raises:
            EngineError: it is not.
        """
        kinds = {
            "single": nn.Module,
            "ddp": DistributedDataParallel,
            "fsdp1": FullyShardedDataParallel,
        }
        if not isinstance(model, kinds[self.name]):
            raise EngineError(f"asked for {self.name} and got {type(model).__name__}")


def store_in_fp32(model: nn.Module, *, frozen_too: bool) -> None:
    """Master weights: an update of 2.5e-5 is below bfloat16's rounding of a typical weight."""
    for parameter in model.parameters():
        if parameter.requires_grad or frozen_too:
            parameter.data = parameter.data.float()


def assert_fsdp1(model: nn.Module, *, num_units: int) -> None:
    """Check strategy and boundaries of every unit.

    Raises:
        EngineError: a unit shards otherwise, or the number of units differs.
    """
    units = FullyShardedDataParallel.fsdp_modules(model)
    strategies = {unit.sharding_strategy for unit in units}
    if strategies != {ShardingStrategy.SHARD_GRAD_OP}:
        names = sorted(strategy.name for strategy in strategies)
        raise EngineError(f"asked for SHARD_GRAD_OP and got {names}")
    if len(units) != num_units:
        raise EngineError(f"asked for {num_units} FSDP units and got {len(units)}")


def broadcast_from_rank_0(model: nn.Module) -> None:
    """Symptom: "The module has CPU parameters or buffers when sync_module_states=True".

    FSDP1 synchronises on accelerators only. Can go when FSDP1 accepts CPU modules there.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, src=0)


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return name.replace(FSDP_PREFIX, "").removeprefix("module.")


def gather_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """All weights on the CPU of the ranks with ``keep``, one FSDP unit at a time.

    Torch's own full state dict holds the whole model on the device of rank 0 before it moves it.
    """
    if not isinstance(model, FullyShardedDataParallel):
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        return {k: v.detach().cpu() for k, v in inner.state_dict().items()} if keep else {}
    gathered: dict[str, Tensor] = {}
    for prefix, unit in _fsdp_units(model):
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            if keep:
                for name, parameter in _own_parameters(unit):
                    gathered[clean_name(f"{prefix}.{name}" if prefix else name)] = (
                        parameter.detach().to("cpu", copy=True)
                    )
    return gathered


def _fsdp_units(model: nn.Module) -> Iterable[tuple[str, FullyShardedDataParallel]]:
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            yield name, module


def _own_parameters(unit: FullyShardedDataParallel) -> Iterable[tuple[str, Tensor]]:
    nested = [
        f"{name}."
        for name, module in unit.named_modules()
        if name and isinstance(module, FullyShardedDataParallel)
    ]
    for name, parameter in unit.named_parameters():
        if not any(name.startswith(prefix) for prefix in nested):
            yield name, parameter


def autocast(engine: Engine) -> "functools.partial[torch.autocast]":
    """A factory of the engine's autocast context."""
    return functools.partial(
        torch.autocast,
        engine.device.type,
        dtype=engine.compute_dtype or torch.bfloat16,
        enabled=engine.compute_dtype is not None,
    )
