"""The options of parameter groups by the name of the parameter, as values that JSON knows."""

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from opendm.optimizer.states import NOT_OPTIONS

NOT_SAVED: Final = NOT_OPTIONS | {"foreach", "fused", "capturable", "differentiable"}
"""Beside what no state decides, the ways of computing: they belong to the machine."""


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options, tensors as numbers."""
    return {
        key: float(value) if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in NOT_SAVED
    }


def restore_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """The inverse of :func:`plain_options`; tensors and tuples stay what they are."""
    for key, value in saved.items():
        today = group.get(key)
        if isinstance(today, Tensor):
            group[key] = today.new_tensor(value)
        else:
            group[key] = tuple(value) if isinstance(today, tuple) else value
