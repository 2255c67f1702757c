"""The public hybrid of Muon and AdamW, written plainly: the other side of the speed comparison.

Every rank that holds a piece of a matrix gathers the whole of it and orthogonalises it, one matrix
after the other, and AdamW runs once per parameter. Muon: Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/; size of the update: Liu et al. 2025, arXiv:2502.16982.
"""

from collections.abc import Callable, Iterable
from typing import Final

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

QUINTIC: Final = (3.4445, -4.7750, 2.0315)
"""Coefficients of one Newton-Schulz step (Jordan et al. 2024)."""
MOONLIGHT: Final = 0.2
"""Root mean square of an update of AdamW (Liu et al. 2025, section 2.2)."""
FSDP1_PREFIX: Final = "_fsdp_wrapped_module."

Shape = tuple[int, int]
Subgroups = dict[tuple[int, ...], dist.ProcessGroup]


def matrix_shapes(
    model: nn.Module, predicate: Callable[[str, nn.Parameter], bool]
) -> dict[str, Shape]:
    """Name and shape of each matrix for Muon; taken before FSDP1 flattens the parameters."""
    return {
        name: (param.shape[0], param.shape[1])
        for name, param in model.named_parameters()
        if predicate(name, param)
    }


def orthogonalise(matrix: Float[Tensor, "R C"], steps: int = 5) -> Float[Tensor, "R C"]:
    """Move the singular values towards one by the quintic Newton-Schulz iteration."""
    # float32 Tensor.norm is inexact on a CPU: it moves the result of 4096 x 1024 by 9e-5
    norm = matrix.square().sum().sqrt()
    if norm == 0 or not norm.isfinite():
        return torch.zeros_like(matrix)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix) / norm.clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(steps):
        gram = x @ x.T
        polynomial = b * gram + c * gram @ gram
        x = a * x + polynomial @ x
    return x.T if is_tall else x


class StraightforwardMuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices and AdamW for the rest, in one process, under FSDP1 or under FSDP2."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        shapes: dict[str, Shape],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        ns_steps: int = 5,
    ) -> None:
        """Sort the parameters and agree with the other ranks on who holds what.

        Args:
            named_parameters: those of the model, sharded or not.
            shapes: of the matrices for Muon, by name, see ``matrix_shapes``.
            lr: learning rate of both kinds.
            betas: decay of AdamW's moments.
            eps: added to the root of AdamW's second moment.
            weight_decay: decoupled, times ``lr``.
            momentum: of Muon, in Nesterov's form.
            ns_steps: Newton-Schulz iterations.
        """
        named = [(name.replace(FSDP1_PREFIX, ""), param) for name, param in named_parameters]
        matrices = [(shapes[name], param) for name, param in named if name in shapes]
        rest = [param for name, param in named if name not in shapes]
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                    "momentum": momentum, "ns_steps": ns_steps}  # fmt: skip
        groups = [{"params": rest}, {"params": [param for _, param in matrices]}]
        super().__init__(groups, defaults)
        subgroups: Subgroups = {}
        self._pieces = [
            _Pieces(shape, sizes, subgroups)
            for (shape, _), sizes in zip(matrices, _sizes_by_matrix(matrices), strict=True)
        ]
        for param in rest:
            value = _local(param)
            self.state[param] = {"step": torch.zeros(()), "exp_avg": _zeros(value),
                                 "exp_avg_sq": _zeros(value)}  # fmt: skip
        for _, param in matrices:
            self.state[param] = {"exp_avg": _zeros(_local(param))}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        rest, matrices = self.param_groups
        for param in rest["params"]:
            if param.grad is not None:
                self._adamw(param, rest)
        for param, pieces in zip(matrices["params"], self._pieces, strict=True):
            if _local(param).numel() > 0:
                self._muon(param, pieces, matrices)

    def _adamw(self, param: nn.Parameter, group: dict) -> None:
        value, state = _local(param), self.state[param]
        adamw(
            [value], [_local(param.grad).to(state["exp_avg"].dtype)], [state["exp_avg"]],
            [state["exp_avg_sq"]], [], [state["step"]], foreach=False, fused=False,
            amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip

    def _muon(self, param: nn.Parameter, pieces: "_Pieces", group: dict) -> None:
        value, momentum = _local(param), self.state[param]["exp_avg"]
        grad = torch.zeros_like(value) if param.grad is None else _local(param.grad)
        momentum.mul_(group["momentum"]).add_(grad)
        direction = momentum.mul(group["momentum"]).add_(grad)
        value.mul_(1 - group["lr"] * group["weight_decay"])
        if isinstance(param, DTensor):
            full = DTensor.from_local(
                direction, param.device_mesh, param.placements, run_check=False,
                shape=param.shape, stride=param.stride(),
            ).full_tensor()  # fmt: skip
            update = orthogonalise(full, group["ns_steps"])
            rank, ranks = param.device_mesh.get_local_rank(), param.device_mesh.size()
            piece = update.chunk(ranks)[rank]
        else:
            update = orthogonalise(pieces.gather(direction), group["ns_steps"])
            piece = pieces.own(update).view_as(value)
        rate = group["lr"] * MOONLIGHT * max(pieces.shape) ** 0.5
        value.add_(piece.to(value.dtype), alpha=-rate)


class _Pieces:
    """Who holds which part of one flattened matrix, and the way from the parts to the whole."""

    def __init__(self, shape: Shape, sizes: list[int], subgroups: Subgroups) -> None:
        self.shape = shape
        holders = [rank for rank, size in enumerate(sizes) if size > 0]
        self._sizes = [sizes[rank] for rank in holders]
        self._group: dist.ProcessGroup | None = None
        self._start = 0
        if len(holders) > 1:
            # every rank has to take part in making a group, also those outside it
            if tuple(holders) not in subgroups:
                subgroups[tuple(holders)] = dist.new_group(holders)
            self._group = subgroups[tuple(holders)]
            self._start = sum(sizes[: dist.get_rank()])

    def gather(self, piece: Tensor) -> Float[Tensor, "R C"]:
        """Return the whole matrix on every holder."""
        if self._group is None:
            return piece.view(self.shape)
        largest = max(self._sizes)
        padded = nn.functional.pad(piece, (0, largest - piece.numel()))
        received = [torch.empty_like(padded) for _ in self._sizes]
        dist.all_gather(received, padded, group=self._group)
        parts = [part[:size] for part, size in zip(received, self._sizes, strict=True)]
        return torch.cat(parts).view(self.shape)

    def own(self, matrix: Float[Tensor, "R C"]) -> Tensor:
        """Return this rank's part of the whole, flat."""
        if self._group is None:
            return matrix
        size = self._sizes[dist.get_group_rank(self._group, dist.get_rank())]
        return matrix.flatten()[self._start : self._start + size]


def _sizes_by_matrix(matrices: list[tuple[Shape, nn.Parameter]]) -> list[list[int]]:
    """Local elements of each matrix, by rank; one rank where the parameters are not FSDP1's."""
    own = [_local(param).numel() for _, param in matrices]
    if not dist.is_initialized() or any(isinstance(param, DTensor) for _, param in matrices):
        return [[size] for size in own]
    by_rank: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, own)
    return [list(sizes) for sizes in zip(*by_rank, strict=True)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _zeros(value: Tensor) -> Tensor:
    return torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))
