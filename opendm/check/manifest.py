"""Manifests of a dataset's files: size and SHA-256 of each, as ``sha256sum`` writes and reads them.

::

    # 20480 bytes
    9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08  images/0.jpg

A file's size is in the line before, which ``sha256sum -c`` takes for a comment; a manifest of
``sha256sum`` itself has none, and is read too. Names are relative to the innermost folder that
holds all folders of the data. Nothing is decoded.
"""

import hashlib
import logging
import os
import posixpath
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opendm.check.problem import FILE, Problem
from opendm.errors import ConfigError

logger = logging.getLogger(__name__)

NUM_THREADS: Final = 4
"""Reading waits for the disk, and hashing lets go of the interpreter's lock."""
ENTRY: Final = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
SIZE: Final = re.compile(r"# (\d+) bytes")
ESCAPES: Final = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
"""In a line that begins with a backslash, as sha256sum writes them."""


@dataclass(frozen=True, slots=True)
class FileSum:
    """What a manifest says of one file."""

    sha256: str
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of a dataset, or of several."""

    base: Path
    """The innermost folder that holds all."""
    sizes: Mapping[str, int]
    """Name relative to ``base``, with ``/``, to bytes."""

    @property
    def num_bytes(self) -> int:
        """Of all together."""
        return sum(self.sizes.values())


def list_files(folders: Iterable[str], leave_out: Iterable[str] = ()) -> DataFiles:
    """All files below folders, also those that links lead to.

    Args:
        folders: of episodes and pictures.
        leave_out: files that are not listed: the manifest itself.
    """
    roots = sorted({Path(folder).resolve() for folder in folders})
    outer = [root for root in roots if not any(root.is_relative_to(o) for o in roots if o != root)]
    base = Path(os.path.commonpath(outer))
    sizes: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    for root in outer:
        sizes.update(_walk(root, root.relative_to(base).as_posix(), seen))
    for path in leave_out:
        real = Path(path).resolve()
        if real.is_relative_to(base):
            sizes.pop(real.relative_to(base).as_posix(), None)
    return DataFiles(base, dict(sorted(sizes.items())))


def _walk(folder: Path, name: str, seen: set[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    """Names and sizes of regular files; a folder that a link names again is entered once.

    A folder that is not there or may not be read has none: what a manifest names in it is missing.
    """
    try:
        found = folder.stat()
        if (found.st_dev, found.st_ino) in seen:
            return
        seen.add((found.st_dev, found.st_ino))
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        logger.warning("folder %s cannot be listed: %s", folder, error)
        return
    for entry in ordered:
        below = posixpath.normpath(f"{name}/{entry.name}")
        try:
            status = entry.stat()
        except OSError:
            continue  # a link to nothing
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(folder / entry.name, below, seen)
        elif stat.S_ISREG(status.st_mode):
            yield below, status.st_size


def encode(sums: Mapping[str, FileSum]) -> str:
    """The text of a manifest."""
    lines = []
    for name, entry in sums.items():
        escaped = "".join(ESCAPES.get(letter, letter) for letter in name)
        mark = "" if escaped == name else "\\"
        lines += [] if entry.num_bytes is None else [f"# {entry.num_bytes} bytes"]
        lines.append(f"{mark}{entry.sha256}  {escaped}")
    return "".join(f"{line}\n" for line in lines)


def decode(text: str) -> dict[str, FileSum]:
    """The inverse of :func:`encode`.

    Raises:
        ValueError: a line is none of a manifest; the message has its number.
    """
    letters = {escaped: letter for letter, escaped in ESCAPES.items()}
    sums: dict[str, FileSum] = {}
    num_bytes: int | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.startswith("#") or not line:
            size = SIZE.fullmatch(line)
            num_bytes = int(size[1]) if size else None
            continue
        entry = ENTRY.fullmatch(line.removesuffix("\r"))
        if entry is None:
            raise ValueError(f"line {number} is {line!r:.60}; expected 64 hex digits and a name")
        name = entry[3]
        if entry[1]:
            name = re.sub(r"\\[\\nr]", lambda found: letters[found[0]], name)
        sums[posixpath.normpath(name)] = FileSum(entry[2].lower(), num_bytes)
        num_bytes = None
    return sums


def write_manifest(path: Path, files: DataFiles) -> None:
    """Hash all files and write their manifest.

    Raises:
        ConfigError: a file cannot be read, or the manifest not written.
    """
    sums = {}
    for name, found in _hashes(files.base, list(files.sizes)):
        if isinstance(found, OSError):
            raise ConfigError(f"--write-manifest {path}: {files.base / name}: {found}")
        sums[name] = FileSum(found, files.sizes[name])
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(encode(sums), encoding="utf-8", errors="surrogateescape", newline="\n")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"--write-manifest {path} cannot be written: {error}") from error


def check_manifest(path: Path, sums: Mapping[str, FileSum], files: DataFiles) -> Iterator[Problem]:
    """What differs from a manifest; of files of another size no byte is read.

    Args:
        path: where the manifest is.
        sums: what it says.
        files: those that are there.
    """
    if sums.keys().isdisjoint(files.sizes):
        reason = (
            f"names no file below {files.base}; its first is {next(iter(sums), None)!r}. "
            "Was it written for other datasets, or in another folder?"
        )
        yield Problem(str(path), FILE, reason, code="manifest_other")
        return
    to_read = []
    for name, entry in sums.items():
        size = files.sizes.get(name)
        if size is None:
            yield _problem(files, name, "is missing; the manifest names it", "manifest_missing")
        elif entry.num_bytes not in (None, size):
            reason = f"has {size} bytes; the manifest says {entry.num_bytes}"
            yield _problem(files, name, reason, "manifest_changed")
        else:
            to_read.append(name)
    for name, found in _hashes(files.base, to_read):
        wanted = sums[name].sha256
        if isinstance(found, OSError):
            yield _problem(files, name, f"cannot be read: {found}", "manifest_missing")
        elif found != wanted:
            reason = f"has SHA-256 {found}; the manifest says {wanted}"
            yield _problem(files, name, reason, "manifest_changed")
    for name in files.sizes.keys() - sums.keys():
        reason = "is not in the manifest"
        yield _problem(files, name, reason, "manifest_extra").as_warning()


def read_manifest(path: Path) -> dict[str, FileSum]:
    """What a manifest says, by name.

    Raises:
        ConfigError: it is missing or is none.
    """
    try:
        return decode(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError as error:
        raise ConfigError(
            f"--manifest {path} cannot be read: {error}; write one with --write-manifest"
        ) from error
    except ValueError as error:
        raise ConfigError(f"--manifest {path} is no manifest: {error}") from error


def _problem(files: DataFiles, name: str, reason: str, code: str) -> Problem:
    return Problem(str(files.base / name), FILE, reason, code=code)


def _hashes(base: Path, names: list[str]) -> Iterator[tuple[str, str | OSError]]:
    """SHA-256 of files in the order of their names, or why one cannot be read."""

    def sha256(name: str) -> str | OSError:
        try:
            with (base / name).open("rb", buffering=0) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return error

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        yield from zip(names, pool.map(sha256, names), strict=True)
