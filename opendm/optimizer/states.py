"""Reading states: by name, from older versions, and without rounding."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from opendm.errors import ConfigError

Group = dict[str, Any]
State = dict[str, Any]

NOT_OPTIONS: Final = frozenset({
    "params", "param_names", "use_muon",
    "muon_names", "muon_shapes", "muon_matrix_shapes", "muon_param_infos",
})  # fmt: skip
"""Keys of a group that a state does not decide; the last four are of older versions."""


def adapt_state_dict(
    state_dict: dict[str, Any], groups: Sequence[Group]
) -> tuple[list[Group], dict[nn.Parameter, State]]:
    """Saved options in today's groups, and saved states by today's parameter.

    Names decide which state belongs to which parameter; groups that were saved without names go by
    order. Groups hold ``param_names`` and ``params``.

    Raises:
        ConfigError: a parameter is missing in the state, or the state has others.
    """
    saved_groups = state_dict["param_groups"]
    found = _find(saved_groups, groups)
    new_groups, by_param, next_id = [], {}, 0
    for group in groups:
        options: Group = {}
        ids = []
        for name, param in zip(group["param_names"], group["params"], strict=True):
            saved_id, saved_group = found[name]
            options = options or saved_group
            by_param[param] = state_dict["state"].get(saved_id, {})
            ids.append(next_id)
            next_id += 1
        kept = {key: value for key, value in options.items() if key not in NOT_OPTIONS}
        today = {key: value for key, value in group.items() if key != "params"}
        new_groups.append({**today, **kept, "params": ids})
    return new_groups, by_param


def _find(saved: Sequence[Group], groups: Sequence[Group]) -> dict[str, tuple[Any, Group]]:
    """Today's name to the saved id and group."""
    named: dict[str, tuple[Any, Group]] = {}
    for number, group in enumerate(saved):
        names = group.get("param_names") or group.get("muon_names")
        if names is None and number < len(groups):
            names = groups[number]["param_names"]  # an older state: order decides
        if names is None or len(names) != len(group["params"]):
            raise ConfigError(
                f"group {number} of the optimizer state holds {len(group['params'])} parameters "
                f"and no names, and this optimizer's holds {len(names or [])}; load it into the "
                "model that it was saved from"
            )
        named |= {n: (i, group) for n, i in zip(names, group["params"], strict=True)}
    wanted = [name for group in groups for name in group["param_names"]]
    check_same_names(wanted, named)
    return named


def check_same_names(wanted: Iterable[str], saved: Iterable[str]) -> None:
    """Compare the names of parameters with those of a saved state.

    Raises:
        ConfigError: they differ; says how many and which.
    """
    wanted, saved = set(wanted), set(saved)
    missing, unknown = wanted - saved, saved - wanted
    if missing or unknown:
        raise ConfigError(
            f"the optimizer state is of another model: {len(missing)} parameters have no state "
            f"({', '.join(sorted(missing)[:3]) or 'none'}), {len(unknown)} states have no "
            f"parameter ({', '.join(sorted(unknown)[:3]) or 'none'}); load the state of this very "
            "model"
        )


def check_shapes(state: State, saved: State) -> None:
    """Compare the tensors of a saved state with those that it is for.

    Raises:
        ConfigError: a tensor has another shape.
    """
    saved = _with_todays_keys(saved)
    for key in state.keys() & saved.keys():
        shape, wanted = tuple(torch.as_tensor(saved[key]).shape), tuple(state[key].shape)
        if shape != wanted:
            raise ConfigError(
                f"{key} of the optimizer state has shape {shape}, and this rank holds {wanted}; "
                "for another number of ranks or another engine use save_optimizer_state and "
                "load_optimizer_state of opendm.optimizer"
            )


def restore_state(state: State, saved: State, weight: Tensor) -> None:
    """Copy ``saved`` into the tensors of ``state``, bit for bit.

    Keys that this parameter does not use are left out; a momentum may be called
    ``momentum_buffer``. What was not saved starts anew, a master from the weight.
    """
    saved = _with_todays_keys(saved)
    for key, tensor in state.items():
        if key in saved:
            tensor.copy_(torch.as_tensor(saved[key]))
        elif key == "master":
            tensor.copy_(weight.detach())
        else:
            tensor.zero_()


def _with_todays_keys(saved: State) -> State:
    return {"exp_avg": saved["momentum_buffer"], **saved} if "momentum_buffer" in saved else saved


def refuse_fsdp1_formats(*, is_flat: bool) -> None:
    """Refuse ``FSDP.optim_state_dict``, which asks every parameter for the same state keys.

    Torch would fail inside with a message that names nothing, and its distributed checkpoint takes
    that way for FSDP1. Can go when it gathers each parameter by its own keys.

    Args:
        is_flat: whether any parameter is a flat shard of FSDP1.

    Raises:
        ConfigError: that is who asks.
    """
    frame = sys._getframe(1)  # noqa: SLF001 - torch hands us nothing that names the caller
    while is_flat and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in ("optim_state_dict", "_get_optim_state_dict"):
            raise ConfigError(
                "FSDP.optim_state_dict cannot hold MuonAdamW's state: it wants the same keys for "
                "every parameter, and Muon's matrices have no exp_avg_sq. Use "
                "opendm.optimizer.save_optimizer_state(optimizer, folder) and "
                "load_optimizer_state, which work on every engine and number of ranks"
            )
