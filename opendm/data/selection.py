"""Which episodes of a source are used, and the names and sizes by which they are chosen."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opendm.data.read_once import once
from opendm.data.source import Source
from opendm.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode and what of it can be sampled."""

    number: int
    """In the source's index."""
    name: str
    path: Path
    """The data file."""
    num_frames: int
    num_samples: int
    """Frames that have a target."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Episodes of a source."""

    source: Source
    episodes: tuple[int, ...]
    """Numbers in the source's index."""


def usable_episodes(source: Source, numbers: Sequence[int] | None = None) -> list[Episode]:
    """Episodes with at least one sample, in the order of ``numbers`` (all by default).

    Raises:
        ConfigError: a number is not one of the source's episodes, or is given twice.
        DataError: nothing is left.
    """
    chosen = None if numbers is None else tuple(numbers)
    return list(once(("episodes", source, chosen), lambda: _usable(source, chosen)))


def _usable(source: Source, numbers: Sequence[int] | None) -> list[Episode]:
    index = source.index
    given = range(len(index.episodes)) if numbers is None else numbers
    if numbers is not None:
        _check_numbers(source, numbers)
    found = [
        Episode(
            number,
            index.episodes[number],
            source.path(number),
            len(index.episode_rows(number)),
            index.num_samples(number),
        )
        for number in given
        if index.num_samples(number)
    ]
    if not found:
        raise DataError(
            f"{source.root}: {len(given)} *.jsonl files without a usable frame; an episode has one "
            "JSON object per line, and at least two lines where no action is recorded. Other "
            "formats that are read: LeRobot v2.0/v2.1 and v3.0, with meta/info.json in the folder"
        )
    return found


def numbers_in_index(source: Source, episodes: Sequence[int]) -> list[int]:
    """From the numbers by which a dataset calls its episodes to those of the index.

    A LeRobot dataset names them (``episode_000003``); JSONL files count in the order of
    their paths.
    """
    numbers = {
        int(match[1]) if (match := re.fullmatch(r"episode_(\d+)", name)) else place: place
        for place, name in enumerate(source.index.episodes)
    }
    unknown = [number for number in episodes if number not in numbers]
    if unknown:
        raise ConfigError(_unknown(source, unknown))
    return [numbers[number] for number in episodes]


def _check_numbers(source: Source, numbers: Sequence[int]) -> None:
    count = len(source.index.episodes)
    unknown = [number for number in numbers if not 0 <= number < count]
    if unknown:
        raise ConfigError(_unknown(source, unknown))
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"episodes {list(numbers)} of {source.root}: one is given twice")


def _unknown(source: Source, numbers: Sequence[int]) -> str:
    return (
        f"episodes {list(numbers)} are not in {source.root}, which has "
        f"{len(source.index.episodes)}, counted from 0"
    )
