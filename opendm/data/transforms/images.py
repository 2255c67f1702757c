"""From image records to pixels: current views and history frames."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from opendm.data.dataset import Sample
from opendm.data.parquet_images import read_image_cell
from opendm.data.paths import check_inside, resolve_path
from opendm.data.picture_size import size_fault
from opendm.data.source import EpisodeFrames
from opendm.data.video import read_video_frame
from opendm.errors import DataError, PictureError

__all__ = ["LoadHistory", "LoadImages", "PixelTransform", "load_image", "resolve_path"]


def load_image(record: dict[str, Any], image_dir: str, *, allow_outside_root: bool) -> Image.Image:
    """An RGB picture from a record of type ``image``, ``video`` or ``parquet``.

    Raises:
        PictureError: the file is missing, broken or too large; the message names it.
        DataError: the record is wrong, or its path leads out of the folder.
    """
    if not isinstance(record.get("url"), str):
        raise DataError(f"image record {record!r:.80} has no url; expected a path as a string")
    path = resolve_path(record["url"], image_dir, allow_outside_root=allow_outside_root)
    _check_file(path, image_dir, allow_outside_root=allow_outside_root)
    kind = record.get("type", "image")
    if kind == "image":
        return _decode(path, str(path))
    try:
        if kind == "video":
            return _video_frame(path, _number(record, "frame_idx"))
        if kind == "parquet":
            cell = _parquet_cell(path, _number(record, "row"), record["column"])
        else:
            raise DataError(
                f"image record {record!r:.80} has an unknown type; expected image, video or parquet"
            )
    except KeyError as error:
        raise DataError(f"{kind} record {record!r:.80} has no {error}") from error
    if cell["bytes"]:
        return _decode(io.BytesIO(cell["bytes"]), f"{path}, row {record['row']}")
    linked = {"type": "image", "url": cell["path"]}
    return load_image(linked, image_dir, allow_outside_root=allow_outside_root)


def _check_file(path: Path, image_dir: str, *, allow_outside_root: bool) -> None:
    try:
        is_file = path.is_file()
    except OSError as error:  # the folder may not be read, or the name is too long
        raise PictureError(f"image file {path} cannot be read: {error}", str(path)) from error
    if not is_file:
        raise PictureError(
            f"image file {path} does not exist; check image_dir and the record's url", str(path)
        )
    if not allow_outside_root:
        check_inside(path, image_dir)


def _number(record: dict[str, Any], field: str) -> int:
    value = record[field]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DataError(f"{field} {value!r:.40} of {record['url']!r} is not a whole number from 0")
    return value


def _video_frame(path: Path, number: int) -> Image.Image:
    try:
        return read_video_frame(path, number)
    except DataError as error:
        raise PictureError(str(error), str(path)) from error


def _parquet_cell(path: Path, row: int, column: str) -> dict[str, Any]:
    try:
        return read_image_cell(path, row, column)
    except DataError as error:
        raise PictureError(str(error), str(path)) from error


def _decode(file: "Path | io.BytesIO", name: str) -> Image.Image:
    try:
        with Image.open(file) as image:
            fault = size_fault(image.width, image.height)
            if fault is None:
                image.load()
                return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:  # of damaged files every decoder of Pillow raises something else
        raise PictureError(f"image file {name} cannot be decoded: {error}", name) from error
    raise PictureError(f"image file {name} {fault}", name)


class LoadImages:
    """Read the current views into ``images``, in the order of ``image_keys``."""

    def __init__(
        self, image_keys: Sequence[str], image_dir: str = "", *, allow_outside_root: bool = False
    ) -> None:
        self.image_keys = tuple(image_keys)
        self.image_dir = image_dir
        self.allow_outside_root = allow_outside_root

    def __call__(self, sample: Sample) -> Sample:
        missing = [key for key in self.image_keys if not isinstance(sample.get(key), dict)]
        if missing:
            raise DataError(
                f"image field {missing[0]!r} is missing; the registration expects "
                f"{list(self.image_keys)}"
            )
        sample["images"] = [
            load_image(sample[key], self.image_dir, allow_outside_root=self.allow_outside_root)
            for key in self.image_keys
        ]
        return sample


class LoadHistory:
    """Read earlier frames of one camera into ``history_images``, oldest first.

    Slot s (1 is the newest) lies ``s / uniform_fps`` seconds back; slots before the episode's start
    are left out.
    """

    def __init__(
        self,
        image_key: str = "images_1",
        image_dir: str = "",
        max_history_images: int = 32,
        uniform_fps: float = 1.0,
        *,
        allow_outside_root: bool = False,
    ) -> None:
        self.image_key = image_key
        self.image_dir = image_dir
        self.max_history_images = max_history_images
        self.uniform_fps = uniform_fps
        self.allow_outside_root = allow_outside_root

    def __call__(self, sample: Sample) -> Sample:
        meta = sample["meta_data"]
        if not meta.get("fps"):
            raise DataError("history needs fps in the dataset's registration")
        indices = [
            meta["frame_index"] - round(slot / self.uniform_fps * meta["fps"])
            for slot in range(self.max_history_images, 0, -1)
        ]
        sample["history_images"] = [
            self._load(_earlier(sample["raw_lines"], index), index)
            for index in indices
            if index >= 0
        ]
        return sample

    def _load(self, record: dict[str, Any], index: int) -> Image.Image:
        if not isinstance(record.get(self.image_key), dict):
            raise DataError(f"image field {self.image_key!r} is missing in history frame {index}")
        try:
            return load_image(
                record[self.image_key], self.image_dir, allow_outside_root=self.allow_outside_root
            )
        except PictureError as error:
            raise PictureError(f"history frame {index}: {error}", error.file) from error
        except DataError as error:
            raise DataError(f"history frame {index}: {error}") from error


def _earlier(lines: Sequence[str], index: int) -> dict[str, Any]:
    if isinstance(lines, EpisodeFrames):
        return lines.source.record(lines.episode, index)
    return json.loads(lines[index])


class PixelTransform:
    """Apply an image pipeline to every view and every history frame.

    Each view draws its own augmentation. The history frames draw what the first view drew, being
    earlier pictures of the same camera: otherwise crops and rotations would look like motion. For
    this the pipeline's randomness has to come from torch's global generator, and not to depend on
    the picture's content.
    """

    def __init__(self, transform_pipeline: Callable[[Image.Image], Image.Image]) -> None:
        self.transform_pipeline = transform_pipeline

    def __call__(self, sample: Sample) -> Sample:
        before_first_view = torch.get_rng_state()
        if "images" in sample:
            sample["images"] = [self.transform_pipeline(image) for image in sample["images"]]
        if "history_images" in sample:
            after_views = torch.get_rng_state()
            sample["history_images"] = [
                self._repeat(image, before_first_view) for image in sample["history_images"]
            ]
            torch.set_rng_state(after_views)
        return sample

    def _repeat(self, image: Image.Image, state: torch.Tensor) -> Image.Image:
        torch.set_rng_state(state)
        return self.transform_pipeline(image)
