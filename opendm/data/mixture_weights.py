"""How often each dataset of a mixture is drawn: given, or by its frames, episodes or tasks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from opendm.data.dataset import JsonlDataset
from opendm.data.mixture import Mixture
from opendm.errors import ConfigError

MIXTURE_BY: Final = ("frames", "episodes", "tasks")


@dataclass(frozen=True, slots=True)
class MixtureEntry:
    """One word of ``--data-config.datasets``."""

    name: str
    weight: float | None = None
    """None where no weight is given."""


def parse_entries(words: Sequence[str]) -> list[MixtureEntry]:
    """Names and weights from ``NAME`` or ``NAME=WEIGHT`` each.

    Raises:
        ConfigError: a weight is not a positive number, only some are given, or a name is twice.
    """
    entries = [_parse(word) for word in words]
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise ConfigError(f"--data-config.datasets {' '.join(words)}: a dataset is named twice")
    given = [entry for entry in entries if entry.weight is not None]
    if given and len(given) != len(entries):
        raise ConfigError(
            f"--data-config.datasets {' '.join(words)}: give a weight to each dataset or to none"
        )
    return entries


def _parse(word: str) -> MixtureEntry:
    name, equals, text = word.rpartition("=")
    if not equals:
        return MixtureEntry(word)
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (name and 0 < weight < math.inf):
        raise ConfigError(
            f"--data-config.datasets {word!r}: expected NAME or NAME=WEIGHT with a positive "
            "number, such as demo=2"
        )
    return MixtureEntry(name, weight)


def mix(parts: Sequence[JsonlDataset], entries: Sequence[MixtureEntry], mixture_by: str) -> Mixture:
    """The mixture of datasets.

    By frames every sample is drawn equally often, by episodes a dataset as often as it has
    episodes; by tasks every task of every dataset is drawn equally often, whatever its frames.

    Args:
        parts: the datasets.
        entries: their weights; where these are given, ``mixture_by`` does not matter.
        mixture_by: one of :data:`MIXTURE_BY`.
    """
    ends = np.cumsum([len(part) for part in parts])
    groups = [np.arange(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
    given = [entry.weight for entry in entries if entry.weight is not None]
    if given:
        return Mixture(parts, groups, given)
    if mixture_by == "episodes":
        return Mixture(parts, groups, [len(part.episodes) for part in parts])
    if mixture_by == "frames":
        return Mixture(parts, groups, [len(part) for part in parts])
    tasks = [
        rows[of_task == task]
        for part, rows in zip(parts, groups, strict=True)
        for of_task in [_tasks(part)]
        for task in np.unique(of_task)
    ]
    return Mixture(parts, tasks, [1.0] * len(tasks))


def _tasks(part: JsonlDataset) -> np.ndarray:
    """Number of the task of every sample, int32 ``[n]``."""
    index = part.source.index
    return np.concatenate([
        index.task[index.starts[episode.number] :][: episode.num_samples]
        for episode in part.episodes
    ])  # fmt: skip
