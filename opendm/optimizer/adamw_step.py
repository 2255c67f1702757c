"""AdamW over whole lists of pieces, in float32 whatever the weights are stored in."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opendm.errors import ConfigError
from opendm.optimizer.masters import needs_master, reconcile_
from opendm.optimizer.placement import local, local_gradient
from opendm.optimizer.update_rules import AdamWTensors, adamw_
from opendm.optimizer.whole_vectors import cut_into_whole_vectors, put_back

States = Mapping[Tensor, dict[str, Tensor]]


def step_adamw(group: dict[str, Any], states: States, most_bytes: int) -> None:
    """One step of the parameters of ``group`` that have a gradient.

    Half-precision weights without a master are decayed and updated in the public framework's order,
    and so rounded twice.

    Args:
        group: options and parameters.
        states: ``exp_avg``, ``exp_avg_sq``, ``step`` and perhaps ``master`` of each parameter.
        most_bytes: of float32 copies that are alive at a time.

    Raises:
        ConfigError: a gradient is sparse.
    """
    active = {}
    for param in group["params"]:
        grad = checked_gradient(param)
        if grad is not None and grad.numel():
            active[param] = grad
        elif grad is not None:
            states[param]["step"].add_(1)  # of an empty shard: all ranks count alike
    rounded = [p for p in active if needs_master(p) and "master" not in states[p]]
    exact = [p for p in active if not needs_master(p) or "master" in states[p]]
    for params in _lists(exact, most_bytes):
        _update(params, active, states, group, group["weight_decay"])
    for params in _lists(rounded, most_bytes):
        for param in params:
            local(param.detach()).mul_(1 - group["lr"] * group["weight_decay"])
        _update(params, active, states, group, 0.0)


def checked_gradient(param: nn.Parameter) -> Tensor | None:
    """The local gradient, if there is one.

    Raises:
        ConfigError: it is sparse, or of another size.
    """
    grad = local_gradient(param)
    if grad is not None and grad.is_sparse:
        raise ConfigError(
            f"AdamW got a sparse gradient for a parameter of shape {tuple(param.shape)}; make it "
            "dense, for an embedding by sparse=False"
        )
    return grad


def _lists(params: Sequence[nn.Parameter], most_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Lists as long as their float32 copies allow: all at once where there are none."""
    chosen: list[nn.Parameter] = []
    copied = 0
    for param in params:
        chosen.append(param)
        copied += 4 * local(param).numel() * needs_master(param)
        if copied > most_bytes:
            yield chosen
            chosen, copied = [], 0
    if chosen:
        yield chosen


def _update(
    params: Sequence[nn.Parameter],
    grads: Mapping[nn.Parameter, Tensor],
    states: States,
    group: dict[str, Any],
    weight_decay: float,
) -> None:
    tensors = [_tensors(param, grads[param], states[param]) for param in params]
    whole, rests = cut_into_whole_vectors(tensors)
    adamw_(whole, lr=group["lr"], betas=group["betas"], eps=group["eps"], weight_decay=weight_decay)
    put_back(rests)
    for param, updated in zip(params, tensors, strict=True):
        if needs_master(param):
            local(param.detach()).copy_(updated.weight)


def _tensors(param: nn.Parameter, grad: Tensor, state: dict[str, Tensor]) -> AdamWTensors:
    weight = local(param.detach())
    target = weight
    if "master" in state:
        target = local(state["master"])
        reconcile_(target, weight)
    elif needs_master(weight):
        target = weight.to(torch.float32)
    if grad.stride() != target.stride():  # the fused kernel walks all tensors in memory's order
        grad = torch.empty_like(target).copy_(grad)
    return AdamWTensors(
        target,
        grad.to(target.dtype),
        local(state["exp_avg"]),
        local(state["exp_avg_sq"]),
        state["step"],
    )
