"""Float32 masters of half-precision weights.

At a learning rate of 1e-4 most bfloat16 weights are so much larger than the update that their sum
rounds back to the same weight. The master collects such updates, and is rounded once a step.
"""

import torch
from jaxtyping import Float, Float32
from torch import Tensor


def needs_master(weight: Tensor) -> bool:
    """Whether a weight is stored in half precision."""
    return weight.dtype in (torch.bfloat16, torch.float16)


def reconcile_(master: Float32[Tensor, "*piece"], weight: Float[Tensor, "*piece"]) -> None:
    """Take over each weight that somebody has changed since the last step.

    Weights can be loaded after the optimizer was made; the masters would undo that.
    """
    unchanged = master.to(weight.dtype) == weight
    master.copy_(torch.where(unchanged, master, weight.to(master.dtype)))
