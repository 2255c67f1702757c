"""Names of layers that get adapters or train in full, from what a configuration calls them."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from torch import nn

from opendm.errors import ConfigError

ALL_LINEAR: Final = "all-linear"
HEAD: Final = "lm_head"
MODULATOR_ALIASES: Final = (
    "dm05_time_modulators",
    "dm05_action_time_modulators",
    "action_time_modulators",
)
MODULATORS: Final = ("input_time_modulators", "mlp_time_modulators", "final_time_modulator")
WHOLE_ONLY: Final = (
    "action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out", *MODULATORS,
)  # fmt: skip
"""Layers of actions and time compute apart, in float32 and outside autocast: no adapter there."""


def matches(module_name: str, target: str) -> bool:
    """Whether PEFT takes a module for a target: by its whole name or the end of it."""
    return module_name == target or module_name.endswith(f".{target}")


def resolve(
    model: nn.Module, target_modules: str, modules_to_save: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Sorted names, as PEFT takes them, of layers with adapters and of modules that train whole.

    Raises:
        ConfigError: a name fits no module, or no layer that can have an adapter.
    """
    modules = dict(model.named_modules())
    linear = {name: m for name, m in modules.items() if isinstance(m, nn.Linear)}
    saved = sorted({name for given in modules_to_save for name in _expanded(given, modules)})
    for name in saved:
        if not any(matches(module, name) for module in modules):
            raise _unknown("modules-to-save", name, modules)
    if target_modules == ALL_LINEAR:
        names = {last_part(name) for name in linear if last_part(name) != HEAD}
        return sorted(name for name in names if name not in saved and not _is_whole(name)), saved
    targets = set()
    for given in (part.strip() for part in target_modules.split(",")):
        for name in _expanded(given, modules) if given else ():
            if not any(matches(module, name) for module in linear):
                raise _unknown("target-modules", name, linear)
            if name in saved:
                continue
            if _is_whole(name):
                raise ConfigError(
                    f"--model-config.lora-config.target-modules {name}: the layers of actions and "
                    "time take no adapter; name them in --model-config.lora-config.modules-to-save"
                )
            targets.add(name)
    return sorted(targets), saved


def last_part(name: str) -> str:
    """The last component of a module's name; the last two where the last is a number."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def _is_whole(name: str) -> bool:
    return any(part in WHOLE_ONLY for part in name.split("."))


def _expanded(name: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """What an alias stands for; a name that is none stands for itself."""
    if name not in MODULATOR_ALIASES:
        return [name]
    found = {last_part(module) for module in modules}
    return [part for part in found if part.split(".")[0] in MODULATORS and _is_leaf(part)]


def _is_leaf(part: str) -> bool:
    return part == MODULATORS[-1] or part[-1].isdigit()


def _unknown(flag: str, name: str, modules: Iterable[str]) -> ConfigError:
    known = sorted({last_part(module) for module in modules if module})
    nearest = difflib.get_close_matches(last_part(name), known, n=5, cutoff=0.4) or known[:8]
    return ConfigError(
        f"--model-config.lora-config.{flag} {name!r} fits no module; the nearest are: "
        f"{', '.join(nearest)}"
    )
