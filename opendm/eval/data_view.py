"""``opendm data view``: a dataset on one HTML page that opens offline, anywhere."""

import io
import os
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from opendm.constants.robot import ActionMode, desc_value
from opendm.data.dataset import JsonlDataset
from opendm.data.formats import dataset_info, open_source
from opendm.data.normalize import NormStats
from opendm.data.selection import numbers_in_index, usable_episodes
from opendm.data.source import Source
from opendm.data.stat_columns import Desc
from opendm.data.stat_floors import groups_of, widen
from opendm.data.transforms.actions import BuildAction
from opendm.data.transforms.images import load_image
from opendm.data.transforms.normalization import normalize
from opendm.errors import DataError
from opendm.eval.charts import PALETTE, Series, line_chart
from opendm.eval.report import STYLE

NUM_EPISODES: Final = 3
"""Episodes whose pictures and curves are shown, from all over the dataset."""
NUM_FRAMES: Final = 5
"""Pictures of a camera and episode."""
THUMBNAIL: Final = 200
"""Longest side of a picture in pixels."""
NUM_SAMPLES: Final = 2000
"""Samples whose action chunks are counted."""
NUM_TASKS: Final = 200
"""Tasks that are listed; the rest are counted."""
MAX_POINTS: Final = 1000
"""Points of a curve."""
NUM_BARS: Final = 40
BLUE, *_, GREY = PALETTE


@dataclass(frozen=True, slots=True)
class ViewedDataset:
    """What the page shows."""

    name: str
    info: Mapping[str, Any]
    source: Source
    episodes: tuple[int, ...]
    chunk_size: int
    action_mode: ActionMode
    allow_outside_root: bool = False

    @property
    def lengths(self) -> np.ndarray:
        """Frames of each usable episode."""
        return np.diff(self.source.index.starts)[list(self.episodes)]

    @property
    def shown(self) -> list[int]:
        """Episodes of pictures and curves."""
        steps = np.linspace(0, len(self.episodes) - 1, min(NUM_EPISODES, len(self.episodes)))
        return [self.episodes[int(step)] for step in steps]


def view_dataset(
    name: str,
    output: Path,
    *,
    chunk_size: int = 50,
    action_mode: ActionMode | None = None,
    index_root: "str | None" = None,
    allow_outside_root: bool = False,
) -> None:
    """Write the page of a dataset.

    Args:
        name: registered name, or folder, or Hub id.
        output: the HTML file.
        chunk_size: steps of the action chunks that are counted.
        action_mode: None takes the registration's; without one, relative where it can be.
        index_root: folder of the dataset indices.
        allow_outside_root: as --data-config.allow-outside-root.

    Raises:
        ConfigError: the dataset is unknown.
        DataError: it cannot be read.
    """
    info = dataset_info(name, allow_outside_root=allow_outside_root)
    source = open_source(
        info["jsonl_dir"],
        skip_bad=True,
        columns=info.get("columns"),
        index_root=index_root,
        allow_outside_root=allow_outside_root,
    )
    chosen = info.get("episodes")
    numbers = None if chosen is None else numbers_in_index(source, chosen)
    episodes = tuple(episode.number for episode in usable_episodes(source, numbers))
    mode = action_mode or _usual_mode(info)
    dataset = ViewedDataset(name, info, source, episodes, chunk_size, mode, allow_outside_root)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        partial.write_text(render(dataset), encoding="utf-8")
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)


def _usual_mode(info: Mapping[str, Any]) -> ActionMode:
    if info.get("action_mode"):
        return ActionMode(info["action_mode"])
    return ActionMode.RELATIVE if info.get("state_desc") else ActionMode.ABSOLUTE


def render(dataset: ViewedDataset) -> str:
    """The page as one document; it loads nothing, and its policy forbids it to."""
    sections = [
        _section("Dataset", _facts(dataset)),
        _section("Tasks", _tasks(dataset)),
        _section("Episode lengths", _lengths(dataset)),
        *(_episode(dataset, episode) for episode in dataset.shown),
        _section("Normalised actions", _normalised(dataset)),
    ]
    title = escape(f"Dataset {dataset.name}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';'
        " img-src data:; style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{title}</h1>\n{''.join(sections)}</main></body></html>\n"
    )


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{body}</section>\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{names}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _facts(dataset: ViewedDataset) -> str:
    index, info = dataset.source.index, dataset.info
    desc = info.get("state_desc") or ()
    facts = {
        "episodes": f"{len(dataset.episodes):,}",
        "frames": f"{int(dataset.lengths.sum()):,}",
        "left out": f"{len(index.dropped)} records or episodes that cannot be used",
        "tasks": f"{len(np.unique(index.task[_rows(dataset)])):,}",
        "cameras": ", ".join(info["image_keys"]),
        "state": f"{index.state.shape[1]} values {' '.join(map(desc_value, desc))}",
        "action": f"{index.action.shape[1]} values" if index.action.shape[1]
        else "not recorded; the next state is the target",
        "robot": str(info.get("robot_type") or "not said"),
    }  # fmt: skip
    return _table(("", ""), facts.items()) + "".join(
        f"<p>{escape(line)}</p>" for line in index.dropped[:NUM_EPISODES]
    )


def _rows(dataset: ViewedDataset) -> np.ndarray:
    """Rows of the used episodes in the index."""
    return np.concatenate([dataset.source.index.episode_rows(e) for e in dataset.episodes])


def _tasks(dataset: ViewedDataset) -> str:
    index = dataset.source.index
    frames = np.bincount(index.task[_rows(dataset)], minlength=len(index.tasks))
    starts = [index.starts[episode] for episode in dataset.episodes]
    episodes = np.bincount(index.task[starts], minlength=len(index.tasks))
    order = [i for i in np.argsort(-frames, kind="stable") if frames[i]]
    rows = [(index.tasks[i], f"{episodes[i]:,}", f"{frames[i]:,}") for i in order[:NUM_TASKS]]
    more = f"<p>and {len(order) - NUM_TASKS:,} more</p>" if len(order) > NUM_TASKS else ""
    return _table(("task", "episodes", "frames"), rows) + more


def _lengths(dataset: ViewedDataset) -> str:
    lengths = dataset.lengths
    bars = _stairs(lengths, float(lengths.min()), float(lengths.max() + 1), "episodes")
    chart = line_chart(
        [bars],
        title=f"{lengths.min()} to {lengths.max()} frames, median {np.median(lengths):g}",
        x_label="frames",
        y_label="episodes",
    )
    return f'<div class="charts">{chart}</div>'


def _stairs(values: np.ndarray, low: float, high: float, name: str) -> Series:
    """A histogram as a line."""
    counts, edges = np.histogram(values, bins=NUM_BARS, range=(low, high))
    x = np.repeat(edges, 2)
    y = np.concatenate([[0], np.repeat(counts, 2), [0]])
    return Series(name, x, y, BLUE)


def _episode(dataset: ViewedDataset, episode: int) -> str:
    index = dataset.source.index
    rows = index.episode_rows(episode)
    task = index.tasks[index.task[rows.start]]
    frames = np.linspace(0, len(rows) - 1, min(NUM_FRAMES, len(rows))).astype(int).tolist()
    strips = "".join(_strip(dataset, episode, key, frames) for key in dataset.info["image_keys"])
    step = max(1, -(-len(rows) // MAX_POINTS))
    numbers = np.arange(0, len(rows), step)
    part = slice(rows.start, rows.stop, step)
    charts = "".join(
        _curves(dataset, numbers, index.state[part], index.action[part], dim)
        for dim in range(max(index.state.shape[1], index.action.shape[1]))
    )
    body = f'<p>{escape(task)}</p>{strips}<div class="charts">{charts}</div>'
    return _section(f"Episode {index.episodes[episode]}", body)


def _curves(
    dataset: ViewedDataset, x: np.ndarray, state: np.ndarray, action: np.ndarray, dim: int
) -> str:
    lines = []
    if dim < state.shape[1]:
        lines.append(Series("state", x, state[:, dim], GREY, dashed=True))
    if dim < action.shape[1]:
        lines.append(Series("action", x, action[:, dim], BLUE))
    return line_chart(
        lines, title=_dim_name(dataset, dim), x_label="frame", y_label="value", height=220
    )


def _dim_name(dataset: ViewedDataset, dim: int) -> str:
    desc = dataset.info.get("state_desc") or ()
    return f"{dim} ({desc_value(desc[dim])})" if dim < len(desc) else str(dim)


def _strip(dataset: ViewedDataset, episode: int, key: str, frames: Sequence[int]) -> str:
    figures = "".join(_figure(dataset, episode, key, frame) for frame in frames)
    return f'<h3>Camera {escape(key)}</h3><div class="strip">{figures}</div>'


def _figure(dataset: ViewedDataset, episode: int, key: str, frame: int) -> str:
    try:
        source = _thumbnail(dataset, dataset.source.record(episode, frame), key)
        alt = escape(f"camera {key}, frame {frame}")
        picture = f'<img src="data:image/jpeg;base64,{source}" alt="{alt}">'
    except DataError as error:
        picture = f"<p>{escape(str(error))}</p>"
    return f"<figure>{picture}<figcaption>frame {frame}</figcaption></figure>"


def _thumbnail(dataset: ViewedDataset, record: Mapping[str, Any], key: str) -> str:
    if not isinstance(record.get(key), dict):
        raise DataError(f"{key} is missing")
    folder, outside = dataset.info["image_dir"], dataset.allow_outside_root
    image = load_image(record[key], folder, allow_outside_root=outside)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    content = io.BytesIO()
    image.save(content, "JPEG", quality=80)
    return b64encode(content.getvalue()).decode("ascii")


def _normalised(dataset: ViewedDataset) -> str:
    try:
        rows = action_rows(dataset)
    except DataError as error:
        return f"<p>{escape(str(error))}</p>"
    stats = floored_statistics(rows, dataset.info.get("state_desc"))
    values, q01, q99 = normalize(rows, stats), stats.q01, stats.q99
    charts = "".join(
        line_chart(
            [_stairs(values[:, dim], -1.0, 1.0, "steps")],
            title=f"{_dim_name(dataset, dim)}: q01 {q01[dim]:.4g}, q99 {q99[dim]:.4g}",
            x_label="normalised",
            y_label="steps",
            height=220,
        )
        for dim in range(values.shape[1])
    )
    return (
        f"<p>{len(rows):,} steps of {escape(dataset.action_mode.value)} chunks of "
        f"{dataset.chunk_size}, repeated ends left out; q01 is -1 and q99 is 1, where "
        "they are not too close (then wider, as in training).</p>"
        f'<div class="charts">{charts}</div>'
    )


def floored_statistics(rows: np.ndarray, desc: Desc | None) -> NormStats:
    """Statistics of rows ``[n, D]``, widened as those of training."""
    q01, q99 = np.quantile(rows, (0.01, 0.99), axis=0)
    low, high = rows.min(axis=0), rows.max(axis=0)
    stats = NormStats(rows.mean(axis=0), rows.std(axis=0), q01, q99, low, high)
    return widen(stats, groups_of(desc, rows.shape[1]))[0]


def action_rows(dataset: ViewedDataset) -> np.ndarray:
    """Real steps of the chunks of samples from all over the dataset, ``[n, D]``.

    Raises:
        DataError: the actions do not fit the mode.
    """
    samples = JsonlDataset(
        str(dataset.source.root),
        BuildAction(dataset.chunk_size, dataset.action_mode),
        dataset.name,
        dataset.info,
        source=dataset.source,
        episodes=dataset.episodes,
    )
    count = min(NUM_SAMPLES, len(samples))
    rows = []
    for number in np.linspace(0, len(samples) - 1, count).astype(int).tolist():
        sample = samples[number]
        is_real = np.asarray(sample["action_mask"]).any(axis=-1)
        rows.append(np.asarray(sample["action"])[is_real])
    return np.concatenate(rows).astype(np.float64)
