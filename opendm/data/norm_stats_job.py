"""The statistics of a dataset, and the name of the file that keeps them."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from opendm.data.normalize import NormStats, NormStatsFile, Profile, RunningStats
from opendm.errors import ConfigError

BATCH_SIZE: Final = 128
"""Samples of one batch, as ``compute_norm_stats_max_batches`` counts them."""
MAX_NAME: Final = 120
"""Letters of a dataset's name in a file name, which has 255 bytes: a mixture's may be long."""


@runtime_checkable
class ActionDataset(Protocol):
    """Samples with ``state``, ``action``, ``action_mask`` and ``meta_data``, without images."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


def norm_stats_name(dataset_name: str, action_transform_repr: str, settings: str = "") -> str:
    """File name of a dataset's statistics under an action transform.

    Args:
        dataset_name: registered name, or last part of the folder's path.
        action_transform_repr: how the transform writes itself.
        settings: what sets the statistics apart from the public framework's; "" if nothing.

    Raises:
        ConfigError: the transform writes its place in memory, which is another in every run.
    """
    if " at 0x" in action_transform_repr:
        raise ConfigError(
            f"action_transform {action_transform_repr} has no __repr__ of its own; write one that "
            "names its settings, because statistics are found by it"
        )
    digest = text_digest(f"{dataset_name}|{action_transform_repr}")[:16]
    if not settings:
        return f"{dataset_name}_{digest}.json"
    return f"{dataset_name[:MAX_NAME]}_{digest}_{text_digest(settings)[:12]}.json"


def text_digest(text: str) -> str:
    """SHA-256 of a text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def robot_name(robot_type: "Enum | str | None") -> str | None:
    """The string of a robot type, which may be given as an enum."""
    return robot_type.value if isinstance(robot_type, Enum) else robot_type


def used_indices(size: int, max_batches: int | None) -> Sequence[int]:
    """All samples, or ``max_batches`` batches of them spread at random, always the same ones."""
    limit = size if max_batches is None else min(size, max_batches * BATCH_SIZE)
    if limit == size:
        return range(size)
    chosen = np.random.default_rng(0).permutation(size)[:limit]
    return np.sort(chosen).tolist()


def compute_norm_stats(
    dataset: ActionDataset, default_robot_type: str | None = None, max_batches: int | None = None
) -> NormStatsFile:
    """Count the state of every used frame and every real row of its action chunk.

    Raises:
        ConfigError: robot types are mixed with none, or there are several and no default.
        DataError: fewer than two rows, or vectors of several lengths.
    """
    collected = collect_rows(dataset, used_indices(len(dataset), max_batches))
    default = default_robot(list(collected), default_robot_type)
    profiles: dict[str | None, Profile] = {
        robot: {key: _statistics(batches) for key, batches in entry.items()}
        for robot, entry in sorted(collected.items(), key=lambda item: str(item[0]))
    }
    return NormStatsFile(profiles, default)


def collect_rows(
    dataset: ActionDataset, indices: Iterable[int]
) -> dict[str | None, dict[str, list[np.ndarray]]]:
    """``state`` rows ``[1, D]`` and real ``action`` rows ``[n, D]`` of samples, by robot type."""
    collected: dict[str | None, dict[str, list[np.ndarray]]] = defaultdict(
        lambda: {"state": [], "action": []}
    )
    for index in indices:
        sample = dataset[index]
        entry = collected[robot_name(sample["meta_data"].get("robot_type"))]
        is_real = np.asarray(sample["action_mask"]).any(axis=-1)
        entry["state"].append(np.asarray(sample["state"])[None])
        entry["action"].append(np.asarray(sample["action"])[is_real])
    return collected


def _statistics(batches: list[np.ndarray]) -> NormStats:
    running = RunningStats()
    for batch in batches:
        running.update(batch)
    return running.get()


def default_robot(robots: list[str | None], given: str | None) -> str | None:
    """Who stands for a request without a robot type.

    Raises:
        ConfigError: robot types are mixed with none, or there are several and no default.
    """
    names = sorted(str(robot) for robot in robots)
    if None in robots and len(robots) > 1:
        raise ConfigError(
            f"some samples have a robot type and some have none ({names}); give robot_type in "
            "every registration or in none"
        )
    if given is not None and given not in robots:
        raise ConfigError(
            f"--data-config.norm-stats-default-robot-type {given!r} is not among the dataset's "
            f"robot types {names}; give one of them, or leave the flag out"
        )
    if given is None and len(robots) > 1:
        raise ConfigError(
            f"the dataset has robot types {names}; choose the one that stands for a request "
            "without a type: --data-config.norm-stats-default-robot-type"
        )
    return robots[0] if given is None else given
