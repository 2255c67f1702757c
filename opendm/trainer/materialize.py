"""From weights that rank 0 has read to the device of every rank, a few modules at a time.

Rank 0 holds tensors in CPU memory; the others need no more than their shapes, on the meta device.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def materialize(modules: Iterable[nn.Module], device: torch.device, *, frozen_too: bool) -> None:
    """Give what ``modules`` hold themselves rank 0's values on ``device``; a collective.

    Tensors travel one by one in the dtype that they were read in. Trainable weights then become
    float32: an update of 2.5e-5 is below bfloat16's rounding of a typical weight.

    Args:
        modules: on every rank the same; on rank 0 with values.
        device: of this rank.
        frozen_too: whether frozen weights become float32 as well.
    """
    done: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in done:
                is_master = parameter.requires_grad or frozen_too
                done[parameter] = _placed(parameter, device, is_master=is_master)
            module.register_parameter(name, done[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, _from_rank_0(buffer, device))


def _placed(parameter: nn.Parameter, device: torch.device, *, is_master: bool) -> nn.Parameter:
    data = _from_rank_0(parameter.data, device)
    if is_master:
        data = data.float()
    if not parameter.is_meta:
        parameter.data = data
        return parameter
    placed = nn.Parameter(data, requires_grad=parameter.requires_grad)
    vars(placed).update(vars(parameter))  # what optimizers have marked
    return placed


def _from_rank_0(tensor: Tensor, device: torch.device) -> Tensor:
    placed = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    if dist.is_initialized():
        dist.broadcast(placed, src=0)
    return placed
