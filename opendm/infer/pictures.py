"""Pictures of strangers: format and size are known before a pixel is decoded."""

import base64
import binascii
import io
import struct
from typing import Final

from PIL import Image

from opendm.infer.limits import Limits, RequestError

FORMATS: Final = ("JPEG", "PNG", "WEBP")
MIN_WEBP_BYTES: Final = 30


def picture_bytes(text: object, name: str) -> bytes:
    """The file in a base64 string or ``data:`` URL, strictly decoded.

    Raises:
        RequestError: it is neither.
    """
    if not isinstance(text, str):
        raise RequestError(f"{name} is not a string; expected base64 or a data URL")
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise RequestError(f"{name} is not a base64 data URL")
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{name} is not base64") from None


class PictureReader:
    """Decodes the pictures of one request within its limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._left = limits.max_request_pixels

    def read(self, file: bytes, name: str) -> Image.Image:
        """An RGB picture.

        Raises:
            RequestError: not a JPEG, PNG or WebP file, broken, or too large.
        """
        if file[:4] == b"RIFF":  # its plug-in allocates the canvas while it opens the file
            self._check_size(webp_size(file, name), name)
        try:
            with Image.open(io.BytesIO(file), formats=FORMATS) as image:
                self._spend(image.size, name)
                image.load()
                return image if image.mode == "RGB" else image.convert("RGB")
        except RequestError:
            raise
        except Exception:  # noqa: BLE001 - decoders raise many kinds for broken files
            kind = "is broken, or is not JPEG, PNG or WebP"
            raise RequestError(f"{name} {kind}") from None

    def _check_size(self, size: tuple[int, int], name: str) -> int:
        square = max(size) ** 2
        limit = self.limits.max_image_pixels
        if square > limit:
            raise RequestError(
                f"{name} has {size[0]} x {size[1]} pixels; its longer side may have "
                f"{int(limit**0.5)}",
                413,
            )
        return square

    def _spend(self, size: tuple[int, int], name: str) -> None:
        self._left -= self._check_size(size, name)
        if self._left < 0:
            raise RequestError(
                f"with {name} the pictures have more than {self.limits.max_request_pixels} "
                "pixels together",
                413,
            )


def webp_size(file: bytes, name: str) -> tuple[int, int]:
    """Width and height in the header of a WebP file (RFC 9649, sections 2.5 to 2.7).

    Raises:
        RequestError: there is no such header.
    """
    kind = file[12:16]
    if len(file) < MIN_WEBP_BYTES or file[8:12] != b"WEBP":
        raise RequestError(f"{name} is broken, or is not JPEG, PNG or WebP")
    if kind == b"VP8X":
        width, height = (int.from_bytes(file[at : at + 3], "little") for at in (24, 27))
        return width + 1, height + 1
    if kind == b"VP8L":
        bits = int.from_bytes(file[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", file[26:30])
        return width & 0x3FFF, height & 0x3FFF
    raise RequestError(f"{name} is broken, or is not JPEG, PNG or WebP")
