"""``scan_jsonl``: one pass over a folder of JSONL episodes that checks every record.

Numbers go into arrays and are never parsed again. Two processes share the bytes; a large file is
cut at line ends.
"""

import gc
import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from opendm.data.episodes import Sizes, check_record
from opendm.data.index import FrameIndex, IndexedFile
from opendm.data.jsonl_files import FoundFile, Listing, first_line, list_jsonl, open_data
from opendm.data.jsonl_pieces import Piece, Scanned, scan_piece
from opendm.errors import DataError
from opendm.runtime import end_with_parent

NUM_PROCESSES: Final = 2
PIECE_BYTES: Final = 16 << 20
"""Work that a process takes at a time."""
FORK_BYTES: Final = 16 << 20
"""A smaller folder is read faster than processes start."""


def scan_jsonl(root: Path, *, skip_bad: bool, listing: Listing | None = None) -> FrameIndex:
    """Read and check all frames below a folder.

    Args:
        root: the folder.
        skip_bad: cut an episode before its first bad record instead of refusing the dataset.
        listing: of :func:`list_jsonl`, where the caller has it.

    Raises:
        DataError: a file cannot be read, or a record is bad; the message has file, line and field.
    """
    listing = list_jsonl(root) if listing is None else listing
    sizes = _expected_sizes(root, listing.files)
    tasks = _cut(root, listing.files)
    num_bytes = sum(file.num_bytes for file in listing.files)
    if num_bytes < FORK_BYTES or not _can_fork():
        scanned = [scan_piece(piece, sizes) for pieces in tasks for piece in pieces]
    else:
        scanned = _in_processes(tasks, sizes)
    if not skip_bad:
        for part in scanned:
            if part.problem is not None:
                raise DataError(f"{root}/{part.problem}")
    return _merge(listing, sizes, scanned)


def _can_fork() -> bool:
    forks = "fork" in multiprocessing.get_all_start_methods()
    return forks and not multiprocessing.current_process().daemon


def _in_processes(tasks: Sequence[Sequence[Piece]], sizes: Sizes) -> list[Scanned]:
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(
        NUM_PROCESSES, context, initializer=_start_worker, initargs=(os.getpid(),)
    ) as pool:
        futures = [pool.submit(_scan_pieces, pieces, sizes) for pieces in tasks]
        try:
            return [part for future in futures for part in future.result()]
        except BrokenProcessPool as error:
            raise DataError("a process that read the dataset was killed; out of memory?") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(parent: int) -> None:
    end_with_parent(parent)
    gc.disable()


def _scan_pieces(pieces: Sequence[Piece], sizes: Sizes) -> list[Scanned]:
    return [scan_piece(piece, sizes) for piece in pieces]


def _expected_sizes(root: Path, files: Sequence[FoundFile]) -> Sizes:
    """Lengths of most files' first frames."""
    counts: dict[str, Counter[int]] = {"state": Counter(), "action": Counter()}
    for file in files:
        try:
            frame = check_record(first_line(root / file.path), "", Sizes(), has_actions=None)
        except DataError:
            continue
        for field, count in counts.items():
            count.update([len(frame[field])] if field in frame else [])
    return Sizes(*(_most_common(count) for count in counts.values()))


def _most_common(counts: Counter[int]) -> int | None:
    """Of several equally frequent sizes the largest, as the check decides."""
    return max(counts, key=lambda size: (counts[size], size)) if counts else None


def _cut(root: Path, files: Sequence[FoundFile]) -> list[list[Piece]]:
    """Consecutive work of about :data:`PIECE_BYTES`: many small files, or a part of a large one."""
    tasks: list[list[Piece]] = []
    room = 0
    for number, file in enumerate(files):
        bounds = _bounds(root / file.path, file.num_bytes)
        for start, stop in pairwise(bounds):
            if room <= 0:
                tasks.append([])
                room = PIECE_BYTES
            tasks[-1].append(Piece(number, root / file.path, file.path, start, stop))
            room -= max(1, stop - start)
    return tasks


def _bounds(path: Path, num_bytes: int) -> list[int]:
    """Line starts near every multiple of :data:`PIECE_BYTES`, from 0 to the file's end."""
    bounds = [0]
    if num_bytes > 2 * PIECE_BYTES:
        with open_data(path) as file:
            for wanted in range(PIECE_BYTES, num_bytes - PIECE_BYTES, PIECE_BYTES):
                file.seek(wanted)
                file.readline()
                if bounds[-1] < file.tell() < num_bytes:
                    bounds.append(file.tell())
    return [*bounds, num_bytes]


def _merge(listing: Listing, sizes: Sizes, scanned: Sequence[Scanned]) -> FrameIndex:
    """One index of all pieces, which come in the order of files and bytes."""
    kept: list[Scanned] = []
    counts = np.zeros(len(listing.files), np.int64)
    has_actions = np.zeros(len(listing.files), bool)
    hashes = [""] * len(listing.files)
    problems: dict[int, str] = {}
    lost: dict[int, int] = {}
    for part in scanned:
        hashes[part.number] = part.sha256 or hashes[part.number]
        has_actions[part.number] = part.has_actions
        if part.number in problems:
            lost[part.number] += len(part.state) + part.num_lost
            continue
        kept.append(part)
        counts[part.number] += len(part.state)
        if part.problem is not None:
            problems[part.number] = part.problem
            lost[part.number] = part.num_lost
    dropped = [
        f"{problems[number]} ({lost[number]} frames from here on left out)" for number in problems
    ]
    tasks, task = _common_tasks(kept)
    width = sizes.action or 0
    return FrameIndex(
        files=tuple(
            IndexedFile(file.path, file.num_bytes, file.mtime_ns, sha256)
            for file, sha256 in zip(listing.files, hashes, strict=True)
        ),
        episodes=tuple(file.path for file in listing.files),
        tasks=tasks,
        dropped=(*listing.repeated, *dropped),
        episode_file=np.arange(len(listing.files), dtype=np.int32),
        has_actions=has_actions,
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]),
        state=_join([part.state for part in kept], (0, sizes.state or 0), np.float64),
        action=_join([_action(part, width) for part in kept], (0, width), np.float64),
        task=task,
        position=_join([part.position for part in kept], (0,), np.int64),
        num_bytes=_join([part.num_bytes for part in kept], (0,), np.int32),
    )


def _common_tasks(parts: Sequence[Scanned]) -> tuple[tuple[str, ...], np.ndarray]:
    ids: dict[str, int] = {}
    numbers = []
    for part in parts:
        common = [ids.setdefault(prompt, len(ids)) for prompt in part.prompts]
        numbers.append(np.array(common, np.int32)[part.task])
    return tuple(ids), _join(numbers, (0,), np.int32)


def _action(part: Scanned, width: int) -> np.ndarray:
    return part.action if part.has_actions else np.full((len(part.state), width), np.nan)


def _join(parts: list[np.ndarray], empty: tuple[int, ...], dtype: "type") -> np.ndarray:
    return np.concatenate([np.empty(empty, dtype), *parts]).astype(dtype, copy=False)
