"""The page of a closed-loop evaluation: a single HTML file with moving pictures and tables."""

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final

from PIL import Image

from opendm.eval.charts import Series, line_chart
from opendm.eval.metaworld.environment import Image as Pixels
from opendm.eval.metaworld.statistics import Rate
from opendm.eval.report import STYLE

FRAME_MS: Final = 100
"""Of a query: eight control steps of 12.5 ms, unless others are executed."""


@dataclass(frozen=True, slots=True, eq=False)
class TaskResult:
    """What happened in one task."""

    name: str
    sentence: str
    trained: Rate
    """Of the checkpoint that is judged."""
    by_step: dict[int, Rate]
    """Success of each checkpoint by its training steps; -1 where they are unknown."""
    controls: dict[str, Rate]
    frames: list[Pixels] = field(default_factory=list)
    """An episode of the checkpoint that is judged."""
    seconds: float = 0.0


def gif_bytes(frames: Sequence[Pixels]) -> bytes:
    """An endless GIF of RGB pictures; the last one stays for a second."""
    pictures = [Image.fromarray(frame) for frame in frames]
    durations = [FRAME_MS] * (len(pictures) - 1) + [1000]
    buffer = io.BytesIO()
    pictures[0].save(
        buffer, "GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0
    )
    return buffer.getvalue()


def render_page(title: str, results: Sequence[TaskResult], settings: Mapping[str, str]) -> str:
    """The page as one HTML document; it loads nothing, and its policy forbids it to."""
    rows = "".join(
        f"<li>{escape(r.name)}: {r.trained.value:.0%} of {r.trained.num_trials} starts</li>"
        for r in results
    )
    sections = [f'<section><ul class="summary">{rows}</ul></section>']
    sections += [_task_section(result) for result in results]
    sections.append(f"<section><h2>Settings</h2>{_pairs(settings)}</section>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';'
        " img-src data:; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1>\n{''.join(sections)}</main></body></html>\n"
    )


def write_page(
    path: Path, title: str, results: Sequence[TaskResult], settings: Mapping[str, str]
) -> None:
    """Write the page and, beside it, each task's GIF."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_page(title, results, settings), encoding="utf-8")
    for result in results:
        if result.frames:
            (path.parent / f"{result.name}.gif").write_bytes(gif_bytes(result.frames))


def _task_section(result: TaskResult) -> str:
    picture = ""
    if result.frames:
        data = b64encode(gif_bytes(result.frames)).decode("ascii")
        alt = escape(f"an episode of {result.name}")
        picture = (
            f'<figure><img style="width:240px;height:auto" src="data:image/gif;base64,{data}" '
            f'alt="{alt}"><figcaption>an unseen start</figcaption></figure>'
        )
    lines = [("this policy", result.trained), *result.controls.items()]
    head = "".join(f'<th scope="col">{word}</th>' for word in ("", "solved", "share", "95 %"))
    body = "".join(_row(name, rate) for name, rate in lines)
    table = (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
    said = f"<p>“{escape(result.sentence)}”</p>"
    return (
        f"<section><h2>{escape(result.name)}</h2>{said}{picture}{table}{_curve(result)}</section>\n"
    )


def _row(name: str, rate: Rate) -> str:
    low, high = rate.interval()
    solved = f"{rate.num_successes} of {rate.num_trials}"
    return (
        f"<tr><td>{escape(name)}</td><td>{solved}</td><td>{rate.value:.0%}</td>"
        f"<td>{low:.0%} – {high:.0%}</td></tr>"
    )


def _curve(result: TaskResult) -> str:
    if len(result.by_step) < 2:
        return ""
    steps = sorted(result.by_step)
    rates = [result.by_step[step] for step in steps]
    lines = [Series("success", steps, [100 * rate.value for rate in rates])]
    for name, end in (("95 % low", 0), ("95 % high", 1)):
        bounds = [100 * rate.interval()[end] for rate in rates]
        lines.append(Series(name, steps, bounds, dashed=True))
    return line_chart(
        lines, title="Success against training", x_label="step", y_label="solved, %", height=240
    )


def _pairs(pairs: Mapping[str, str]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in pairs.items()
    )
    return f'<table class="pairs"><tbody>{rows}</tbody></table>'
