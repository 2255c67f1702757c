"""The Euler loop over the suffix, on a prefix that was computed once."""

import torch
from jaxtyping import Float
from torch import Tensor

from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.flow_matching import sampling_times
from opendm.model.dm05.prefix import Prefix
from opendm.shapes import ActionMask, Actions


def integrate(
    model: DM05ForConditionalGeneration,
    prefix: Prefix,
    noise: Actions,
    mask: ActionMask,
    *,
    num_steps: int,
    given: Float[Tensor, "B K A"] | None = None,
) -> Actions:
    """From noise (time 1) to an action chunk (time 0) in ``num_steps`` equal steps.

    With ``given``, the first K actions of the chunk are known: at every time t they are put on the
    straight line from their noise to them, ``t * noise + (1 - t) * given``, so that the field sees
    them as it saw actions in training; the result holds them exactly. This is the replacement
    ("inpainting") form of guidance, which needs no gradient; Black et al. 2025, arXiv:2506.07339,
    correct the velocity by a gradient instead and weigh a soft transition after the K actions.

    Args:
        model: what gives the velocity.
        prefix: of the same observations.
        noise: the start.
        mask: dimensions that are sampled; applied before each step.
        num_steps: steps of the integration.
        given: normalised actions that the chunk begins with.
    """
    count = 0 if given is None else given.shape[1]
    x = noise
    for time in sampling_times(num_steps):
        if given is not None:
            held = time * noise[:, :count] + (1.0 - time) * given
            x = torch.cat([held, x[:, count:]], dim=1)
        x = x * mask
        times = torch.full((x.shape[0],), time, dtype=torch.float64, device=x.device)
        x = x - model.model.velocity(x, times, prefix) / num_steps
    return x if given is None else torch.cat([given.to(x.dtype), x[:, count:]], dim=1)
