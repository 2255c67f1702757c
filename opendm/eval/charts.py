"""Line charts as inline SVG: one string, no scripts, no fonts, no network."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

PALETTE = ("#3b82f6", "#e8710a", "#14a37f", "#a855f7", "#dc4c64", "#8a8f98")
"""Mid-tones, readable on white as well as on near-black."""
LEFT, RIGHT, BOTTOM, TITLE_HEIGHT, LEGEND_ROW = 70, 14, 42, 30, 16
"""Margins around the plot, in SVG units."""
CHARACTER_WIDTH = 6.3
"""Generous mean width of a legend character at 11 units; SVG cannot measure its own text."""
PADDING = 0.05
"""Empty share of the vertical range above and below the data."""

Number = int | float
Values = Sequence[Number | None] | np.ndarray
Run = list[tuple[float, float]]
"""Points without a gap between them."""


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One named line."""

    name: str
    x: Values
    y: Values
    """As long as `x`; None, NaN and infinities break the line."""
    colour: str | None = None
    """Any CSS colour; None takes the next of `PALETTE`."""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values onto SVG coordinates: `low` lands on `start`, `high` on `end`."""

    low: Number
    high: Number
    start: Number
    end: Number
    is_log: bool = False

    def place(self, value: Number) -> float:
        """SVG coordinate of a value."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    width: int = 520,
    height: int = 260,
    log_y: bool = False,
) -> str:
    """Draw lines over a grid; on a logarithmic axis values of zero and below are missing."""
    lines = [_runs(one, log_y=log_y) for one in series]
    colours = [one.colour or PALETTE[i % len(PALETTE)] for i, one in enumerate(series)]
    legend, legend_rows = _legend(series, colours, width)
    middle = (LEFT + width - RIGHT) / 2
    top, bottom = TITLE_HEIGHT + LEGEND_ROW * legend_rows, height - BOTTOM
    parts = [
        _open_tag(title, width, height),
        _text(LEFT, 18, title, "start", 'font-size="13" font-weight="600"'),
        legend,
        _text(middle, height - 8, x_label, "middle"),
        _text(-(top + bottom) / 2, 13, y_label, "middle", 'transform="rotate(-90)"'),
    ]
    points = [point for runs in lines for run in runs for point in run]
    if points:
        xs, ys = zip(*points, strict=True)
        x_axis = Axis(*value_range(xs, 0.0, log=False), LEFT, width - RIGHT)
        y_axis = Axis(*value_range(ys, PADDING, log=log_y), bottom, top, is_log=log_y)
        parts.append(_grid(x_axis, y_axis))
        parts += [_line(*one, x_axis, y_axis) for one in zip(series, lines, colours, strict=True)]
    else:
        parts.append(_text(middle, (top + bottom) / 2, "no data", "middle"))
    return "".join([*parts, "</svg>"])


def value_range(values: Sequence[Number], padding: float, *, log: bool) -> tuple[float, float]:
    """Limits around the values, never of zero width; `padding` is a share of the range."""
    values = [math.log10(value) for value in values] if log else values
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        half = 0.1 if log else 0.1 * abs(low) or 1.0
        low, high = low - half, high + half
    low, high = low - padding * (high - low), high + padding * (high - low)
    return (10**low, 10**high) if log else (low, high)


def linear_ticks(low: Number, high: Number, target: int = 7) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high]; `target` or a few fewer."""
    rough = (high - low) / target
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * k for k in (1, 2, 5) if power * k >= rough * 0.999), power * 10)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: Number, high: Number) -> list[float]:
    """Powers of ten inside [low, high]; 1, 2, 5 over few decades; linear ticks below one decade."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, len(decades) // 6)
    tens = [10.0**k for k in decades if k % every == 0 and low <= 10.0**k <= high]
    fine = [m * 10.0**k for k in decades for m in (1, 2, 5) if low <= m * 10.0**k <= high]
    return next((ticks for ticks in (tens, fine) if len(ticks) >= 3), linear_ticks(low, high))


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Labels with as many digits as tell neighbours apart, in one notation for the axis."""
    if len(ticks) < 2 or ticks[-1] - ticks[-2] > 1.5 * (ticks[1] - ticks[0]):  # not evenly spaced
        return [f"{tick:.6g}" for tick in ticks]
    step, largest = ticks[1] - ticks[0], max(abs(tick) for tick in ticks)
    exponent = math.floor(math.log10(step) + 1e-9)
    if 1e-3 <= largest < 1e7:
        return [f"{tick:.{max(0, -exponent)}f}" for tick in ticks]
    digits = max(1, math.floor(math.log10(largest)) - exponent + 1)
    return [f"{tick:.{digits}g}" for tick in ticks]


def _open_tag(title: str, width: int, height: int) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img" font-family="system-ui, sans-serif" font-size="11" fill="currentColor"'
        f' style="max-width:100%;height:auto" aria-label="{escape(title)}">'
    )


def _runs(series: Series, *, log_y: bool) -> list[Run]:
    """Unbroken stretches of drawable points."""
    runs: list[Run] = [[]]
    floor = 0.0 if log_y else -math.inf
    for x, y in zip(series.x, series.y, strict=True):
        if x is not None and y is not None and math.isfinite(x) and floor < y < math.inf:
            runs[-1].append((float(x), float(y)))
        else:
            runs.append([])
    return [run for run in runs if run]


def _line(series: Series, runs: Sequence[Run], colour: str, x_axis: Axis, y_axis: Axis) -> str:
    pieces = []
    for run in runs:
        places = [f"{x_axis.place(x):.1f} {y_axis.place(y):.1f}" for x, y in run]
        # A lone point is a line of no length, which the round cap turns into a dot.
        pieces.append("M" + "L".join(places) + ("h0" if len(places) == 1 else ""))
    path = f'<path d="{"".join(pieces)}" {_stroke(series, colour)}>'
    return f"{path}<title>{escape(series.name)}</title></path>"


def _stroke(series: Series, colour: str) -> str:
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    ends = 'stroke-linejoin="round" stroke-linecap="round"'
    return f'fill="none" stroke="{escape(colour)}" stroke-width="1.6" {ends}{dash}'


def _grid(x_axis: Axis, y_axis: Axis) -> str:
    x_ticks, low, high = linear_ticks(x_axis.low, x_axis.high), y_axis.low, y_axis.high
    y_ticks = log_ticks(low, high) if y_axis.is_log else linear_ticks(low, high)
    rules, labels = [f"M{x_axis.start} {y_axis.start}H{x_axis.end}"], []
    for tick, label in zip(x_ticks, tick_labels(x_ticks), strict=True):
        x = x_axis.place(tick)
        rules.append(f"M{x:.1f} {y_axis.start}V{y_axis.end}")
        labels.append(_text(x, y_axis.start + 15, label, "middle", 'opacity="0.75"'))
    for tick, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
        y = y_axis.place(tick)
        rules.append(f"M{x_axis.start} {y:.1f}H{x_axis.end}")
        labels.append(_text(x_axis.start - 6, y + 4, label, "end", 'opacity="0.75"'))
    rule = f'<path d="{"".join(rules)}" fill="none" stroke="currentColor" stroke-opacity="0.15"/>'
    return rule + "".join(labels)


def _legend(series: Sequence[Series], colours: Sequence[str], width: int) -> tuple[str, int]:
    """Names in rows that fit the width, and the number of rows; one line needs no legend."""
    if len(series) < 2:
        return "", 0
    parts, x, row = [], float(LEFT), 0
    for one, colour in zip(series, colours, strict=True):
        room = 26 + CHARACTER_WIDTH * len(one.name) + 12
        if x > LEFT and x + room > width - RIGHT:
            x, row = float(LEFT), row + 1
        y = TITLE_HEIGHT + 4 + LEGEND_ROW * row
        parts.append(f'<path d="M{x:.1f} {y - 4}h20" {_stroke(one, colour)}/>')
        parts.append(_text(x + 26, y, one.name, "start"))
        x += room
    return "".join(parts), row + 1


def _text(x: Number, y: Number, text: str, anchor: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'
