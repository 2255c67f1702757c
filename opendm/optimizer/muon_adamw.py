"""``MuonAdamW``: Muon for chosen matrices, AdamW for all other parameters, exact when sharded."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opendm.errors import ConfigError
from opendm.optimizer.adamw_step import checked_gradient, step_adamw
from opendm.optimizer.agreement import Claim, fail_together, gather_intervals
from opendm.optimizer.exchange import warm_up
from opendm.optimizer.intake import (
    Group,
    NamedParameters,
    every_parameter,
    parameter_groups,
)
from opendm.optimizer.masters import needs_master
from opendm.optimizer.muon_piece import MuonPiece
from opendm.optimizer.newton_schulz import NsDtype
from opendm.optimizer.placement import Locator, Placement, is_dtensor, local
from opendm.optimizer.selection import Predicate
from opendm.optimizer.shard_plan import Costs, MuonShardPlan
from opendm.optimizer.sharded_muon import ShardedMuon, StepOptions
from opendm.optimizer.states import (
    adapt_state_dict,
    check_shapes,
    refuse_fsdp1_formats,
    restore_state,
)

CPU_COSTS = Costs(flops_per_s=5e10, bytes_per_s=1e9)
"""One core with AVX-512, and gloo on one machine."""
GPU_COSTS = Costs(flops_per_s=5e13, bytes_per_s=5e10)
"""Float32 on an H200, and one 400 Gb/s link per GPU."""

STACK_BYTES = 256 << 20
"""Sixteen of the Action Expert's largest matrices."""
COPY_BYTES = 64 << 20
"""Float32 copies of half-precision gradients that AdamW makes at a time."""


class MuonAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, with the scale of Liu et al. 2025, arXiv:2502.16982) and AdamW.

    Sharded by FSDP1, FSDP2, HSDP or DDP it gives, bit for bit in float32, what one process gives on
    the same gradients. Each matrix is orthogonalised by one rank of the job. Every rank must
    construct it and call ``step`` as often as the others.

    Args:
        params: the model as it is trained, named parameters, or groups with ``params``,
            ``use_muon`` and any of the options below.
        lr: learning rate of AdamW; Muon's is
            ``lr * muon_lr_scale * muon_moonlight_coefficient * sqrt(max(rows, cols))``.
        betas: decay of AdamW's moments.
        eps: added to the root of AdamW's second moment.
        weight_decay: decoupled, ``lr * weight_decay`` for both rules.
        muon_momentum: decay of Muon's momentum.
        muon_nesterov: Nesterov's form of it.
        muon_ns_steps: Newton-Schulz iterations.
        muon_lr_scale: scales Muon's rate.
        muon_moonlight_coefficient: matches the size of Muon's update to AdamW's.
        predicate: name and whole parameter to whether Muon takes it. Without it the marks of
            ``mark_muon_parameters`` decide, and without marks the Action Expert's matrices.
        process_group: where no wrapped model is given: the ranks that hold copies of plain
            parameters, or pieces of marked ones.
        ns_dtype: dtype of the Newton-Schulz products.
        master_weights: keep float32 masters of half-precision weights.
        missing_grad: ``skip`` leaves a matrix alone that has no gradient on any rank; ``zero``
            lets momentum and decay go on, as the public framework does.
        bucket_bytes: most that the exchange holds at a time, on the busiest rank; by default 64
            MiB, or up to 2 GiB where less would make ranks wait for each other.
        stack_bytes: largest stack of equal matrices that is orthogonalised at once on a GPU; less
            takes less memory.

    Raises:
        ConfigError: nothing to orthogonalise, a sharding that cannot be put together, or a value
            out of range; on every rank with the same message.
    """

    def __init__(
        self,
        params: nn.Module | NamedParameters | Iterable[Group],
        *,
        lr: float | Tensor = 2.5e-5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        muon_momentum: float = 0.95,
        muon_nesterov: bool = True,
        muon_ns_steps: int = 5,
        muon_lr_scale: float = 1.0,
        muon_moonlight_coefficient: float = 0.2,
        predicate: Predicate | None = None,
        process_group: dist.ProcessGroup | None = None,
        ns_dtype: NsDtype = "fp32",
        master_weights: bool = True,
        missing_grad: Literal["skip", "zero"] = "skip",
        bucket_bytes: int | None = None,
        stack_bytes: int = STACK_BYTES,
    ) -> None:
        _check_choice("ns_dtype", ns_dtype, get_args(NsDtype))
        _check_choice("missing_grad", missing_grad, ("skip", "zero"))
        given = params if isinstance(params, nn.Module) else list(params)
        locator = Locator(params if isinstance(params, nn.Module) else None, process_group)
        try:
            groups = parameter_groups(given, locator, predicate)
        except ConfigError as error:
            fail_together(error, locator.any_group(every_parameter(given)))
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "muon_momentum": muon_momentum,
            "muon_nesterov": muon_nesterov,
            "muon_ns_steps": muon_ns_steps,
            "muon_lr_scale": muon_lr_scale,
            "muon_moonlight_coefficient": muon_moonlight_coefficient,
        }
        super().__init__(groups, defaults)
        for group in self.param_groups:
            _check_options(group)
        self._master_weights = master_weights
        self._bucket_bytes = bucket_bytes
        self._placements = {
            param: locator.locate(name, param)
            if group["use_muon"]
            else locator.locate_if_possible(param)
            for group in self.param_groups
            for name, param in zip(group["param_names"], group["params"], strict=True)
        }
        self._create_state()
        self._options = StepOptions(ns_dtype, missing_grad, stack_bytes)
        places = dict.fromkeys(self._place(param) for _, _, param in self._matrices())
        self._muon = [self._share_out(*place) for place in places]

    # Construction

    def _create_state(self) -> None:
        """All of it now: a checkpoint that is written before the first step is complete."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                dtype = torch.promote_types(param.dtype, torch.float32)
                state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
                if not group["use_muon"]:
                    state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype)
                    state["step"] = torch.zeros((), dtype=torch.float32, device=local(param).device)
                if self._master_weights and needs_master(param):
                    state["master"] = param.detach().to(torch.float32, copy=True)

    def _place(self, param: nn.Parameter) -> tuple[dist.ProcessGroup | None, torch.device]:
        return self._placements[param].group, local(param).device

    def _share_out(
        self, process_group: dist.ProcessGroup | None, device: torch.device
    ) -> ShardedMuon:
        """Agree on one process group's matrices on one device, and plan who does what."""
        pieces, claims = [], []
        for index, name, param in self._matrices():
            placement = self._placements[param]
            if self._place(param) == (process_group, device):
                rows, cols = placement.stored_shape
                pieces.append(MuonPiece(self, param, index, (rows, cols), placement.dim))
                numel = local(param).numel()
                claims.append(Claim(name, (rows, cols), placement.dim, placement.interval, numel))
        plan = MuonShardPlan.build(
            [claim.name for claim in claims],
            [claim.shape for claim in claims],
            gather_intervals(claims, process_group),
            costs=CPU_COSTS if device.type == "cpu" else GPU_COSTS,
            steps=self.param_groups[pieces[0].group_index]["muon_ns_steps"],
            bucket_bytes=self._bucket_bytes,
        )
        if process_group is not None:
            warm_up(process_group, device)
        return ShardedMuon(pieces, plan, process_group, self._options)

    def _matrices(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        for index, group in enumerate(self.param_groups):
            if group["use_muon"]:
                for name, param in zip(group["param_names"], group["params"], strict=True):
                    yield index, name, param

    # Step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both rules; what ``closure`` returns, if one is given."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._check_parameters()
        for group in self.param_groups:
            if not group["use_muon"]:
                for param in group["params"]:
                    checked_gradient(param)  # an error after a transfer would leave others waiting
        for muon in self._muon:
            muon.begin()
        for group in self.param_groups:
            if not group["use_muon"]:
                step_adamw(group, self.state, self._bucket_bytes or COPY_BYTES)
        for muon in self._muon:
            muon.finish()
        return result

    def _check_parameters(self) -> None:
        """Refuse parameters that came, changed or were cut after construction."""
        for group in self.param_groups:
            for param in group["params"]:
                if param in self._placements and self.state[param]["exp_avg"].shape == param.shape:
                    continue
                raise ConfigError(
                    f"a parameter of shape {tuple(param.shape)} was added, exchanged or sharded "
                    "after MuonAdamW was made, as add_param_group and accelerate's prepare under "
                    "FSDP2 do; shard the model first, then make a new MuonAdamW from it"
                )

    # Counters

    @property
    def plans(self) -> list[MuonShardPlan]:
        """How the matrices are shared out: one plan per process group and device."""
        return [muon.plan for muon in self._muon]

    @property
    def num_orthogonalized(self) -> int:
        """Matrices that this rank has orthogonalised since it was made."""
        return sum(muon.num_orthogonalized for muon in self._muon)

    @property
    def skipped_matrices(self) -> int:
        """Steps of single matrices that a non-finite gradient has cost, over all ranks.

        Reading it waits for the device.
        """
        return sum(muon.num_skipped() for muon in self._muon)

    def describe(self) -> str:
        """How many matrices and parameters each rule takes, and how the work is shared out."""
        taken = {True: 0, False: 0}
        for group in self.param_groups:
            taken[group["use_muon"]] += len(group["params"])
        text = f"Muon for {taken[True]} matrices, AdamW for {taken[False]} other parameters"
        for plan in self.plans:
            if len(plan.intervals) > 1:
                work, received = plan.work(), max(plan.received_bytes())
                text += (
                    f"; of {len(work)} ranks the busiest has "
                    f"{max(work) * len(work) / sum(work):.2f} times the mean work, and receives "
                    f"{received / 2**20:.1f} MiB a step at most"
                )
        return text

    def placement(self, param: nn.Parameter) -> Placement:
        """Which part of a parameter, and so of its state, this rank holds."""
        return self._placements[param]

    # State

    def state_dict(self) -> dict[str, Any]:
        """As torch's; parameters are named by ``param_names``.

        Raises:
            ConfigError: FSDP1 asks, whose own format cannot hold states with different keys.
        """
        is_flat = any(
            not is_dtensor(param) and tuple(param.shape) != placement.shape
            for param, placement in self._placements.items()
        )
        refuse_fsdp1_formats(is_flat=is_flat)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore exactly what ``state_dict`` holds, by name; older OpenDM states load too.

        Raises:
            ConfigError: names or shapes differ.
        """
        loaded, by_param = adapt_state_dict(state_dict, self.param_groups)
        for param, saved in by_param.items():
            check_shapes(self.state[param], saved)
        kept = dict(self.state)  # torch's own way rounds float32 states to the parameters' dtype
        super().load_state_dict({"state": {}, "param_groups": loaded})
        self.state.update(kept)
        for param, saved in by_param.items():
            restore_state(self.state[param], saved, param)


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is unknown; allowed: {', '.join(allowed)}")


def _check_options(group: Group) -> None:
    beta1, beta2 = group["betas"]
    for name, value, is_allowed, allowed in (
        ("lr", group["lr"], isinstance(group["lr"], Tensor) or group["lr"] >= 0, "0 or more"),
        ("betas", group["betas"], 0 <= beta1 < 1 and 0 <= beta2 < 1, "in [0, 1)"),
        ("eps", group["eps"], group["eps"] > 0, "above 0"),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0, "0 or more"),
        ("muon_momentum", group["muon_momentum"], 0 <= group["muon_momentum"] < 1, "in [0, 1)"),
        ("muon_ns_steps", group["muon_ns_steps"], group["muon_ns_steps"] >= 1, "1 or more"),
        ("muon_lr_scale", group["muon_lr_scale"], group["muon_lr_scale"] >= 0, "0 or more"),
    ):
        if not is_allowed:
            raise ConfigError(f"{name}={value} is out of range; give a value {allowed}")
