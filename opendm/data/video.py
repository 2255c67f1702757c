"""Exact frames of video files: number n is the n-th shown, whatever its time stamp says."""

import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Final

from PIL import Image

from opendm.data.video_pyav import PyavReader
from opendm.data.video_reader import FrameTimes, VideoReader, list_times, open_video
from opendm.data.video_torchcodec import with_torchcodec
from opendm.errors import DataError

__all__ = ["list_times", "open_video", "read_video_frame"]

MAX_OPEN_VIDEOS: Final = 16
"""Decoders that a process keeps open."""
MAX_TIMES_BYTES: Final = 128 * 1024**2
"""Time stamps that a process remembers, 8 bytes a frame and a key frame: 150 hours at 30 fps.

Listing them reads the whole file, which costs more than the frame."""

USES_BEFORE_TORCHCODEC: Final = 64
"""Frames of an open file before it is opened again by torchcodec.

A frame of AV1 then takes some 5 % less; opening takes as long as two frames or more, so that 60
files in turn took 2.4 times as long."""

FileKey = tuple[Path, int, int]
"""Path, size and modification time."""


class _OpenVideos:
    """Open decoders, the least recently used closed first; those of a parent process are left."""

    def __init__(self) -> None:
        self.process = 0
        self.readers: OrderedDict[FileKey, VideoReader] = OrderedDict()
        self.uses: Counter[FileKey] = Counter()
        self.times: OrderedDict[FileKey, FrameTimes] = OrderedDict()
        self.times_bytes = 0

    def reader(self, path: Path) -> VideoReader:
        if self.process != os.getpid():
            self.process = os.getpid()
            self.readers = OrderedDict()
            self.uses.clear()
        status = path.stat()
        key = (path, status.st_size, status.st_mtime_ns)
        if key in self.readers:
            self.readers.move_to_end(key)
            self.uses[key] += 1
            if self.uses[key] == USES_BEFORE_TORCHCODEC:
                self.readers[key] = with_torchcodec(self.readers[key])
            return self.readers[key]
        reader = self.readers[key] = PyavReader(path, self.times.get(key))
        self.uses[key] = 1
        self._remember(key, reader.times)
        while len(self.readers) > MAX_OPEN_VIDEOS:
            oldest, closed = self.readers.popitem(last=False)
            closed.close()
            del self.uses[oldest]
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
    return reader.frame(frame_index)
