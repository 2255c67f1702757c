"""What the collector left beside its episodes: their motion, without pictures, and their seeds."""

import json
from pathlib import Path
from typing import Final

import numpy as np

from opendm.errors import ConfigError, DataError
from opendm.eval.metaworld.environment import Vector

SEEDS_FILE: Final = "seeds.json"
"""Beside the folders of episodes: a JSON object from episode name to seed."""


def recorded_actions(folder: Path, sentence: str) -> list[Vector]:
    """Actions ``[T, 4]`` of every episode of a task, as the collector wrote them.

    Raises:
        DataError: a line is no frame of the collector.
    """
    episodes = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            frames = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            if frames and frames[0]["prompt"] == sentence:
                episodes.append(np.array([frame["action"] for frame in frames], dtype=np.float64))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is no episode of the collector: {error}") from None
    return episodes


def mean_demonstration(episodes: list[Vector]) -> Vector:
    """The mean motion, every episode stretched to the median length: ``[T, 4]``.

    Time is warped linearly, so that phases of short and long episodes meet.
    """
    length = int(np.median([len(episode) for episode in episodes]))
    return np.mean([stretched(episode, length) for episode in episodes], axis=0)


def stretched(values: Vector, length: int) -> Vector:
    """``values`` ``[T, D]`` at ``length`` equally spaced times from first to last."""
    times = np.linspace(0.0, len(values) - 1.0, length)
    known = np.arange(len(values))
    return np.stack([np.interp(times, known, column) for column in values.T], axis=1)


def check_unseen(seeds: range, folder: Path) -> str:
    """What can be said about evaluation seeds and those of the demonstrations.

    Raises:
        ConfigError: a seed was used for a demonstration.
        DataError: the file of seeds cannot be read.
    """
    path = folder.parent / SEEDS_FILE
    if not path.is_file():
        return f"not checked: the demonstrations have no {SEEDS_FILE}"
    try:
        used = {str(name): int(seed) for name, seed in json.loads(path.read_text("utf-8")).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no file of the collector: {error}") from None
    clash = sorted({seed for seed in used.values() if seed in seeds})
    if clash:
        raise ConfigError(
            f"--seed {seeds.start}: seed {clash[0]} was used for a demonstration ({path}); choose "
            f"a seed above {max(used.values())}"
        )
    return f"none of the {len(used)} of the demonstrations"
