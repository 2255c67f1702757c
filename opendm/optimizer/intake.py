"""From a model, named parameters or ready groups to the groups of the optimizer."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from opendm.errors import ConfigError
from opendm.optimizer.placement import Locator
from opendm.optimizer.selection import (
    SHAPE_MARK,
    Predicate,
    canonical_name,
    check_is_matrix,
    is_default_muon_parameter,
    nothing_selected,
)

NamedParameters = Iterable[tuple[str, nn.Parameter]]
Group = dict[str, Any]


def every_parameter(params: nn.Module | Sequence[Any]) -> Iterator[nn.Parameter]:
    """All parameters in what was given, in any of its three forms."""
    if isinstance(params, nn.Module):
        yield from params.parameters()
        return
    for item in params:
        if isinstance(item, nn.Parameter):
            yield item
        elif isinstance(item, tuple):
            yield item[1]
        elif isinstance(item, dict) and not isinstance(item["params"], torch.Tensor):
            yield from every_parameter(list(item["params"]))


def parameter_groups(
    params: nn.Module | Sequence[Any],
    locator: Locator,
    predicate: Predicate | None,
) -> list[Group]:
    """Groups with ``params`` as pairs of name and parameter, and ``use_muon``; AdamW's first.

    Raises:
        ConfigError: nothing is selected for Muon, or something that is no matrix, or a name twice.
    """
    if isinstance(params, nn.Module):
        groups = _split(params.named_parameters(), locator, predicate)
    else:
        if not params:
            raise ConfigError("no parameters were given; give a model or its named_parameters()")
        if all(isinstance(item, dict) for item in params):
            groups = [_named_group(group, number) for number, group in enumerate(params)]
        elif all(isinstance(item, tuple) for item in params):
            groups = _split(params, locator, predicate)
        else:
            raise ConfigError(
                "MuonAdamW cannot tell matrices by parameters without names; give the model, "
                "model.named_parameters(), or groups with params and use_muon"
            )
    _check_names(groups)
    for name, param in (pair for g in groups if g["use_muon"] for pair in g["params"]):
        check_is_matrix(name, locator.locate(name, param).shape)
        if not param.is_floating_point():
            raise ConfigError(f"Muon cannot take {name} of {param.dtype}; it takes real numbers")
    return [group for group in groups if group["params"]]


def _split(named: NamedParameters, locator: Locator, predicate: Predicate | None) -> list[Group]:
    first_names: dict[nn.Parameter, str] = {}  # tied weights have several
    for name, param in named:
        if param.requires_grad:
            first_names.setdefault(param, canonical_name(name))
    trainable = [(name, param) for param, name in first_names.items()]
    is_marked = any(SHAPE_MARK in vars(param) for _, param in trainable)
    muon: list[tuple[str, nn.Parameter]] = []
    adamw: list[tuple[str, nn.Parameter]] = []
    for name, param in trainable:
        if predicate is None and is_marked:
            chosen = SHAPE_MARK in vars(param)
        else:
            whole = _without_data(locator.locate_if_possible(param).shape, param.dtype)
            chosen = (predicate or is_default_muon_parameter)(name, whole)
        (muon if chosen else adamw).append((name, param))
    if not muon:
        raise ConfigError(nothing_selected([name for name, _ in trainable]))
    return [{"params": adamw, "use_muon": False}, {"params": muon, "use_muon": True}]


def _without_data(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """A parameter of the whole shape: a predicate sees matrices, not shards."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))


def _named_group(group: Group, number: int) -> Group:
    if "use_muon" not in group:
        raise ConfigError(
            f"parameter group {number} does not say use_muon; give True for matrices that Muon "
            "takes and False for what AdamW takes"
        )
    given = group["params"]
    params = [given] if isinstance(given, torch.Tensor) else list(given)
    names: Iterator[str] = iter(group.get("param_names", []))
    named = [
        (canonical_name(item[0]), item[1])
        if isinstance(item, tuple)
        else (next(names, f"group{number}.{index}"), item)
        for index, item in enumerate(params)
    ]
    return {**group, "params": named, "use_muon": bool(group["use_muon"])}


def _check_names(groups: Iterable[Group]) -> None:
    seen: set[str] = set()
    for name in (name for group in groups for name, _ in group["params"]):
        if name in seen:
            raise ConfigError(
                f"two parameters are called {name}; states are kept by name, so names must differ"
            )
        seen.add(name)
