"""The JSONL files of a folder: which they are, and lines in them."""

import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opendm.data.paths import check_inside
from opendm.errors import DataError

READ_BITS: Final = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
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


def list_jsonl(root: Path, *, allow_outside_root: bool = False) -> Listing:
    """All ``*.jsonl`` below a folder; what two names lead to is listed once.

    Links to folders are not followed.

    Args:
        root: the folder.
        allow_outside_root: list links to files that lie elsewhere instead of refusing them.

    Raises:
        DataError: the folder is missing, or some of the names are no files that can be read.
    """
    if not root.is_dir():
        raise DataError(
            f"dataset folder {str(root)!r} does not exist; check jsonl_dir of the registration or "
            "give --data-config.jsonl-dir"
        )
    entries = sorted(_entries(str(root), ""), key=lambda pair: pair[0].split("/"))
    files, repeated, problems = [], [], []
    first_of: dict[tuple[int, int], tuple[str, bool]] = {}
    for name, entry in entries:
        reason, found = _look_at(entry, root, allow_outside_root=allow_outside_root)
        if reason or found is None:
            problems.append(f"{entry.path} {reason}")
            continue
        is_link = entry.is_symlink()
        other, is_other_link = first_of.setdefault((found.st_dev, found.st_ino), (name, is_link))
        if other != name and (is_link or is_other_link):
            repeated.append(f"{name}: the same file as {other}; counted once")
        else:
            files.append(FoundFile(name, found.st_size, found.st_mtime_ns))
    if problems:
        raise DataError(
            f"{len(problems)} of the *.jsonl names are no files that can be read: "
            f"{'; '.join(problems)}. Correct or remove them"
        )
    return Listing(tuple(files), tuple(repeated))


def _entries(folder: str, prefix: str) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """Relative path and entry of every name that ends in ``.jsonl``; much faster than ``rglob``."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.name.endswith(".jsonl"):
            yield prefix + entry.name, entry
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(entry.path, f"{prefix}{entry.name}/")


def _look_at(
    entry: "os.DirEntry[str]", root: Path, *, allow_outside_root: bool
) -> tuple[str, os.stat_result | None]:
    """Why a name is no data file, or nothing, and what it is."""
    try:
        found = entry.stat()
    except OSError as error:
        return f"leads nowhere ({error.strerror})", None
    if stat.S_ISDIR(found.st_mode):
        return "is a folder", None
    if not stat.S_ISREG(found.st_mode):
        return "is a pipe, socket or device", None
    if found.st_mode & READ_BITS != READ_BITS and not os.access(entry.path, os.R_OK):
        return "may not be read by this user", None
    if entry.is_symlink() and not allow_outside_root:
        try:
            check_inside(Path(entry.path), str(root))
        except DataError as error:
            return f"cannot be used: {error}", None
    return "", found


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
