"""What the episodes of a dataset tell: lengths against the chunk, targets, numbers."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from opendm.check.problem import FILE, Problem
from opendm.data.index import FrameIndex
from opendm.data.source import Source

PUBLIC_INDEX: Final = "index_cache.json"
"""Index file of the public framework, which holds byte places and is not kept up to date."""
NAMED: Final = 5
"""Episodes that a message names."""


def num_samples(index: FrameIndex, episodes: Sequence[int]) -> np.ndarray:
    """Samples of each of some episodes, int64."""
    lengths = np.diff(index.starts)[list(episodes)]
    return np.maximum(lengths - ~index.has_actions[list(episodes)], 0)


def spread_rows(total: int, count: int) -> list[int]:
    """At most ``count`` of the numbers below ``total``, from the first to the last."""
    count = min(count, total)
    return [number * (total - 1) // max(1, count - 1) for number in range(count)]


def check_samples(total: int, global_batch: int, name: str) -> Iterator[Problem]:
    """Whether there are samples for one optimizer step over all processes."""
    if total < global_batch:
        reason = (
            f"are {total}, fewer than the {global_batch} of one step (batch x accumulation x "
            "processes): a step takes samples more than once. Lower "
            "--trainer-config.per-device-train-batch-size or add episodes"
        )
        yield Problem(name, "samples", reason, "warning", "too_few_samples")


def check_episodes(
    index: FrameIndex, episodes: Sequence[int], name: str, chunk_size: int
) -> Iterator[Problem]:
    """All findings about the episodes that are trained on."""
    counts = num_samples(index, episodes)
    yield from _check_chunk(counts, name, chunk_size)
    yield from _check_targets(index, episodes, name)
    unused = [index.episodes[n] for n, count in zip(episodes, counts, strict=True) if not count]
    if unused:
        reason = f"have no frame with a target and are not used: {listed(unused)}"
        yield Problem(name, "episodes", reason, "warning", "unused_episode")


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _check_chunk(counts: np.ndarray, name: str, chunk_size: int) -> Iterator[Problem]:
    used = counts[counts > 0]
    short = int((used < chunk_size).sum())
    if not short:
        return
    real = np.minimum(used, chunk_size)
    # frame t of n has min(n - t, chunk) real steps
    steps = used * real - real * (real - 1) // 2
    padded = 1 - float(steps.sum()) / float(used.sum() * chunk_size)
    yield Problem(name, "chunk_size", f"{chunk_size} is longer than {short} of "
                  f"{len(used)} episodes (the shortest has {used.min()} samples); in all, "
                  f"{padded:.0%} of the target steps repeat the last one and do not count in the "
                  "loss", "warning", "chunk_long")  # fmt: skip


def _check_targets(index: FrameIndex, episodes: Sequence[int], name: str) -> Iterator[Problem]:
    without = int((~index.has_actions[list(episodes)]).sum())
    if without:
        yield Problem(name, "action", f"is not recorded in {without} of {len(episodes)} "
                      "episodes: the next frame's state is the target there, of the gripper too "
                      "(a measured width, not a command)", "warning", "next_state")  # fmt: skip


def check_index(source: Source) -> Iterator[Problem]:
    """Whether the files are still those that the index was made from; reads all of them."""
    for entry in source.index.files:
        path = source.root / entry.path
        try:
            with path.open("rb") as file:
                is_same = hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
        except OSError as error:
            yield Problem(str(path), FILE, f"cannot be read: {error}", code="file")
            continue
        if not is_same:
            yield Problem(str(path), FILE, "has other contents than its index, at the same size "
                          "and time; touch the file, and the index is made again", "error",
                          "stale_index")  # fmt: skip


def check_public_index(root: Path, files: Sequence[Path]) -> Iterator[Problem]:
    """An index file of the public framework that is older than the data beside it."""
    path = root / PUBLIC_INDEX
    if path.is_file() and any(f.stat().st_mtime_ns > path.stat().st_mtime_ns for f in files):
        yield Problem(str(path), FILE, "is older than the episodes; it is not read here, but the "
                      "public framework would take wrong lines by it: delete it", "warning",
                      "stale_index")  # fmt: skip
