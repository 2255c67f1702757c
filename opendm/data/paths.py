"""Paths that a dataset names: only local files, and only below the dataset's folder."""

import os
import posixpath
import re
from functools import lru_cache
from pathlib import Path
from typing import Final

from opendm.errors import DataError

URL_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(file|data):", re.IGNORECASE)


def resolve_path(url: str, image_dir: str, *, allow_outside_root: bool = False) -> Path:
    """The file behind a record's ``url``, which is relative to ``image_dir``.

    ``./``, ``../`` and dot folders mean what they mean in any path.

    Raises:
        DataError: the url is not a path, or leaves ``image_dir`` and that is not allowed.
    """
    if URL_SCHEME.match(url):
        raise DataError(
            f"url {url[:80]!r} is not a path; only files below image_dir are read, so download the "
            "data and give paths relative to it"
        )
    if allow_outside_root:
        return Path(image_dir) / url
    relative = posixpath.normpath(url.lstrip("/"))
    if relative.startswith("..") and relative.split("/")[0] == "..":
        raise _outside(url, image_dir)
    return Path(image_dir) / relative


def check_inside(path: Path, image_dir: str) -> None:
    """Refuse a file that symbolic links take out of a folder.

    Folders are resolved once per process; per file this costs one ``lstat``.

    Raises:
        DataError: the file lies elsewhere.
    """
    roots = _real_roots(image_dir)
    real = _real_folder(str(path.parent))
    if path.is_symlink():
        real = os.path.realpath(path)
    if not any(real == root or real.startswith(root + os.sep) for root in roots):
        raise _outside(str(path), image_dir)


@lru_cache(maxsize=256)
def _real_roots(folder: str) -> tuple[str, ...]:
    root = Path(os.path.realpath(folder or "."))
    if root.parent.name == "snapshots":
        # a download of huggingface_hub: its files are links to the neighbour "blobs"
        return str(root), str(root.parent.parent / "blobs")
    return (str(root).rstrip(os.sep),)


@lru_cache(maxsize=65536)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _outside(path: str, folder: str) -> DataError:
    return DataError(
        f"path {path!r} leaves the folder {folder!r}; correct the path or the link, or pass "
        "--data-config.allow-outside-root"
    )
