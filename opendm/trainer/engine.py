"""One process, DDP, FSDP1 or FSDP2: all that adapts to torch's and accelerate's engines.

The model is wrapped here, by torch's own classes, and handed to the ``Trainer`` as wrapped already.
Asking accelerate for FSDP instead fails silently: on a CPU it trains with DDP, and with accelerate
1.15 ``shard_grad_op`` becomes FULL_SHARD on every device.

Sharding goes unit by unit, innermost first: a unit's weights come to the device with rank 0's
values, become float32 and are cut before the next unit's come. A device never holds a second copy
of the model, only the unit at hand beside the shards of those before it.
"""

import functools
import logging
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeGuard, cast

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from opendm.errors import ConfigError, EngineError
from opendm.trainer.materialize import materialize

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

logger = logging.getLogger(__name__)

EngineName = Literal["single", "ddp", "fsdp1", "fsdp2"]
FSDP_PREFIX: Final = "_fsdp_wrapped_module."
CLIP_EPS: Final = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What wraps the model, and in which precision it computes."""

    name: EngineName
    device: torch.device
    compute_dtype: torch.dtype | None
    """Autocast dtype; None computes in the dtype of the weights."""
    shard_in_compute_dtype: bool = True
    """Whether FSDP hands out weights in ``compute_dtype`` (``bf16_mixed``) or as stored."""
    strategy: str = "shard_grad_op"
    """Of FSDP: ``shard_grad_op``, ``full_shard`` or ``hybrid_shard``."""
    wrap_preset: str = "published"
    """FSDP's units, by the name that the model knows them under."""
    ranks_per_node: int = 1
    """Over how many ranks ``hybrid_shard`` cuts; the other nodes hold copies."""
    frozen_as_loaded: bool = False
    """FSDP1 keeps the dtype of frozen weights, too: each dtype of a unit is then a unit of its own.

    For adapters: most of the model is frozen there."""

    def wrap(self, model: nn.Module, units: Sequence[nn.Module]) -> nn.Module:
        """Wrap ``model``; ``units`` are FSDP's boundaries below the root.

        Only rank 0's weights are read; on other ranks they may be on the meta device.
        Trainable weights are stored in float32 on every engine (FSDP1 wants one dtype per unit,
        so there the frozen ones are too).

        Raises:
            ConfigError: the strategy does not fit the number of ranks.
            EngineError: torch sharded otherwise than it was asked to.
        """
        if self.name in ("fsdp1", "fsdp2"):
            return self._shard_unit_by_unit(model, units)
        materialize(model.modules(), self.device, frozen_too=False)
        if self.name == "single":
            return model
        return DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            init_sync=False,  # done
            gradient_as_bucket_view=True,
        )

    def _shard_unit_by_unit(self, model: nn.Module, units: Sequence[nn.Module]) -> nn.Module:
        mesh = self._mesh()
        shard = self._shard_fsdp1 if self.name == "fsdp1" else self._shard_fsdp2
        chosen = {id(unit) for unit in units} | {id(model)}
        # a module is listed before those in it
        for name, module in reversed(list(model.named_modules())):
            if id(module) not in chosen:
                continue
            own = (part for _, part in own_modules(module))
            frozen_too = self.name == "fsdp1" and not self.frozen_as_loaded
            materialize(own, self.device, frozen_too=frozen_too)
            sharded = shard(module, mesh, keep_gathered=not name and len(chosen) > 1)
            if name:
                model.set_submodule(name, sharded)
            else:
                model = sharded
        assert_sharded(model, self, num_units=len(chosen))
        return model

    def _mesh(self) -> DeviceMesh:
        """Copies by shards; one copy unless the strategy is hybrid."""
        world = dist.get_world_size()
        if self.strategy != "hybrid_shard":
            return init_device_mesh(self.device.type, (world,), mesh_dim_names=("shards",))
        ranks = self.ranks_per_node
        if ranks < 2 or world % ranks:
            raise ConfigError(
                f"hybrid_shard cannot cut the model within nodes of {ranks} of {world} processes; "
                "it needs at least two a node and the same number on every node. Give "
                "--trainer-config.fsdp-sharding-strategy shard_grad_op or full_shard"
            )
        shape = (world // ranks, ranks)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("copies", "shards"))

    def _shard_fsdp1(self, unit: nn.Module, mesh: DeviceMesh, *, keep_gathered: bool) -> nn.Module:
        del keep_gathered  # FSDP1 keeps the root's weights by itself
        own = list(own_parameters(unit).values())
        if len({parameter.dtype for parameter in own}) > 1:
            others = [parameter for parameter in own if parameter.dtype != torch.float32]
            unit = self._fsdp1_unit(unit, mesh, ignored=others)
            unit._ignored_params.clear()  # noqa: SLF001 - the unit around it would ignore them, too
        sharded = self._fsdp1_unit(unit, mesh)
        if own and sharded._handle is None:  # noqa: SLF001 - nothing public tells
            raise EngineError("FSDP1 left out the frozen weights of a unit")
        return sharded

    def _fsdp1_unit(
        self, unit: nn.Module, mesh: DeviceMesh, *, ignored: Sequence[nn.Parameter] = ()
    ) -> "FullyShardedDataParallel":
        dtype = self.compute_dtype if self.shard_in_compute_dtype else None
        groups = mesh.get_group("shards")
        with warnings.catch_warnings():
            # frozen and trainable parameters share units on purpose; torch lists all of them
            warnings.filterwarnings(
                "ignore", message="FSDP's|.*requires_grad", category=UserWarning
            )
            return fsdp.FullyShardedDataParallel(
                unit,
                process_group=groups if mesh.ndim == 1 else (groups, mesh.get_group("copies")),
                sharding_strategy=fsdp.ShardingStrategy[self.strategy.upper()],
                backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,
                mixed_precision=fsdp.MixedPrecision(
                    param_dtype=dtype or torch.float32,
                    reduce_dtype=torch.float32,
                    buffer_dtype=torch.float32,  # rotary frequencies lose their meaning in bfloat16
                    cast_root_forward_inputs=False,  # actions, noise and times stay float32
                ),
                device_id=self.device,
                use_orig_params=True,
                ignored_states=ignored or None,
            )

    def _shard_fsdp2(self, unit: nn.Module, mesh: DeviceMesh, *, keep_gathered: bool) -> nn.Module:
        dtype = self.compute_dtype if self.shard_in_compute_dtype else None
        # nothing writes into the keys and values that a layer returns
        warnings.filterwarnings("ignore", message=".* returned a view tensor", category=UserWarning)
        fully_shard(
            unit,
            mesh=mesh,
            # the root's weights are the first that the backward pass needs
            reshard_after_forward=self.strategy != "shard_grad_op" and not keep_gathered,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtype or torch.float32,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,  # actions, noise and times stay float32
            ),
        )
        return unit

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip and return the norm over all ranks' shards (torch's function sees one rank's)."""
        if is_fsdp1(model):
            return model.clip_grad_norm_(max_norm)
        if isinstance(model, FSDPModule):
            return clip_dtensors(list(model.parameters()), max_norm)
        parameters = [p for p in model.parameters() if p.grad is not None]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def describe(self, model: nn.Module) -> str:
        """Engine, strategy and number of units, read off the wrapped model."""
        if isinstance(model, DistributedDataParallel):
            return f"DDP x{dist.get_world_size()}"
        units = sharded_units(model)
        if not units:
            return "one process"
        version = "FSDP1" if is_fsdp1(model) else "FSDP2"
        count = count_units(model)
        text = f"{version} {strategy_of(model)} x{dist.get_world_size()}, {count} units"
        if self.strategy == "hybrid_shard":
            text += f", {dist.get_world_size() // self.ranks_per_node} copies"
        return text

    def assert_got(self, model: nn.Module) -> None:
        """Check that the wrapped model is what this engine promises.

        Raises:
            EngineError: it is not.
        """
        got: EngineName = "single"
        if isinstance(model, DistributedDataParallel):
            got = "ddp"
        elif sharded_units(model):
            got = "fsdp1" if is_fsdp1(model) else "fsdp2"
        if got != self.name:
            raise EngineError(f"asked for {self.name} and got {got} ({type(model).__name__})")


def fsdp_engine(version: int) -> EngineName:
    """The engine of an FSDP version: FSDP2, with a line, where torch carries FSDP1 no more."""
    if version == 1 and "FullyShardedDataParallel" not in vars(fsdp):
        logger.warning("the installed torch has no FSDP1 any more; FSDP2 takes over")
        return "fsdp2"
    return "fsdp1" if version == 1 else "fsdp2"


def is_fsdp1(module: nn.Module) -> "TypeGuard[FullyShardedDataParallel]":
    """Whether ``module`` is a unit of FSDP1."""
    kind = vars(fsdp).get("FullyShardedDataParallel")
    return kind is not None and isinstance(module, kind)


def is_unit(module: nn.Module) -> bool:
    """Whether ``module`` is a unit of FSDP1 or FSDP2."""
    return is_fsdp1(module) or isinstance(module, FSDPModule)


def sharded_units(model: nn.Module) -> dict[str, nn.Module]:
    """FSDP's units by name, the root first."""
    return {name: module for name, module in model.named_modules() if is_unit(module)}


def count_units(model: nn.Module) -> int:
    """Number of modules that are units; one that is two units for two dtypes counts once."""
    return len({clean_name(f"{name}.").strip(".") for name in sharded_units(model)})


def own_modules(unit: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """``unit`` and the modules in it, without those of sharded units in it."""
    yield prefix, unit
    for name, child in unit.named_children():
        if not is_unit(child):
            yield from own_modules(child, f"{prefix}{name}.")


def own_parameters(unit: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that ``unit`` holds outside sharded units in it, by name."""
    return {
        f"{prefix}{name}": parameter
        for prefix, module in own_modules(unit)
        for name, parameter in module.named_parameters(recurse=False)
    }


def assert_sharded(model: nn.Module, engine: Engine, *, num_units: int) -> None:
    """Check strategy and boundaries of every unit.

    Raises:
        EngineError: a unit shards otherwise, or the number of units differs.
    """
    if (got := count_units(model)) != num_units:
        raise EngineError(f"asked for {num_units} FSDP units and got {got}")
    if (strategy := strategy_of(model)) != engine.strategy.upper():
        raise EngineError(f"asked for {engine.strategy.upper()} and got {strategy}")


def strategy_of(model: nn.Module) -> str:
    """FSDP's strategy, read off the units; several joined by "and" where they differ."""
    root, *rest = map(_unit_strategy, sharded_units(model).values())
    if rest and isinstance(model, FSDPModule) and root == "SHARD_GRAD_OP":
        root = rest[0]  # full_shard keeps the root's weights, too
    return " and ".join(sorted({root, *rest}))


def _unit_strategy(unit: nn.Module) -> str:
    if is_fsdp1(unit):
        return unit.sharding_strategy.name
    placements = {
        p.placements if isinstance(p, DTensor) else () for p in own_parameters(unit).values()
    }
    if placements == {(Replicate(), Shard(0))}:
        return "HYBRID_SHARD"
    if placements != {(Shard(0),)}:
        return f"placements {sorted(map(str, placements))}"
    state: Any = cast("FSDPModule", unit)._get_fsdp_state()  # noqa: SLF001 - nothing public tells
    frees = state._fsdp_param_group._reshard_after_forward  # noqa: SLF001
    return "FULL_SHARD" if frees else "SHARD_GRAD_OP"


@torch.no_grad()
def clip_dtensors(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Clip FSDP2's gradients to ``max_norm`` with one reduction, and return their norm.

    Torch's function reduces by tensor and returns a DTensor.
    """
    gradients = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
    square = torch.nn.utils.get_total_norm(gradients).square()
    mesh = next(p.device_mesh for p in parameters if isinstance(p, DTensor))
    dist.all_reduce(square, group=mesh.get_group("shards"))
    norm = square.sqrt()
    torch._foreach_mul_(gradients, (max_norm / (norm + CLIP_EPS)).clamp(max=1.0))
    return norm


def free_gathered(model: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass has left gathered.

    Needed before sharded weights are read or changed: the next forward pass would use the gathered
    ones again, without a look at the shards.
    """
    for unit in sharded_units(model).values():
        if isinstance(unit, FSDPModule):
            unit.reshard()
        elif unit._is_root is not None:  # noqa: SLF001 - None until the first forward pass
            handle: Any = unit._handle  # noqa: SLF001 - FSDP1 has no public way to free weights
            if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
                handle.reshard(free_unsharded_flat_param=True)
                handle.post_reshard()


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return name.replace(FSDP_PREFIX, "").removeprefix("module.")


def gather_weights(
    model: nn.Module, *, keep: bool, names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """All weights on the CPU of the ranks with ``keep``, one FSDP unit at a time.

    Torch's own full state dict holds the whole model on the device of rank 0 before it moves it.

    Args:
        model: as its engine wraps it.
        keep: whether this rank wants them.
        names: the weights to gather, where not all are wanted.
    """
    units = sharded_units(model)
    if not units:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        state = inner.state_dict() if keep else {}
        return {k: v.detach().cpu() for k, v in state.items() if names is None or k in names}
    free_gathered(model)
    gathered: dict[str, Tensor] = {}
    for prefix, unit in units.items():
        whole_names = {n: clean_name(f"{prefix}.{n}".lstrip(".")) for n in own_parameters(unit)}
        wanted = {n: whole for n, whole in whole_names.items() if names is None or whole in names}
        for name, weight in whole_weights(unit, wanted):
            if keep:
                gathered[wanted[name]] = weight.detach().to("cpu", copy=True)
    return gathered


def whole_weights(unit: nn.Module, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Weights of a unit as stored; a collective, so every rank runs through all of them."""
    if not names:
        return
    if is_fsdp1(unit):
        with unit.summon_full_params(unit, recurse=False, writeback=False):
            yield from ((n, p) for n, p in own_parameters(unit).items() if n in names)
    else:
        for name, parameter in own_parameters(unit).items():
            if name in names:
                yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def autocast(engine: Engine) -> "functools.partial[torch.autocast]":
    """A factory of the engine's autocast context."""
    return functools.partial(
        torch.autocast,
        engine.device.type,
        dtype=engine.compute_dtype or torch.bfloat16,
        enabled=engine.compute_dtype is not None,
    )


def inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def keep_as_wrapped(accelerator: Any, model: nn.Module) -> None:
    """Keep accelerate from putting DDP around FSDP2, which does not change a model's identity."""
    if isinstance(model, FSDPModule):
        accelerator.prepare_model = lambda prepared, **_kwargs: prepared


def mark_skipped(optimizer: Any, *, skipped: bool) -> None:
    """Tell accelerate that this step is not taken, so that the schedule does not move either.

    It has a flag for a loss scaler's overflow, and no public way to set it.
    """
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer._is_overflow = skipped  # noqa: SLF001
