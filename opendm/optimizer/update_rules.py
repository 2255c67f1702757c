"""The element-wise halves of both rules, in place on whatever piece a rank holds.

Each product and each sum is a call of its own: fused multiply-adds round differently in a vector's
tail, and the pieces of a matrix have other tails than the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor
from torch.optim.adamw import adamw

Number = float | Tensor


def direction_(
    out: Float32[Tensor, "*piece"],
    momentum: Float[Tensor, "*piece"],
    grad: Float[Tensor, "*piece"] | None,
    *,
    mu: float,
    nesterov: bool,
) -> None:
    """Write what is to be orthogonalised: ``m' = mu m + g``, or Nesterov's ``g + mu m'``.

    The momentum itself is not touched before the owner's verdict: see :func:`commit_`.
    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
    """
    torch.mul(momentum, mu, out=out)
    if grad is not None:
        out.add_(grad)
    if nesterov:
        out.mul_(mu)
        if grad is not None:
            out.add_(grad)


def commit_(
    momentum: Float[Tensor, "*piece"],
    grad: Float[Tensor, "*piece"] | None,
    *,
    mu: float,
    active: Bool[Tensor, ""],
) -> None:
    """``m <- mu m + g`` where ``active``; otherwise every bit of ``m`` stays."""
    momentum.mul_(_chosen(active, mu, 1.0))
    if grad is not None:
        momentum.add_(torch.where(active, grad, -0.0))  # x + -0.0 is x, also for -0.0


def apply_(
    weight: Float[Tensor, "*piece"],
    update: Float32[Tensor, "*piece"],
    *,
    lr: Number,
    rate: Number,
    weight_decay: float,
    active: Bool[Tensor, ""],
) -> None:
    """``w <- (1 - lr weight_decay) w - rate u`` where ``active``. ``update`` is used up.

    A half-precision weight is public OpenDM's: ``u`` is rounded to its dtype, the rest is float32.
    """
    decay = _chosen(active, 1 - _exact(lr) * weight_decay, 1.0)
    weight.mul_(decay[None])  # without an axis it would be rounded to the weight's dtype
    update.copy_(update.to(weight.dtype))
    update.mul_(_chosen(active, -rate, -0.0))
    weight.add_(update)


def muon_rate(
    lr: Number, *, lr_scale: float, moonlight_coefficient: float, shape: tuple[int, ...]
) -> Number:
    """Muon's rate for a whole matrix: its update then has AdamW's usual size.

    ``lr * lr_scale * 0.2 * sqrt(max(rows, cols))``, Liu et al. 2025, arXiv:2502.16982.
    """
    return _exact(lr) * (lr_scale * moonlight_coefficient * max(shape) ** 0.5)


def _chosen(active: Bool[Tensor, ""], number: Number, otherwise: float) -> Float32[Tensor, ""]:
    """``number`` where ``active``, in float32 whatever torch's default dtype is.

    A tensor on the CPU is filled in as a number: copying it to a GPU would wait for the GPU.
    """
    filled = torch.empty_like(active, dtype=torch.float32).fill_(number)
    return torch.where(active, filled, otherwise)


def _exact(number: Number) -> Number:
    """A rate in float64, in which Python computes with numbers."""
    return number.double().squeeze() if isinstance(number, Tensor) else number


@dataclass(frozen=True, slots=True)
class AdamWTensors:
    """A weight or a piece of one, and what AdamW needs beside it; float32, of one shape."""

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    """Number of steps so far, a scalar."""


def adamw_(
    tensors: Sequence[AdamWTensors],
    *,
    lr: Number,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW by torch's fused kernel on whole lists. Loshchilov & Hutter 2019, arXiv:1711.05101."""
    adamw(
        [t.weight for t in tensors],
        [t.grad for t in tensors],
        [t.exp_avg for t in tensors],
        [t.exp_avg_sq for t in tensors],
        [],
        [t.step for t in tensors],
        foreach=False,
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
