"""Exact frames of video files: number n is the n-th shown, whatever its time stamp says.

A file's packets are listed once per process, without decoding; their sorted time stamps number the
frames, so that an offset start, reordered frames and a variable rate need no arithmetic on rates.
A frame is reached from the last key frame before it, or by going on from where the decoder stands.
"""

import os
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from opendm.errors import DataError

MAX_OPEN_VIDEOS: Final = 16
"""Decoders that a process keeps open."""
MAX_TIMES_BYTES: Final = 128 * 1024**2
"""Time stamps that a process remembers, 8 bytes a frame and a key frame: 150 hours at 30 fps.

Listing them reads the whole file, which costs more than the frame."""
MAX_STEPS_BACK: Final = 3
"""Earlier key frames to try before a file is decoded from its start."""
MAX_PIXELS: Final = 50_000_000
"""Pictures of more pixels are refused before they are decoded; 8K video has 33 million."""

FileKey = tuple[Path, int, int]
"""Path, size and modification time."""


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


class VideoReader:
    """One open file.

    Args:
        path: the file.
        times: its time stamps, where they are known already.

    Raises:
        DataError: the file cannot be opened or read, or its pictures are too large.
    """

    def __init__(self, path: Path, times: FrameTimes | None = None) -> None:
        self.path = path
        self.last: tuple[int, VideoFrame] | None = None
        self.container, self.stream = open_video(path)
        # decoders with threads do not survive a fork, and workers are as many as cores already
        self.stream.codec_context.thread_count = 1
        self.times = times or list_times(self.container, self.stream)
        self._frames = self._decode()

    def close(self) -> None:
        """Free the decoder, its last frame too."""
        self._frames, self.last = iter(()), None  # a generator refers to its reader
        self.container.close()

    def frame(self, number: int) -> VideoFrame:
        """A frame by its number, from 0.

        Raises:
            DataError: the file is broken or has no such frame.
        """
        try:
            frame = self._find(number)
        except av.FFmpegError as error:
            self.last = None
            raise DataError(
                f"frame {number} of video {self.path} cannot be decoded: {error}"
            ) from error
        if frame is None:
            raise DataError(f"frame {number} of video {self.path} is missing or damaged")
        return frame

    def _find(self, number: int) -> VideoFrame | None:
        times, keys = self.times.frames, self.times.key_frames
        key, key_number = -1, 0
        if times:
            if not 0 <= number < len(times):
                raise DataError(f"video {self.path} has no frame {number}, it has {len(times)}")
            key = bisect_right(keys, times[number]) - 1
            key_number = bisect_left(times, keys[key]) if key >= 0 else 0
        here = self.last[0] if self.last else -1
        if self.last is None or here > number or here + 1 < key_number:
            self._start(key)
        # seeking in a transport stream or an AVI is not exact: one further back, or from the start
        for earlier in (*range(key - 1, max(key - 1 - MAX_STEPS_BACK, -1), -1), -1):
            frame = self._advance(number)
            if frame is not None:
                return frame
            self._start(earlier)
        return self._advance(number)

    def _start(self, key: int) -> None:
        """Stand before a key frame; -1 is the start of the file."""
        self.last = None
        if key >= 0:
            start = self.times.key_frames[key]
            self.container.seek(start, stream=self.stream, backward=True)
        else:
            self.container.close()
            self.container, self.stream = open_video(self.path)
            self.stream.codec_context.thread_count = 1
        self._frames = self._decode()

    def _decode(self) -> Iterator[tuple[int, VideoFrame]]:
        """Numbered frames from where the container stands."""
        times = self.times.frames
        is_damaged = False
        for count, frame in enumerate(self.container.decode(self.stream)):
            # decoders hide damage behind the frame before, and go on from there
            is_damaged = frame.is_corrupt or (is_damaged and not frame.key_frame)
            number = count
            if times:
                number = -1 if frame.pts is None else bisect_left(times, frame.pts)
                if not 0 <= number < len(times) or times[number] != frame.pts:
                    continue
            if not is_damaged:
                yield number, frame

    def _advance(self, number: int) -> VideoFrame | None:
        """Decode until a frame is reached; None where there is none before the next or the end."""
        while self.last is None or self.last[0] < number:
            self.last = next(self._frames, None)
            if self.last is None:
                return None
        return self.last[1] if self.last[0] == number else None


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
    if stream.width * stream.height > MAX_PIXELS:
        container.close()
        raise DataError(
            f"video {path} has {stream.width} x {stream.height} pixels; at most {MAX_PIXELS} are "
            "read, so make it smaller"
        )
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


class _OpenVideos:
    """Open decoders, the least recently used closed first; those of a parent process are left."""

    def __init__(self) -> None:
        self.process = 0
        self.readers: OrderedDict[FileKey, VideoReader] = OrderedDict()
        self.times: OrderedDict[FileKey, FrameTimes] = OrderedDict()
        self.times_bytes = 0

    def reader(self, path: Path) -> VideoReader:
        if self.process != os.getpid():
            self.process = os.getpid()
            self.readers = OrderedDict()
        status = path.stat()
        key = (path, status.st_size, status.st_mtime_ns)
        if key in self.readers:
            self.readers.move_to_end(key)
            return self.readers[key]
        reader = self.readers[key] = VideoReader(path, self.times.get(key))
        self._remember(key, reader.times)
        while len(self.readers) > MAX_OPEN_VIDEOS:
            self.readers.popitem(last=False)[1].close()
        return reader

    def _remember(self, key: FileKey, times: FrameTimes) -> None:
        if key not in self.times:
            self.times[key] = times
            self.times_bytes += times.num_bytes
        self.times.move_to_end(key)
        while self.times_bytes > MAX_TIMES_BYTES and len(self.times) > 1:
            self.times_bytes -= self.times.popitem(last=False)[1].num_bytes


_open_videos = _OpenVideos()


def read_video_frame(path: Path, frame_index: int) -> Image.Image:
    """Frame ``frame_index`` (from 0, in the order of showing) of a video, RGB.

    Not for several threads at once.

    Raises:
        DataError: the file is broken or has fewer frames; the message names file and frame.
    """
    try:
        reader = _open_videos.reader(path)
    except OSError as error:
        raise DataError(f"video {path} cannot be read: {error}") from error
    return reader.frame(frame_index).to_image()
