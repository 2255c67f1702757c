"""Frames of a video file by torchcodec, where they are known to be PyAV's.

torchcodec 0.17 has other frames in transport streams and AVI files, rounds more than 8 bits
otherwise, turns pictures as a file asks, and does not say where it hides damage behind old pixels.
"""

import functools
import logging
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from opendm.data.video_pyav import PyavReader
from opendm.data.video_reader import FrameTimes, VideoReader
from opendm.errors import DataError

logger = logging.getLogger(__name__)

CONTAINERS: Final = frozenset({"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"})
"""FFmpeg's names of those that seek exactly."""
CODECS: Final = frozenset({"av1"})
"""Those whose decoder fails at damage. H.264's shows an old picture, and only PyAV says so."""


class TorchcodecReader(VideoReader):
    """One open file, decoded by torchcodec.

    Args:
        path: the file.
        times: its time stamps.
        time_base: their unit, in seconds.
        make_decoder: torchcodec's class.

    Raises:
        ValueError: torchcodec does not read the file.
        RuntimeError: the same.
    """

    def __init__(
        self, path: Path, times: FrameTimes, time_base: Fraction, make_decoder: Callable[..., Any]
    ) -> None:
        super().__init__(path, times)
        self.time_base = time_base
        self.make_decoder = make_decoder
        self.decoder: Any | None = self._open()

    def _open(self) -> Any:
        return self.make_decoder(self.path, dimension_order="NHWC", num_ffmpeg_threads=1)

    def close(self) -> None:
        """Free the decoder."""
        self.decoder = None

    def frame(self, number: int) -> Image.Image:
        """A frame by its number, from 0, RGB.

        Raises:
            DataError: the file is broken or has no such frame.
        """
        due = self.time_of(number)
        # behind damage a decoder goes on from pictures that are not there, so it is not kept
        decoder, self.decoder = self.decoder, None
        try:
            decoder = decoder or self._open()
            found = decoder.get_frame_at(number)
        except (RuntimeError, ValueError, IndexError) as error:
            raise DataError(
                f"frame {number} of video {self.path} cannot be decoded: {error}"
            ) from error
        if round(found.pts_seconds / self.time_base) != due:
            raise DataError(f"frame {number} of video {self.path} is missing or damaged")
        self.decoder = decoder
        return Image.fromarray(found.data.numpy())


def with_torchcodec(reader: VideoReader) -> VideoReader:
    """A reader of the same file by torchcodec, and the other closed, where it suits; or the same.

    It suits where container and codec are known to, and the first frame is PyAV's to the bit.
    """
    if not isinstance(reader, PyavReader):
        return reader
    stream = reader.stream
    is_known = (
        reader.container.format.name in CONTAINERS
        and stream.codec.canonical_name in CODECS
        and bool(reader.times.frames)
    )
    make_decoder = video_decoder() if is_known else None
    if make_decoder is None or stream.time_base is None:
        return reader
    try:
        other = TorchcodecReader(reader.path, reader.times, stream.time_base, make_decoder)
        is_equal = np.array_equal(np.asarray(reader.frame(0)), np.asarray(other.frame(0)))
    except (RuntimeError, ValueError, DataError):
        return reader
    if is_equal:
        reader.close()
        return other
    return reader


@functools.cache
def video_decoder() -> Any | None:
    """The decoder; None where torchcodec is not installed or finds no FFmpeg, which is logged."""
    try:
        from torchcodec.decoders import VideoDecoder
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        logger.info("videos are read by PyAV, torchcodec cannot be used: %s", reason)
        return None
    return VideoDecoder
