"""Exact frames of a video file by PyAV, which the numbers of frames are defined by.

A frame is reached from the last key frame before it, or by going on from where the decoder stands.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import av
from av.video.frame import VideoFrame
from PIL import Image

from opendm.data.video_reader import FrameTimes, VideoReader, list_times, open_video
from opendm.errors import DataError

MAX_STEPS_BACK: Final = 3
"""Earlier key frames to try before a file is decoded from its start."""


class PyavReader(VideoReader):
    """One open file, decoded by PyAV.

    Args:
        path: the file.
        times: its time stamps, where they are known already.

    Raises:
        DataError: the file cannot be opened or read, or its pictures are too large.
    """

    def __init__(self, path: Path, times: FrameTimes | None = None) -> None:
        self.last: tuple[int, VideoFrame] | None = None
        self.container, self.stream = open_video(path)
        # decoders with threads do not survive a fork, and workers are as many as cores already
        self.stream.codec_context.thread_count = 1
        super().__init__(path, times or list_times(self.container, self.stream))
        self._frames = self._decode()

    def close(self) -> None:
        """Free the decoder, its last frame too."""
        self._frames, self.last = iter(()), None  # a generator refers to its reader
        self.container.close()

    def frame(self, number: int) -> Image.Image:
        """A frame by its number, from 0, RGB.

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
        return Image.fromarray(frame.to_ndarray(format="rgb24"))  # to_image copies row by row

    def _find(self, number: int) -> VideoFrame | None:
        times, keys = self.times.frames, self.times.key_frames
        key, key_number = -1, 0
        if times:
            key = bisect_right(keys, self.time_of(number)) - 1
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
