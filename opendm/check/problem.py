"""``Problem``: one thing that is wrong, where, and how bad it is."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

Severity = Literal["error", "warning"]

RECORD: Final = "record"
"""The field of a problem that concerns a whole line."""
FILE: Final = "file"
"""The field of a problem that concerns a whole file."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding; its text form is ``file:line field reason``."""

    where: str
    """``file:line``, a file, or the name of a setting."""
    field: str
    reason: str
    severity: Severity = "error"
    code: str = "other"
    """The class of the problem, the same for all findings of one kind."""

    def __str__(self) -> str:
        return f"{self.where} {self.field} {self.reason}"

    @property
    def is_error(self) -> bool:
        """Whether training must not start."""
        return self.severity == "error"

    def as_warning(self) -> "Problem":
        """The same finding, of something that will be left out."""
        return replace(self, severity="warning")


def errors_of(problems: Iterable[Problem]) -> list[Problem]:
    """Those that stop a run."""
    return [problem for problem in problems if problem.is_error]


def count_codes(problems: Iterable[Problem]) -> dict[str, int]:
    """How many problems there are of each class, the most frequent first."""
    return dict(Counter(problem.code for problem in problems).most_common())


def to_json(problems: Sequence[Problem], counts: dict[str, Any]) -> str:
    """All findings and the counts of what was looked at, as one JSON document."""
    content = {
        "errors": len(errors_of(problems)),
        "warnings": len(problems) - len(errors_of(problems)),
        "counts": counts,
        "codes": count_codes(problems),
        "problems": [asdict(problem) for problem in problems],
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
