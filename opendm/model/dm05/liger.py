"""Liger's fused kernels in place of the plain modules of both towers, on CUDA.

Hsu et al. 2024, arXiv:2410.10989. A fused module holds the very parameters of the one it replaces,
under the same names; files, optimizers and engines see no difference.
"""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from jaxtyping import Float
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm

from opendm.model.dm05.action_expert import ActionExpertLayer
from opendm.model.dm05.prefix import PrefixDecoderLayer
from opendm.model.dm05.rotary import Rotate

logger = logging.getLogger(__name__)

PACKAGE: Final = "liger_kernel"
FUSED_ACTIVATION: Final = "gelu_pytorch_tanh"
"""The one activation that the GeGLU kernel computes."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The operations that a model can have fused."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """``x, weight, eps``: Gemma's, whose weight is an offset from one."""
    geglu: Callable[[Tensor, Tensor], Tensor]
    """``gate, up``: ``gelu(gate) * up``."""
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """``x, weight, bias, eps``."""
    rotate: Rotate
    """``query, key, cos, sin``."""


def liger_kernels() -> Kernels:
    """Liger's operations; they run on CUDA only."""
    from liger_kernel.ops import (
        LigerGELUMulFunction,
        LigerLayerNormFunction,
        LigerRMSNormFunction,
        LigerRopeFunction,
    )

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # float32 inside, as Gemma; not in place, for a residual branch reads the same gradient
        return LigerRMSNormFunction.apply(x, weight, eps, 1.0, "gemma", False)  # noqa: FBT003

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # the kernel may write into its inputs: one tensor given twice would be turned twice
        return LigerRopeFunction.apply(query.clone() if query is key else query, key, cos, sin)

    return Kernels(rms_norm, LigerGELUMulFunction.apply, LigerLayerNormFunction.apply, rotate)


class FusedRMSNorm(nn.Module):
    """Gemma's RMSNorm."""

    def __init__(self, plain: Gemma3RMSNorm, kernels: Kernels) -> None:
        super().__init__()
        self.weight = plain.weight
        self.eps = plain.eps
        self.kernel = kernels.rms_norm

    def forward(self, x: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
        """Normalise the last axis."""
        return self.kernel(x, self.weight, self.eps)


class FusedLayerNorm(nn.Module):
    """Layer normalisation of the last axis."""

    def __init__(self, plain: nn.LayerNorm, kernels: Kernels) -> None:
        super().__init__()
        self.weight = plain.weight
        self.bias = plain.bias
        self.eps = plain.eps
        self.kernel = kernels.layer_norm

    def forward(self, x: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
        """Normalise the last axis."""
        return self.kernel(x, self.weight, self.bias, self.eps)


class FusedGeGLU(nn.Module):
    """Gemma's feed-forward network."""

    def __init__(self, plain: Gemma3MLP, kernels: Kernels) -> None:
        super().__init__()
        self.config = plain.config
        self.gate_proj = plain.gate_proj
        self.up_proj = plain.up_proj
        self.down_proj = plain.down_proj
        self.kernel = kernels.geglu

    def forward(self, x: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
        """Widen, gate and narrow."""
        return self.down_proj(self.kernel(self.gate_proj(x), self.up_proj(x)))


def fuse(model: nn.Module, kernels: Kernels) -> dict[str, int]:
    """Replace every module that has a fused form; returns how many of each kind were replaced."""
    replaced: dict[str, int] = {}
    for name, module in list(model.named_modules()):
        fused = _fused(module, kernels)
        if fused is not None:
            model.set_submodule(name, fused.train(module.training))
            _count(replaced, type(fused).__name__)
        if isinstance(module, PrefixDecoderLayer | ActionExpertLayer):
            module.rotate = kernels.rotate
            _count(replaced, "rotary embeddings")
    return replaced


def _count(counts: dict[str, int], kind: str) -> None:
    counts[kind] = counts.get(kind, 0) + 1


def _fused(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    if isinstance(module, Gemma3RMSNorm):
        return FusedRMSNorm(module, kernels)
    if isinstance(module, nn.LayerNorm) and module.bias is not None:
        return FusedLayerNorm(module, kernels)
    if isinstance(module, Gemma3MLP) and module.config.hidden_activation == FUSED_ACTIVATION:
        return FusedGeGLU(module, kernels)
    return None


def reason_against(device: str) -> str | None:
    """Why Liger's kernels cannot run on ``device``, or None when they can."""
    if device != "cuda":
        return "they need a CUDA device"
    if importlib.util.find_spec(PACKAGE) is None:
        return "they need the package liger-kernel"
    return None


def use_liger_kernels(model: nn.Module, device: str, *, named: bool) -> bool:
    """Fuse what ``model`` will run on ``device``; otherwise say in one line why not.

    Args:
        model: changed in place, parameters and their names excepted.
        device: type of the device that it will run on.
        named: whether the user asked for the kernels (then the line is a warning).

    Returns:
        Whether the kernels are in place.
    """
    reason = reason_against(device)
    if reason is None:
        counts: dict[str, Any] = fuse(model, liger_kernels())
        logger.info(
            "Liger kernels: %s", ", ".join(f"{count} {kind}" for kind, count in counts.items())
        )
        return True
    logger.log(
        logging.WARNING if named else logging.INFO,
        "Liger kernels are not used: %s; the same is computed by plain torch", reason,
    )  # fmt: skip
    return False
