"""The report of one training run: a single HTML file that opens offline, anywhere."""

import math
import os
import statistics
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

from opendm.errors import DataError
from opendm.eval.charts import PALETTE, Series, line_chart
from opendm.eval.horizon import HorizonErrors, render_horizon
from opendm.eval.numbers import MISSING, Number, display_unit, format_number

SMOOTHING_SPAN = 20
"""Logged lines over which the smoothed loss averages, as the span of an exponential mean."""
BLUE, *_, GREY = PALETTE

STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1d2430;--soft:#5d6778;
--rule:#e1e5eb;--accent:#2563eb;--good:#13795b;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--page:#0f1319;--card:#181e27;--text:#e5e9f0;
--soft:#98a3b5;--rule:#2b3442;--accent:#7aa7ff;--good:#4cc79c;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);line-height:1.5;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:1.7rem;line-height:1.2;margin:8px 0 16px;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:0 0 12px}
h3{font-size:.9rem;margin:16px 0 6px;color:var(--soft);font-weight:600}
section{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:20px;
margin:0 0 16px}
p{margin:0 0 12px;color:var(--soft);overflow-wrap:anywhere}
.summary{margin:0;padding:0;list-style:none}
.summary li{padding:6px 0 6px 12px;border-left:3px solid var(--accent);margin:6px 0;
overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:7px 10px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left}
.pairs td,.pairs th{text-align:left;white-space:normal;overflow-wrap:anywhere}
.pairs th{width:32%}
.errors td:nth-child(3),.errors td:last-child{font-weight:600}
.good{color:var(--good)}.bad{color:var(--bad)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:16px}
.charts svg{width:100%}
.strip{display:flex;gap:8px;overflow-x:auto;padding-bottom:6px}
figure{margin:0;flex:none;text-align:center;color:var(--soft);font-size:.78rem}
figure img{display:block;height:130px;border-radius:8px;background:var(--rule)}
"""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Mean absolute error of one action dimension, in `unit`."""

    dimension: str
    unit: str
    trained: Number
    baselines: dict[str, Number]
    """Error of each policy to beat, by name, such as "hold last state"."""


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeView:
    """What the policy saw, said and should have said over one episode."""

    name: str
    task: str
    dimensions: list[str]
    units: list[str]
    """Unit of each dimension; metres are shown as millimetres."""
    predicted: np.ndarray
    """Actions [T, D]; NaN where nothing was predicted."""
    true: np.ndarray
    """Actions [T, D]."""
    frames: dict[str, list[tuple[int, bytes]]]
    """Frame index and JPEG file of the images to show, by camera."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything on the page."""

    title: str
    settings: dict[str, str]
    versions: dict[str, str]
    training: list[dict[str, Number | None]]
    """Lines of metrics.jsonl; absent keys and None are gaps."""
    errors: list[ErrorRow]
    summary: list[str]
    """One claim a line, shown on top."""
    episodes: list[EpisodeView] = field(default_factory=list)
    horizon: list[HorizonErrors] = field(default_factory=list)
    """Errors by step of the chunk, one entry per kind of dimension."""


def write_report(report: Report, path: "str | os.PathLike[str]") -> None:
    """Write the page; a reader finds the old page or the new one, never half of one."""
    target = Path(path)
    text = render_report(report)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)  # noqa: PTH105 - Path.replace hides that it is atomic
    finally:
        partial.unlink(missing_ok=True)


def render_report(report: Report) -> str:
    """The page as one HTML document; it loads nothing, and its policy forbids it to."""
    sections = [
        _summary_section(report.summary),
        _error_section(report.errors),
        _horizon_section(report.horizon),
        _training_section(report.training),
        *(_episode_section(episode) for episode in report.episodes),
        _section("Settings", _pairs(report.settings)),
        _section("Versions", _pairs(report.versions)),
    ]
    title = escape(report.title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';'
        " img-src data:; style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{title}</h1>\n{''.join(sections)}</main></body></html>\n"
    )


def ratio_to_better_baseline(row: ErrorRow) -> float:
    """Trained error over the smallest finite baseline error; NaN where that says nothing."""
    finite = [error for error in row.baselines.values() if math.isfinite(error)]
    if not finite or math.isnan(row.trained):
        return math.nan
    if min(finite) == 0:
        return math.inf if row.trained > 0 else math.nan
    return row.trained / min(finite)


def smooth(values: Sequence[Number | None], span: int) -> list[float | None]:
    """Exponential mean over about `span` values; gaps stay gaps and carry no weight."""
    keep, mean, weight = 1 - 2 / (span + 1), 0.0, 0.0
    smoothed: list[float | None] = []
    for value in values:
        if value is None or not math.isfinite(value):
            smoothed.append(None)
            continue
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(mean / weight)
    return smoothed


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{body}</section>\n"


def _pairs(pairs: Mapping[str, str]) -> str:
    if not pairs:
        return "<p>None recorded.</p>"
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in pairs.items()
    )
    return f'<table class="pairs"><tbody>{rows}</tbody></table>'


def _summary_section(summary: Sequence[str]) -> str:
    if not summary:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in summary)
    return f'<section><ul class="summary">{lines}</ul></section>\n'


def _error_section(errors: Sequence[ErrorRow]) -> str:
    if not errors:
        return _section("Action error", "<p>Not measured.</p>")
    baselines = list(dict.fromkeys(name for row in errors for name in row.baselines))
    headings = ["dimension", "unit", "trained", *baselines, "ratio to the better baseline"]
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    rows = "".join(_error_row(row, baselines) for row in errors)
    return _section(
        "Action error",
        "<p>Mean absolute error per action dimension. A ratio below 1 beats every baseline.</p>"
        f'<div class="scroll"><table class="errors"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>",
    )


def _error_row(row: ErrorRow, baselines: Iterable[str]) -> str:
    unit, factor = display_unit(row.unit)
    ratio = ratio_to_better_baseline(row)
    verdict = "good" if ratio < 1 else "bad" if ratio > 1 else ""
    errors = [row.trained, *(row.baselines.get(name, math.nan) for name in baselines)]
    numbers = "".join(f"<td>{format_number(error * factor)}</td>" for error in errors)
    names = f"<td>{escape(row.dimension)}</td><td>{escape(unit)}</td>"
    times = MISSING if math.isnan(ratio) else f"{format_number(ratio)}×"
    return f'<tr>{names}{numbers}<td class="{verdict}">{times}</td></tr>'


def _horizon_section(horizon: Sequence[HorizonErrors]) -> str:
    if not horizon:
        return ""
    explanation = (
        "<p>Mean absolute error of each step of the predicted chunks, over the same frames and the "
        "same noise for every policy.</p>"
    )
    return _section("Error over the horizon", explanation + render_horizon(horizon))


def _training_section(training: Sequence[Mapping[str, Number | None]]) -> str:
    if not training:
        return _section("Training", "<p>No metrics recorded.</p>")
    step = _column(training, "step")
    loss = _column(training, "loss")
    curves = {"gradient norm": "grad_norm", "learning rate": "lr"}
    both = [
        Series("every logged step", step, loss, GREY),
        Series(f"mean over about {SMOOTHING_SPAN} lines", step, smooth(loss, SMOOTHING_SPAN), BLUE),
    ]
    charts = [line_chart(both, title="Loss", x_label="step", y_label="loss", log_y=True)]
    for label, key in curves.items():
        line = Series(label, step, _column(training, key))
        charts.append(line_chart([line], title=label.capitalize(), x_label="step", y_label=label))
    speed = f"<p>{escape(_speed(training))}</p>"
    return _section("Training", f'{speed}<div class="charts">{"".join(charts)}</div>')


def _speed(training: Sequence[Mapping[str, Number | None]]) -> str:
    """Medians, because the first steps compile and warm up."""
    medians = [
        f"{format_number(statistics.median(values))} {label}"
        for key, label in (
            ("samples_per_s", "samples/s"),
            ("step_s", "s per step"),
            ("data_wait_s", "s of it waiting for data"),
        )
        if (values := [v for v in _column(training, key) if v is not None and math.isfinite(v)])
    ]
    return f"{len(training)} logged lines. " + (f"Median: {', '.join(medians)}." if medians else "")


def _column(lines: Iterable[Mapping[str, Number | None]], key: str) -> list[Number | None]:
    return [line.get(key) for line in lines]


def _episode_section(episode: EpisodeView) -> str:
    _check(episode)
    strips = "".join(_strip(camera, frames) for camera, frames in episode.frames.items())
    charts = "".join(_action_chart(episode, d) for d in range(len(episode.dimensions)))
    task = f"<p>{escape(episode.task)}</p>" if episode.task else ""
    body = f'{task}{strips}<h3>Actions</h3><div class="charts">{charts}</div>'
    return _section(f"Episode {episode.name}", body)


def _check(episode: EpisodeView) -> None:
    count, shape = len(episode.dimensions), (len(episode.true), len(episode.dimensions))
    if not episode.true.shape == episode.predicted.shape == shape or len(episode.units) != count:
        raise DataError(
            f"episode {episode.name!r}: predicted {episode.predicted.shape} and true"
            f" {episode.true.shape} must both be [T, {count}] and units ({len(episode.units)})"
            f" {count} long, to match the dimensions {episode.dimensions}"
        )


def _strip(camera: str, frames: Sequence[tuple[int, bytes]]) -> str:
    figures = "".join(_figure(camera, index, jpeg) for index, jpeg in frames)
    return f'<h3>Camera {escape(camera)}</h3><div class="strip">{figures}</div>'


def _figure(camera: str, index: int, jpeg: bytes) -> str:
    source = f"data:image/jpeg;base64,{b64encode(jpeg).decode('ascii')}"
    alt = escape(f"camera {camera}, frame {index}")
    return (
        f'<figure><img src="{source}" alt="{alt}"><figcaption>frame {index}</figcaption></figure>'
    )


def _action_chart(episode: EpisodeView, dimension: int) -> str:
    unit, factor = display_unit(episode.units[dimension])
    frame = np.arange(len(episode.true))
    true = factor * episode.true[:, dimension]
    predicted = factor * episode.predicted[:, dimension]
    lines = [
        Series("true", frame, true, GREY, dashed=True),
        Series("predicted", frame, predicted, BLUE),
    ]
    name = episode.dimensions[dimension]
    return line_chart(lines, title=name, x_label="frame", y_label=unit or name, height=220)
