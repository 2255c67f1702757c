"""Command-line values as people write them: any case for enums, near misses for choices."""

import difflib
from collections.abc import Callable, Sequence
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
