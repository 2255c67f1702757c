"""What a check found and what it looked at, as text for people."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from opendm.check.problem import Problem, count_codes, errors_of, to_json

MAX_SHOWN: Final = 100
"""Problems of each severity that are printed; the JSON file has all."""


@dataclass(slots=True)
class CheckReport:
    """Findings, counts and a table; filled step by step."""

    problems: list[Problem] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str]] = field(default_factory=list)
    """The summary: a name and what was found."""

    def add(self, problems: Iterable[Problem]) -> None:
        """Findings of one step."""
        self.problems += problems

    def count(self, **numbers: int) -> None:
        """Add to counts, which are those of all datasets together."""
        for name, number in numbers.items():
            self.counts[name] = self.counts.get(name, 0) + number

    @property
    def errors(self) -> list[Problem]:
        """What stops a run."""
        return errors_of(self.problems)

    @property
    def warnings(self) -> list[Problem]:
        """What does not."""
        return [problem for problem in self.problems if not problem.is_error]

    def text(self) -> str:
        """Table and problems, errors last because they are read first in a terminal."""
        lines = []
        for label, problems in (("warning", self.warnings), ("error", self.errors)):
            lines += [f"{label}: {problem}" for problem in problems[:MAX_SHOWN]]
            if len(problems) > MAX_SHOWN:
                lines.append(f"{label}: {len(problems) - MAX_SHOWN} more; --json writes all")
        codes = ", ".join(f"{code} {count}" for code, count in count_codes(self.problems).items())
        total = f"{len(self.errors)} errors, {len(self.warnings)} warnings"
        rows = [*self.rows, ("problems", f"{total}{': ' if codes else ''}{codes}")]
        width = max(len(name) for name, _ in rows)
        return "\n".join([*lines, *(f"{name:{width}}  {value}" for name, value in rows)])

    def json(self) -> str:
        """All of it for programs."""
        return to_json(self.problems, self.counts)
