"""Every picture and video that records refer to: once each, and by its header where that is enough.

Corruption inside a JPEG is often not visible to any decoder; ``decode`` finds what is.
"""

import multiprocessing
import stat
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Final

import av
from PIL import Image

from opendm.check.problem import Problem
from opendm.check.records import PictureUse
from opendm.data.paths import URL_SCHEME, check_inside, resolve_path
from opendm.data.picture_size import size_fault
from opendm.data.video import list_times, open_video
from opendm.errors import DataError

NUM_PROCESSES: Final = 2
FORK_FILES: Final = 2000
"""Fewer files are looked at faster than processes start."""
JPEG_END: Final = b"\xff\xd9"
TAIL_BYTES: Final = 1024
"""Cameras append little to a JPEG; its end marker lies in these bytes."""
REPLACED_CODES: Final = frozenset({
    "picture_missing", "picture_file", "picture_empty", "picture_corrupt", "picture_large",
    "picture_truncated", "frame_index",
})  # fmt: skip
"""Problems of a file; in skip mode training draws other samples in place of those that use it."""


@dataclass(frozen=True, slots=True)
class PictureRules:
    """What is allowed, and how closely it is looked at."""

    image_dir: str
    allow_outside_root: bool = False
    decode: bool = False
    """Decode all pixels and frames, not only headers."""


class BadPicture(Exception):  # noqa: N818 - carries a finding to the one place that reports it
    """Why a file cannot be used."""

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.code = code


def check_pictures(uses: Mapping[str, PictureUse], rules: PictureRules) -> list[Problem]:
    """Look at every file once.

    Args:
        uses: url to where it is used.
        rules: what is allowed.
    """
    work = partial(check_picture_file, rules=rules)
    items = sorted(uses.items())
    forks = "fork" in multiprocessing.get_all_start_methods()
    if not forks or len(items) < FORK_FILES:
        return _found(map(work, items))
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(NUM_PROCESSES, context) as pool:
        return _found(pool.map(work, items, chunksize=256))


def as_replaced(problems: Sequence[Problem], num_files: int) -> list[Problem]:
    """Warnings in place of the errors that skip mode gets along with, unless all files are bad."""
    num_bad = sum(problem.code in REPLACED_CODES for problem in problems)
    if num_bad == num_files:
        return list(problems)
    return [p.as_warning() if p.code in REPLACED_CODES else p for p in problems]


def _found(results: Iterable[Problem | None]) -> list[Problem]:
    return [problem for problem in results if problem is not None]


def check_picture_file(item: tuple[str, PictureUse], rules: PictureRules) -> Problem | None:
    """What is wrong with one file, if anything."""
    url, use = item
    field = f"{use.key}.url"
    try:
        path = _regular_file(url, rules)
        if use.kind == "video":
            _check_video(path, use, decode=rules.decode)
        else:
            check_image(path, decode=rules.decode)
    except BadPicture as bad:
        if bad.code == "frame_index":
            field = f"{use.key}.frame_idx"
        times = f" (used by {use.count} records)" if use.count > 1 else ""
        return Problem(use.where, field, f"{bad}{times}", code=bad.code)
    return None


def _regular_file(url: str, rules: PictureRules) -> Path:
    try:
        path = resolve_path(url, rules.image_dir, allow_outside_root=rules.allow_outside_root)
    except DataError as error:
        code = "scheme" if URL_SCHEME.match(url) else "outside_root"
        raise BadPicture(str(error), code) from error
    try:
        entry = path.stat()
    except (OSError, ValueError) as error:
        raise BadPicture(f"file {path} does not exist ({error})", "picture_missing") from error
    if not stat.S_ISREG(entry.st_mode):
        raise BadPicture(f"{path} is no file but a folder, pipe or device", "picture_file")
    if not rules.allow_outside_root:
        try:
            check_inside(path, rules.image_dir)
        except DataError as error:
            raise BadPicture(str(error), "outside_root") from error
    if entry.st_size == 0:
        raise BadPicture(f"file {path} is empty", "picture_empty")
    return path


def check_image(path: Path, *, decode: bool) -> None:
    """Header, size, and whether the end is there."""
    try:
        with path.open("rb") as file:
            check_image_stream(file, str(path), decode=decode)
    except OSError as error:
        raise BadPicture(f"file {path} cannot be read: {error}", "picture_file") from error


def check_image_stream(file: BufferedReader | BytesIO, name: str, *, decode: bool) -> None:
    """As :func:`check_image`, of a file or of bytes in a table."""
    try:
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(file)
    except Image.DecompressionBombError as error:
        raise BadPicture(f"file {name} is too large: {error}", "picture_large") from error
    except Exception as error:  # of damaged files every decoder of Pillow raises something else
        raise BadPicture(f"{name} is no picture that can be read", "picture_corrupt") from error
    if fault := size_fault(image.width, image.height):
        raise BadPicture(f"file {name} {fault}", "picture_large")
    try:
        if decode or (image.format == "JPEG" and not _has_end(file)):
            image.load()
        elif image.format != "JPEG":
            image.verify()
    except Exception as error:
        raise BadPicture(f"file {name} is cut or damaged: {error}", "picture_truncated") from error


def _has_end(file: BufferedReader | BytesIO) -> bool:
    place = file.tell()
    size = file.seek(0, 2)
    file.seek(max(0, size - TAIL_BYTES))
    tail = file.read()
    file.seek(place)
    return JPEG_END in tail


def _check_video(path: Path, use: PictureUse, *, decode: bool) -> None:
    try:
        num_frames = count_frames(path, decode=decode)
    except DataError as error:
        code = "picture_large" if "pixels" in str(error) else "picture_corrupt"
        raise BadPicture(str(error), code) from error
    if use.last_frame >= num_frames:
        raise BadPicture(
            f"reaches {use.last_frame}, and video {path} has the frames 0 to {num_frames - 1}",
            "frame_index",
        )


def count_frames(path: Path, *, decode: bool) -> int:
    """Frames of a video: its packets, or with ``decode`` those that are whole.

    Raises:
        DataError: it cannot be read.
    """
    container, stream = open_video(path)
    with container:
        try:
            num_frames = 0 if decode else len(list_times(container, stream).frames)
            return num_frames or _decoded_frames(path)
        except av.FFmpegError as error:
            raise DataError(f"video {path} cannot be read: {error}") from error


def _decoded_frames(path: Path) -> int:
    container, stream = open_video(path)
    with container:
        return sum(not frame.is_corrupt for frame in container.decode(stream))


def sample_pictures(
    records: Sequence[tuple[str, Mapping[str, object]]], image_keys: Sequence[str]
) -> dict[str, PictureUse]:
    """The picture uses of a few records, given as place and content."""
    uses: dict[str, PictureUse] = {}
    for where, record in records:
        for key in image_keys:
            picture = record.get(key)
            if not isinstance(picture, dict) or not isinstance(picture.get("url"), str):
                continue
            kind = str(picture.get("type", "image"))
            if kind == "parquet":
                continue  # the scan has read that file
            number = picture.get("frame_idx", 0)
            use = uses.setdefault(picture["url"], PictureUse(where, key, kind))
            use.add(number if isinstance(number, int) else 0)
    return uses
