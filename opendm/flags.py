"""Command-line flags as people write them: any case for enums, near misses for what is wrong."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import tyro


def enum_flag(kind: type[Enum]) -> Any:
    """Annotation for an enum flag that takes members' values and names, in any case."""
    members = {member.value: member for member in kind}
    names = {member.name.lower(): member for member in kind}
    return _flag(lambda text: names.get(text.lower()) or members[text.lower()],
                 lambda member: member.value, tuple(members))  # fmt: skip


def choice_flag(*choices: str) -> Any:
    """Annotation for a string flag with fixed values, in any case."""
    return _flag(lambda text: {choice.lower(): choice for choice in choices}[text.lower()],
                 str, choices)  # fmt: skip


def unknown_flag(config: Any, argv: Sequence[str]) -> str | None:
    """One line about the first flag that ``config`` (a dataclass instance) does not have."""
    known, open_ended = _flags_of(config, "")
    for word in argv:
        flag = word.split("=")[0].replace("_", "-")
        if not flag.startswith("--") or flag in known or flag == "--help":
            continue
        if not flag.startswith(tuple(open_ended)):
            near = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}? " if near else ""
            return f"unknown flag {word.split('=')[0]}; {hint}--help lists all flags"
    return None


def _flags_of(config: Any, prefix: str) -> tuple[set[str], list[str]]:
    """Flags of a dataclass and of those in it, and the beginnings that take any ending."""
    known, open_ended = set(), []
    for item in fields(config):
        value, name = getattr(config, item.name), item.name.replace("_", "-")
        if is_dataclass(value):
            inner = _flags_of(value, f"{prefix}{name}.")
            known |= inner[0]
            open_ended += inner[1]
        elif isinstance(value, dict):
            open_ended.append(f"--{prefix}{name}")
        else:
            known.add(f"--{prefix}{name}")
            if isinstance(value, bool):
                known.add(f"--{prefix}no-{name}")
    return known, open_ended


def _flag(
    parse: Callable[[str], Any], show: Callable[[Any], str], allowed: Sequence[str]
) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    def from_args(args: list[str]) -> Any:
        try:
            return parse(args[0])
        except KeyError:
            near = difflib.get_close_matches(args[0], allowed, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{args[0]!r} is not one of {', '.join(allowed)}{hint}") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(allowed) + "}",
        instance_from_str=from_args,
        is_instance=lambda value: isinstance(value, str | Enum),
        str_from_instance=lambda value: [show(value)],
    )
