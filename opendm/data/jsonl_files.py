"""The JSONL files of a folder: which they are, and lines in them."""

import io
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opendm.errors import DataError

COUNT_BYTES: Final = 1 << 20
"""Read at once where lines are counted."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A data file as it lies there now."""

    path: str
    """Relative to the dataset's root, with ``/``."""
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Listing:
    """The JSONL files of a folder in the order of their paths."""

    files: tuple[FoundFile, ...]
    repeated: tuple[str, ...]
    """One line for each file that a link names a second time."""


def list_jsonl(root: Path) -> Listing:
    """All ``*.jsonl`` below a folder; what two names lead to is listed once.

    Raises:
        DataError: the folder is missing, or some of the names are no files that can be read.
    """
    if not root.is_dir():
        raise DataError(
            f"dataset folder {str(root)!r} does not exist; check jsonl_dir of the registration or "
            "give --data-config.jsonl-dir"
        )
    files, repeated, problems = [], [], []
    first_of: dict[tuple[int, int], Path] = {}
    for path in sorted(root.rglob("*.jsonl")):
        name = path.relative_to(root).as_posix()
        reason, entry = _look_at(path)
        if reason or entry is None:
            problems.append(f"{path} {reason}")
            continue
        other = first_of.setdefault((entry.st_dev, entry.st_ino), path)
        if other != path and (path.is_symlink() or other.is_symlink()):
            repeated.append(f"{name}: the same file as {other.relative_to(root)}; counted once")
        else:
            files.append(FoundFile(name, entry.st_size, entry.st_mtime_ns))
    if problems:
        raise DataError(
            f"{len(problems)} of the *.jsonl names are no files that can be read: "
            f"{'; '.join(problems)}. Correct or remove them"
        )
    return Listing(tuple(files), tuple(repeated))


def _look_at(path: Path) -> tuple[str, os.stat_result | None]:
    """Why a path is no data file, or nothing, and what it is."""
    try:
        entry = path.stat()
    except OSError as error:
        return f"leads nowhere ({error.strerror})", None
    if stat.S_ISDIR(entry.st_mode):
        return "is a folder", None
    if not stat.S_ISREG(entry.st_mode):
        return "is a pipe, socket or device", None
    return ("" if os.access(path, os.R_OK) else "may not be read by this user"), entry


def open_data(path: Path) -> io.BufferedReader:
    """Open a data file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def first_line(path: Path) -> bytes:
    """The first line that is not blank; nothing where there is none."""
    with open_data(path) as file:
        return next((line for line in file if line.strip()), b"")


def line_number(path: Path, position: int) -> int:
    """Line of a byte of a file, as editors count (from 1, blank lines included)."""
    count = 1
    with open_data(path) as file:
        while position > 0 and (data := file.read(min(position, COUNT_BYTES))):
            count += data.count(b"\n")
            position -= len(data)
    return count
