"""From image paths to pixels: current views and history frames."""

import json
import posixpath
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
from PIL import Image, UnidentifiedImageError

from opendm.data.dataset import Sample
from opendm.errors import DataError


def resolve_path(url: str, image_dir: str, *, allow_outside_root: bool = False) -> Path:
    """The file behind a record's ``url``, which is relative to ``image_dir``.

    ``./``, ``../`` and dot folders mean what they mean in any path.

    Raises:
        DataError: the path leaves ``image_dir`` and that is not allowed.
    """
    if allow_outside_root:
        return Path(image_dir) / url
    relative = posixpath.normpath(url.lstrip("/"))
    if relative.startswith("..") and relative.split("/")[0] == "..":
        raise DataError(
            f"image path {url!r} leaves the image folder {image_dir!r}; correct the path or pass "
            "--data-config.allow-outside-root"
        )
    return Path(image_dir) / relative


def load_image(record: dict[str, Any], image_dir: str, *, allow_outside_root: bool) -> Image.Image:
    """An RGB picture from a record of type ``image`` or ``video``.

    Raises:
        DataError: the file is missing or broken; the message names it.
    """
    if not isinstance(record.get("url"), str):
        raise DataError(f"image record {record!r:.80} has no url; expected a path as a string")
    path = resolve_path(record["url"], image_dir, allow_outside_root=allow_outside_root)
    if not path.is_file():
        raise DataError(f"image file {path} does not exist; check image_dir and the record's url")
    if record.get("type", "image") == "video":
        return read_video_frame(path, int(record["frame_idx"]))
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"image file {path} cannot be decoded: {error}") from error


def read_video_frame(path: Path, frame_index: int) -> Image.Image:
    """Frame ``frame_index`` (from 0, in presentation order) of a video.

    Raises:
        DataError: the file is broken or has fewer frames.
    """
    try:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            for number, frame in enumerate(container.decode(stream)):
                if number == frame_index:
                    return frame.to_image()
    except (av.FFmpegError, IndexError) as error:
        raise DataError(f"video {path} cannot be decoded: {error}") from error
    raise DataError(f"video {path} has no frame {frame_index}")


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
            load_image(
                json.loads(sample["raw_lines"][index])[self.image_key],
                self.image_dir,
                allow_outside_root=self.allow_outside_root,
            )
            for index in indices
            if index >= 0
        ]
        return sample


class PixelTransform:
    """Apply an image pipeline to every view and every history frame."""

    def __init__(self, transform_pipeline: Callable[[Image.Image], Image.Image]) -> None:
        self.transform_pipeline = transform_pipeline

    def __call__(self, sample: Sample) -> Sample:
        for key in ("images", "history_images"):
            if key in sample:
                sample[key] = [self.transform_pipeline(image) for image in sample[key]]
        return sample
