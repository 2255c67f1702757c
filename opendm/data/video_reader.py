"""What readers of a video file share: the numbers of its frames, and how the file is opened.

A file's packets are listed once per process, without decoding; their sorted time stamps number the
frames, so that an offset start, reordered frames and a variable rate need no arithmetic on rates.
"""

from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass
from pathlib import Path

import av
from av.container import InputContainer
from av.video.stream import VideoStream
from PIL import Image

from opendm.data.picture_size import size_fault
from opendm.errors import DataError


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """Time stamps of a video, in the stream's unit and in the order of showing."""

    frames: "array[int]"
    """Empty where the file has none or not one per frame; such a file is decoded from its start."""
    key_frames: "array[int]"

    @property
    def num_bytes(self) -> int:
        """Memory of the time stamps, and about that of their entry in a table."""
        return 8 * (len(self.frames) + len(self.key_frames)) + 512


class VideoReader(ABC):
    """One open file.

    Args:
        path: the file.
        times: its time stamps.
    """

    def __init__(self, path: Path, times: FrameTimes) -> None:
        self.path = path
        self.times = times

    @abstractmethod
    def frame(self, number: int) -> Image.Image:
        """A frame by its number, from 0, RGB.

        Raises:
            DataError: the file is broken or has no such frame.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the decoder."""

    def time_of(self, number: int) -> int:
        """The time stamp of a frame, of a file that has them.

        Raises:
            DataError: it has no such frame.
        """
        if not 0 <= number < len(self.times.frames):
            raise DataError(
                f"video {self.path} has no frame {number}, it has {len(self.times.frames)}"
            )
        return self.times.frames[number]


def open_video(path: Path) -> tuple[InputContainer, VideoStream]:
    """Open a file and its first video stream.

    Raises:
        DataError: it is no video, or its pictures are too large.
    """
    try:
        container = av.open(str(path))
    except (av.FFmpegError, OSError) as error:
        raise DataError(f"video {path} cannot be opened: {error}") from error
    if not container.streams.video:
        container.close()
        raise DataError(f"{path} has no video stream")
    stream = container.streams.video[0]
    if fault := size_fault(stream.width, stream.height):
        container.close()
        raise DataError(f"video {path} {fault}")
    return container, stream


def list_times(container: InputContainer, stream: VideoStream) -> FrameTimes:
    """Time stamps of all frames, from the packets; leaves the container at its end.

    Raises:
        DataError: the file cannot be read; the container is closed.
    """
    frames, keys = array("q"), array("q")
    try:
        for packet in container.demux(stream):
            if not packet.size or packet.is_discard:
                continue  # the end of the stream, or cut away by the file's edit list
            if packet.pts is None or container.format.name == "avi":  # AVI has no times of showing
                return FrameTimes(array("q"), array("q"))
            frames.append(packet.pts)
            if packet.is_keyframe:
                keys.append(packet.pts)
    except av.FFmpegError as error:
        container.close()
        raise DataError(f"video {container.name} cannot be read: {error}") from error
    if len(set(frames)) != len(frames):
        return FrameTimes(array("q"), array("q"))
    return FrameTimes(array("q", sorted(frames)), array("q", sorted(keys)))
