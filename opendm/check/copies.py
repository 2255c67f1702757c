"""Episodes that are there twice, over all datasets and both splits."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from opendm.check.episodes import listed
from opendm.check.problem import Problem
from opendm.data.index import FrameIndex

MIN_FRAMES: Final = 2
"""Of an episode that is compared: one frame alone may well be there twice."""


@dataclass(frozen=True, slots=True, eq=False)
class SplitEpisodes:
    """Episodes of a dataset by what they are used for."""

    name: str
    index: FrameIndex
    train: Sequence[int]
    held_out: Sequence[int] = ()


def check_copies(parts: Sequence[SplitEpisodes]) -> Iterator[Problem]:
    """Episodes with the same numbers and tasks; pictures may lie under other names.

    A copy of a held-out episode in training is an error: the loss on it would say nothing.
    """
    held_out: dict[bytes, str] = {}
    trained: dict[bytes, str] = {}
    doubles: dict[str, list[str]] = {part.name: [] for part in parts}
    for part in parts:
        for episodes, first_of in ((part.held_out, held_out), (part.train, trained)):
            for digest, name in _digests(part, episodes, parts):
                other = first_of.setdefault(digest, name)
                if other != name:
                    doubles[part.name].append(f"{name} = {other}")
    for name, found in doubles.items():
        if found:
            reason = f"{len(found)} have the same numbers as another one: {listed(found)}"
            yield Problem(name, "episodes", reason, "warning", "duplicate_episode")
    leaks = [f"{trained[digest]} = {held_out[digest]}" for digest in held_out.keys() & trained]
    if leaks:
        reason = (
            f"{len(leaks)} of training have the same numbers as one that is held out: "
            f"{listed(sorted(leaks))}; remove one of each pair"
        )
        yield Problem(" + ".join(doubles), "episodes", reason, "error", "held_out_copy")


def _digests(
    part: SplitEpisodes, episodes: Sequence[int], parts: Sequence[SplitEpisodes]
) -> Iterator[tuple[bytes, str]]:
    """Hash of numbers and tasks, and name, of each episode, with its dataset where it needs one."""
    index = part.index
    hashes = [hashlib.blake2b(t.encode("utf-8", "surrogatepass")).digest() for t in index.tasks]
    words = np.array([int.from_bytes(found[:8], "big") for found in hashes], dtype=np.uint64)
    for episode in episodes:
        rows = index.episode_rows(episode)
        if len(rows) < MIN_FRAMES:
            continue
        span = slice(rows.start, rows.stop)
        digest = hashlib.blake2b(digest_size=16)
        for table in (index.state[span], index.action[span], words[index.task[span]]):
            digest.update(np.ascontiguousarray(table).data)
        name = index.episodes[episode]
        yield digest.digest(), name if len(parts) == 1 else f"{part.name}/{name}"
