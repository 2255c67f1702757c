"""Every record of a folder of JSONL episodes, read strictly; nothing stops at the first problem."""

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from opendm.check.frame import Finding, check_frame, parse
from opendm.check.listing import list_episodes
from opendm.check.problem import RECORD, Problem
from opendm.data.episodes import MAX_LINE_BYTES
from opendm.runtime import end_with_parent

NUM_PROCESSES: Final = 2
FORK_BYTES: Final = 8 << 20
"""A smaller folder is read faster than processes start."""
MAX_OF_A_KIND: Final = 1000
"""Problems of one class in one field that are listed per file; the rest are counted."""
ABSENT: Final = -1
"""Length of a vector that is not there."""
UNKNOWN: Final = -2
"""Length of a vector that is wrong already."""


@dataclass(slots=True)
class PictureUse:
    """Where a file is used: the first place, how often, and the frames of a video."""

    where: str
    key: str
    kind: str
    count: int = 0
    first_frame: int = 0
    last_frame: int = 0

    def add(self, frame: int) -> None:
        """Count one more use."""
        self.first_frame = frame if not self.count else min(self.first_frame, frame)
        self.last_frame = max(self.last_frame, frame)
        self.count += 1

    def merge(self, other: "PictureUse") -> None:
        """Count the uses of another file of the dataset."""
        self.first_frame = min(self.first_frame, other.first_frame)
        self.last_frame = max(self.last_frame, other.last_frame)
        self.count += other.count


@dataclass(eq=False, slots=True)
class FileScan:
    """What one episode holds."""

    path: str
    lines: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 ``[n]``: line number of every record, blank lines left out."""
    sizes: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """int32 ``[n, 2]``: lengths of state and action, or ABSENT or UNKNOWN."""
    problems: list[Problem] = field(default_factory=list)
    pictures: dict[str, PictureUse] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    """Task to the place of its first frame."""
    cameras: Counter[str] = field(default_factory=Counter)
    """Fields that refer to a picture, and in how many records."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordScan:
    """What a whole dataset holds."""

    problems: tuple[Problem, ...]
    num_records: int
    num_files: int
    pictures: dict[str, PictureUse]
    prompts: dict[str, str]
    cameras: Counter[str]
    lines: dict[str, np.ndarray]
    """File to the line numbers of its records."""


def scan_records(
    root: Path,
    image_keys: Sequence[str],
    *,
    state_size: int | None = None,
    allow_outside_root: bool = False,
) -> RecordScan:
    """Read and check all records below a folder.

    Args:
        root: folder of the episodes.
        image_keys: cameras that every record must have.
        state_size: length of ``state_desc``; None takes the length of most records.
        allow_outside_root: do not refuse links that leave the folder.
    """
    found = list_episodes(root, allow_outside_root=allow_outside_root)
    total = sum(path.stat().st_size for path in found.files)
    work = partial(scan_file, image_keys=tuple(image_keys))
    if total < FORK_BYTES or "fork" not in multiprocessing.get_all_start_methods():
        scans = list(map(work, found.files))
    else:
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(
            NUM_PROCESSES, context, initializer=end_with_parent, initargs=(os.getpid(),)
        ) as pool:
            scans = list(pool.map(work, found.files, chunksize=4))
    return _merge(found.problems, scans, state_size)


def scan_file(path: Path, image_keys: Sequence[str]) -> FileScan:
    """Read one episode."""
    scan = FileScan(str(path))
    limited = _Limited(scan.problems)
    lines, sizes = [], []
    try:
        with path.open("rb") as file:
            for number, line, is_cut in _lines(file):
                where = f"{path}:{number}"
                size, findings = _check_line(scan, line, where, image_keys, is_cut=is_cut)
                lines.append(number)
                sizes.append(size)
                limited.add(where, findings)
    except OSError as error:
        limited.add(str(path), [Finding("file", f"cannot be read: {error}", "file")])
    limited.finish(str(path))
    scan.lines = np.array(lines, np.int64)
    scan.sizes = np.array(sizes, np.int32).reshape(-1, 2)
    return scan


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    """Number and bytes of every line that is not blank, and whether the file is cut there.

    Of a line over the cap only its beginning is kept.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        is_whole = line.endswith(b"\n")
        if len(line) > MAX_LINE_BYTES:
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES)
        if line.strip():
            yield number, line, not is_whole


def _check_line(
    scan: FileScan, line: bytes, where: str, image_keys: Sequence[str], *, is_cut: bool
) -> tuple[tuple[int, int], list[Finding]]:
    if len(line) > MAX_LINE_BYTES:
        reason = f"is longer than {MAX_LINE_BYTES} bytes; is a picture inside, or a line end lost?"
        return (UNKNOWN, UNKNOWN), [Finding(RECORD, reason, "line_long")]
    frame, findings = parse(line.strip(), is_cut=is_cut)
    if frame is None:
        return (UNKNOWN, UNKNOWN), findings
    wrong = check_frame(frame, image_keys)
    bad_fields = {finding.field.split("[")[0].split(".")[0] for finding in wrong}
    for key, value in frame.items():
        if type(value) is dict and "url" in value:
            scan.cameras[key] += 1
            if key in image_keys and key not in bad_fields:
                _use(scan, where, key, value)
    if "prompt" not in bad_fields:
        scan.prompts.setdefault(frame["prompt"], where)
    size = _size(frame, "state", bad_fields), _size(frame, "action", bad_fields)
    return size, findings + wrong


def _size(frame: dict[str, Any], name: str, bad_fields: set[str]) -> int:
    if name in bad_fields:
        return UNKNOWN
    return len(frame[name]) if name in frame else ABSENT


def _use(scan: FileScan, where: str, key: str, picture: dict[str, Any]) -> None:
    url, kind = picture["url"], picture.get("type", "image")
    use = scan.pictures.get(url)
    if use is None:
        use = scan.pictures[url] = PictureUse(where, key, kind)
    use.add(picture["frame_idx"] if kind == "video" else 0)


class _Limited:
    """Add problems to a list, only so many of a kind; the others are counted."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, where: str, findings: Iterable[Finding]) -> None:
        """Findings of one line."""
        for finding in findings:
            kind = (finding.code, finding.field.split("[")[0])
            self._counts[kind] += 1
            if self._counts[kind] <= MAX_OF_A_KIND:
                self.problems.append(
                    Problem(where, finding.field, finding.reason, code=finding.code)
                )

    def finish(self, path: str) -> None:
        """Say how many were not listed."""
        for (code, name), count in self._counts.items():
            if count > MAX_OF_A_KIND:
                reason = f"has {count - MAX_OF_A_KIND} more problems of the class {code}"
                self.problems.append(Problem(path, name, reason, code=code))


def _merge(
    listed: Sequence[Problem], scans: Sequence[FileScan], state_size: int | None
) -> RecordScan:
    pictures: dict[str, PictureUse] = {}
    prompts: dict[str, str] = {}
    cameras: Counter[str] = Counter()
    for scan in scans:
        cameras.update(scan.cameras)
        for prompt, where in scan.prompts.items():
            prompts.setdefault(prompt, where)
        for url, use in scan.pictures.items():
            if url in pictures:
                pictures[url].merge(use)
            else:
                pictures[url] = use
    wanted = [_most_common_size(scans, column) for column in (0, 1)]
    wanted[0] = state_size or wanted[0]
    problems = [*listed]
    for scan in scans:
        problems += scan.problems
        problems += _wrong_sizes(scan, wanted)
        problems += _some_without_action(scan)
    return RecordScan(
        problems=tuple(sorted(problems, key=_place)),
        num_records=sum(len(scan.lines) for scan in scans),
        num_files=len(scans),
        pictures=pictures,
        prompts=prompts,
        cameras=cameras,
        lines={scan.path: scan.lines for scan in scans},
    )


def _place(problem: Problem) -> tuple[str, int]:
    path, _, line = problem.where.rpartition(":")
    return (path, int(line)) if line.isdecimal() else (problem.where, 0)


def _most_common_size(scans: Sequence[FileScan], column: int) -> int | None:
    counts: Counter[int] = Counter()
    for scan in scans:
        counts.update(scan.sizes[:, column].tolist())
    sizes = [(count, size) for size, count in counts.items() if size >= 0]
    return max(sizes)[1] if sizes else None


def _wrong_sizes(scan: FileScan, wanted: Sequence[int | None]) -> Iterator[Problem]:
    for column, name in enumerate(("state", "action")):
        sizes = scan.sizes[:, column]
        rows = np.flatnonzero((sizes >= 0) & (sizes != wanted[column]))
        limited = _Limited([])
        for row in rows.tolist():
            reason = f"has {sizes[row]} values; expected {wanted[column]}, as in the other frames"
            where = f"{scan.path}:{scan.lines[row]}"
            limited.add(where, [Finding(name, reason, "vector_length")])
        limited.finish(scan.path)
        yield from limited.problems


def _some_without_action(scan: FileScan) -> Iterator[Problem]:
    """Frames that differ from most of their episode in whether an action is recorded."""
    absent = scan.sizes[:, 1] == ABSENT
    if not absent.any() or absent.all():
        return
    most_have_it = 2 * absent.sum() <= len(absent)
    reason = (
        "is missing; most frames of the episode record it"
        if most_have_it
        else "is recorded here and not in most frames of the episode"
    )
    limited = _Limited([])
    for row in np.flatnonzero(absent == most_have_it).tolist():
        limited.add(f"{scan.path}:{scan.lines[row]}", [Finding("action", reason, "action_partly")])
    limited.finish(scan.path)
    yield from limited.problems
