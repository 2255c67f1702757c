"""Where the index of a dataset is kept, when it still holds, and how processes share it.

The folder lies outside the dataset and is named by a hash of the dataset's real path and of all
that the scan depends on. One lock per index is held while it is opened or built, so that of several
processes one reads the dataset and no process sees a half of two indices.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

from opendm.data.index import FORMAT_VERSION, FrameIndex
from opendm.runtime import cache_folder

logger = logging.getLogger(__name__)

STAMP_FILE: Final = "stamp.json"
STALE: Final = "stale-"
NEW: Final = "new-"

DAMAGE: Final = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, EOFError)
"""What reading a file that is cut or of another shape raises."""

_threads = threading.Lock()

Stamp = Sequence[tuple[str, int, int]]
"""Path below the root, bytes and ``mtime_ns`` of every file that the index was made from."""


def cached_index(
    root: Path,
    kind: str,
    stamp: Stamp,
    scan: Callable[[], FrameIndex],
    *,
    index_root: "str | Path | None" = None,
    verify: bool = False,
) -> FrameIndex:
    """The index of a dataset: mapped if its files are those it was made from, otherwise made.

    Args:
        root: the dataset's folder.
        kind: what else the index depends on, such as format and mode.
        stamp: the files as they are now.
        scan: makes the index.
        index_root: folder of the indices; the user's cache folder by default.
        verify: compare the contents of the files too, not only sizes and times.

    Raises:
        DataError: what ``scan`` raises.
    """
    parent = cache_folder() / "index" if index_root is None else Path(index_root)
    folder = parent / _key(root, kind)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            return _open(root, folder, stamp, verify=verify) or _build(folder, stamp, scan)
    except OSError as error:
        own = Path(_temporary_folder().name) / folder.name
        for place in (folder, own):  # others may have filled the cache
            found = _open(root, place, stamp, verify=verify)
            if found is not None:
                return found
        logger.warning("index folder %s cannot be written (%s); using a temporary one", parent,
                       error.strerror)  # fmt: skip
        return _build(own, stamp, scan)


def _key(root: Path, kind: str) -> str:
    real = root.resolve()
    digest = hashlib.sha256(f"{FORMAT_VERSION}|{kind}|{real}".encode(errors="surrogateescape"))
    name = re.sub(r"[^\w.-]", "_", real.name[:40])
    return f"{name}-{digest.hexdigest()[:16]}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an index; it is let go when this process ends, in whatever way.

    A record lock, since processes that are forked meanwhile inherit others and would keep them. It
    does not part the threads of one process, and any of them drops it by closing the file.
    """
    with _threads, folder.with_name(f"{folder.name}.lock").open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # fcntl(2): EAGAIN or EACCES
            logger.info("waiting for another process that opens or makes the index %s", folder)
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _open(root: Path, folder: Path, stamp: Stamp, *, verify: bool) -> FrameIndex | None:
    """The index that lies there, if it is whole and of the present files."""
    if not folder.exists():
        return None
    try:
        recorded = json.loads((folder / STAMP_FILE).read_text(encoding="utf-8"))
        index = FrameIndex.open(folder)
    except DAMAGE as error:
        logger.warning("index %s is damaged (%s); made again", folder, error)
        return None
    if recorded != [list(entry) for entry in stamp]:
        return None
    return index if not verify or _same_contents(root, index) else None


def _same_contents(root: Path, index: FrameIndex) -> bool:
    for entry in (*index.files, *index.metadata):
        with (root / entry.path).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                logger.warning("%s has other contents than its index; made again", entry.path)
                return False
    return True


def _build(folder: Path, stamp: Stamp, scan: Callable[[], FrameIndex]) -> FrameIndex:
    """Make the index beside its place and move it there whole; what lay there goes."""
    index = scan()
    _remove_leftovers(folder)
    new = Path(tempfile.mkdtemp(prefix=f"{NEW}{folder.name}-", dir=folder.parent))
    index.save(new)
    (new / STAMP_FILE).write_text(json.dumps(stamp), encoding="utf-8")
    for path in (*new.iterdir(), new):
        _to_disk(path)
    if folder.exists():
        stale = folder.with_name(f"{STALE}{new.name}")
        folder.rename(stale)
        new.rename(folder)
        shutil.rmtree(stale)  # whoever has mapped its files keeps them
    else:
        new.rename(folder)
    _to_disk(folder.parent)
    return FrameIndex.open(folder)


def _remove_leftovers(folder: Path) -> None:
    """Of processes that were killed; the lock says that nobody is at work."""
    for pattern in (f"{NEW}{folder.name}-*", f"{STALE}{NEW}{folder.name}-*"):
        for path in folder.parent.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@cache
def _temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    """Removed when this process ends."""
    return tempfile.TemporaryDirectory(prefix="opendm-index-")
