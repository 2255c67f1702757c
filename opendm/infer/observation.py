"""``Observation``: what a robot sees, feels and shall do, and its pictures in any form."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

from opendm.errors import DataError

Picture = Image.Image | bytes | np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What the robot sees, feels and shall do."""

    state: Sequence[float] | np.ndarray
    """In the robot's units."""
    images: Mapping[str, Picture]
    """By camera key: a picture, an encoded file, or uint8 ``[height, width, 3]``."""
    prompt: str
    robot_type: str | None = None
    """None means the checkpoint's; so do the two below."""
    speed: str | None = None
    control_mode: str | None = None
    history_images: Sequence[Picture] = ()
    """Earlier pictures of the first camera, oldest first; for checkpoints trained with history."""


def to_picture(key: str, picture: Picture) -> Image.Image:
    """An RGB picture from any form that an observation may hold.

    Raises:
        DataError: it is none of them; the message names the camera.
    """
    if isinstance(picture, Image.Image):
        return picture if picture.mode == "RGB" else picture.convert("RGB")
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise DataError(
                f"observation: image {key!r} is {picture.dtype} {list(picture.shape)}; expected "
                "uint8 [height, width, 3]"
            )
        return Image.fromarray(picture)
    try:
        with Image.open(io.BytesIO(picture)) as image:
            return image.convert("RGB")
    except (OSError, TypeError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"observation: image {key!r} cannot be decoded: {error}") from error
