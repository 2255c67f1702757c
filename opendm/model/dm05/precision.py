"""Which parts of the network compute in float32 whatever surrounds them."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor, nn

from opendm.constants.precision import (
    BF16_MIXED_PRECISION_POLICY,
    COMPUTE_DTYPE,
    FP32_MIXED_PRECISION_POLICY,
    PRECISION_POLICIES,
    TF32_ENABLED,
)
from opendm.errors import ConfigError


def check_policy(policy: str) -> str:
    """Return ``policy`` if it is one of the two.

    Raises:
        ConfigError: it is not.
    """
    if policy not in PRECISION_POLICIES:
        raise ConfigError(
            f"precision policy {policy!r} is unknown; allowed: {', '.join(PRECISION_POLICIES)}"
        )
    return policy


def linear_fp32(x: Float[Tensor, "*batch i"], linear: nn.Module) -> Float[Tensor, "*batch o"]:
    """Apply a linear layer, or the copy of one that trains, in float32 outside autocast."""
    with torch.autocast(x.device.type, enabled=False):
        bias = None if linear.bias is None else linear.bias.float()
        return F.linear(x.float(), linear.weight.float(), bias)


def conditioning_linear(
    x: Float[Tensor, "*batch i"], linear: nn.Module, policy: str
) -> Float[Tensor, "*batch o"]:
    """The time condition's layers: float32 under ``fp32_mixed``, else the weight's dtype."""
    if policy == FP32_MIXED_PRECISION_POLICY:
        return linear_fp32(x, linear)
    return linear(x.to(linear.weight.dtype))


def residual_dtype(weight: Tensor, policy: str) -> torch.dtype:
    """The dtype of the residual stream of a stack whose weights are like ``weight``.

    Under ``bf16_mixed`` weights may be stored in float32 and autocast gives bfloat16; the residual
    stream is bfloat16 then, as it is where FSDP hands out bfloat16 weights.
    """
    device = weight.device.type
    if policy == BF16_MIXED_PRECISION_POLICY and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


def dm05_autocast(device: torch.device) -> AbstractContextManager[None]:
    """The autocast of ``fp32_mixed``: float32 weights, bfloat16 products."""
    return torch.autocast(device.type, dtype=getattr(torch, COMPUTE_DTYPE))


def inference_autocast(device: torch.device, policy: str) -> AbstractContextManager[None]:
    """What surrounds sampling: ``fp32_mixed`` computes as in training, ``bf16_mixed`` as stored."""
    return dm05_autocast(device) if policy == FP32_MIXED_PRECISION_POLICY else nullcontext()


def configure_fp32_precision_runtime() -> None:
    """Turn TF32 off for the process, as ``fp32_mixed`` promises full float32 outside autocast.

    Hugging Face's ``TrainingArguments(tf32=True)`` sets ``torch.backends.fp32_precision``, which a
    backend's own setting overrides, so each is set. The older ``allow_tf32`` switches must stay
    untouched: torch refuses to read them once the two kinds of switches disagree.
    """
    precision = "tf32" if TF32_ENABLED else "ieee"
    torch.backends.fp32_precision = precision  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = precision  # type: ignore[attr-defined]
