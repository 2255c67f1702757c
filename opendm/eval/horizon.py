"""Error by step of the action chunk: one table and one chart per kind of dimension."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from opendm.eval.charts import Series, line_chart
from opendm.eval.numbers import display_unit, format_number

MAX_COLUMNS: Final = 10
"""Steps of the table; the chart and ``open_loop.json`` have them all."""


@dataclass(frozen=True, slots=True, eq=False)
class HorizonErrors:
    """Mean absolute error of one kind of dimension, in ``unit``."""

    kind: str
    """``position``, ``rotation``, ``joint``, ``gripper`` or ``action``."""
    unit: str
    overall: dict[str, float]
    """Over all steps, by policy."""
    by_step: dict[str, np.ndarray]
    """Errors ``[T]`` of the first to the last step, by policy; NaN where nothing was recorded."""


def render_horizon(kinds: Sequence[HorizonErrors]) -> str:
    """Tables and charts as HTML; a row and a curve per policy."""
    return "".join(_table(kind) + _chart(kind) for kind in kinds)


def shown_steps(num_steps: int) -> list[int]:
    """Up to :data:`MAX_COLUMNS` steps from the first to the last, counted from 0."""
    places = np.linspace(0, num_steps - 1, min(MAX_COLUMNS, num_steps))
    return places.round().astype(int).tolist()


def _table(errors: HorizonErrors) -> str:
    unit, factor = display_unit(errors.unit)
    steps = shown_steps(max(map(len, errors.by_step.values())))
    names = ["policy", "all steps", *(f"step {step + 1}" for step in steps)]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = "".join(
        _row(name, [factor * errors.overall[name], *(factor * values[steps])])
        for name, values in errors.by_step.items()
    )
    return (
        f"<h3>{escape(_heading(errors.kind, unit))}</h3>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(name: str, values: Sequence[float]) -> str:
    cells = "".join(f"<td>{format_number(float(value))}</td>" for value in values)
    return f"<tr><td>{escape(name)}</td>{cells}</tr>"


def _chart(errors: HorizonErrors) -> str:
    unit, factor = display_unit(errors.unit)
    lines = [
        Series(name, np.arange(1, len(values) + 1), factor * values)
        for name, values in errors.by_step.items()
    ]
    chart = line_chart(
        lines,
        title=f"{errors.kind.capitalize()} error by step",
        x_label="step of the chunk",
        y_label=unit or errors.kind,
    )
    return f'<div class="charts">{chart}</div>'


def _heading(kind: str, unit: str) -> str:
    return f"{kind.capitalize()} error by step" + (f", {unit}" if unit else "")


def as_figures(kinds: Sequence[HorizonErrors]) -> dict[str, Mapping[str, object]]:
    """By kind, its unit and the errors of every step as plain lists; NaN stays NaN."""
    return {
        kind.kind: {
            "unit": kind.unit,
            "overall": kind.overall,
            "by_step": {name: values.tolist() for name, values in kind.by_step.items()},
        }
        for kind in kinds
    }
