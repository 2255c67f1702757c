"""Frames of videos by number: bit-equal to decoding the file from its start, in any order.

Every claim holds for both readers; torchcodec's are skipped where it is not installed.
"""

import logging
import os
import signal
import sys
from fractions import Fraction
from types import SimpleNamespace

import av
import lerobot_sets as sets
import numpy as np
import pytest
import torch

from opendm.data import picture_size, video, video_pyav, video_reader, video_torchcodec
from opendm.data.video import read_video_frame
from opendm.errors import DataError

USED_CODECS = video_torchcodec.CODECS
CODECS = [
    codec for codec in ("libx264", "mpeg4", "libsvtav1") if codec in av.codec.codecs_available
]
B_FRAMES = {"g": "8", "bf": "3", "b": "400k"}
# gaps of 1 to 9 units of 1/90 s, as from a camera that drops frames
UNEVEN = np.cumsum([1, 3, 9, 2, 1, 7, 3, 3, 8] * 6).tolist()


@pytest.fixture(params=["pyav", "torchcodec"], autouse=True)
def reader(request, monkeypatch):
    """The reader from the second frame on; torchcodec for codecs too that it is not used for."""
    monkeypatch.setattr(video, "USES_BEFORE_TORCHCODEC", 2)
    if request.param == "pyav":
        monkeypatch.setattr(video_torchcodec, "video_decoder", lambda: None)
    elif video_torchcodec.video_decoder() is None:
        pytest.skip("torchcodec is not installed, or finds no FFmpeg")
    monkeypatch.setattr(video_torchcodec, "CODECS", {"av1", "h264", "mpeg4"})
    return request.param


def open_reader(path):
    return next(r for key, r in video._open_videos.readers.items() if key[0] == path)


def noise(count=40, seed=0):
    return sets._pictures(np.random.default_rng(seed), count, 64, 64)


def clip(path, kind):
    stamps, time_base, fps, codec = None, None, 10, "libx264"
    options = B_FRAMES
    if kind == "offset":
        stamps, time_base = [7 + 3 * t for t in range(40)], Fraction(1, 30)
    elif kind == "uneven":
        stamps, time_base = UNEVEN[:40], Fraction(1, 90)
    elif kind == "29.97":
        fps = Fraction(30000, 1001)
    elif kind == "open-gop":
        options = {"x264-params": "open-gop=1:keyint=8:min-keyint=2:bframes=3:b-adapt=0"}
    elif kind == "intra-refresh":
        options = {"x264-params": "intra-refresh=1:keyint=10:bframes=0"}
    elif kind == "one-key-frame":
        options = {"g": "1000", "bf": "2"}
    elif kind in CODECS:
        codec = kind
        options = {"g": "2", "crf": "30"} if kind == "libsvtav1" else B_FRAMES
    sets.write_video(path, noise(), fps, codec=codec, options=options, stamps=stamps,
                     time_base=time_base)  # fmt: skip
    return path


KINDS = ("offset", "uneven", "29.97", "open-gop", "intra-refresh", "one-key-frame")


@pytest.mark.parametrize("kind", [*CODECS, *KINDS])
def test_random_access_equals_decoding_from_the_start(tmp_path, kind, reader):
    path = clip(tmp_path / "clip.mp4", kind)
    reference = sets.decode_all(path)
    assert len(reference) == 40
    forward = list(range(40))
    shuffled = np.random.default_rng(1).permutation(40).tolist()
    for number in [*shuffled, *forward, *forward[::-1], 5, 5, 39, 0]:
        np.testing.assert_array_equal(np.asarray(read_video_frame(path, number)), reference[number])
    used = isinstance(open_reader(path), video_torchcodec.TorchcodecReader)
    assert used == (reader == "torchcodec")


@pytest.mark.parametrize("suffix", ["mkv", "ts", "avi"])
def test_containers_that_seek_inexactly_give_the_same_frames(tmp_path, suffix):
    path = tmp_path / f"clip.{suffix}"
    sets.write_video(path, noise(), options=B_FRAMES)
    reference = sets.decode_all(path)
    for number in [*np.random.default_rng(2).permutation(40).tolist(), 30, 31]:
        np.testing.assert_array_equal(np.asarray(read_video_frame(path, number)), reference[number])


def test_frames_that_the_edit_list_cuts_off_do_not_count(tmp_path):
    whole, path = clip(tmp_path / "whole.mp4", "libx264"), tmp_path / "cut.mp4"
    options = {"avoid_negative_ts": "disabled"}
    with av.open(str(whole)) as source, av.open(str(path), "w", options=options) as target:
        stream = source.streams.video[0]
        shift = round(5 / 10 / stream.time_base)
        copy = target.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.size:
                packet.pts, packet.dts, packet.stream = packet.pts - shift, packet.dts - shift, copy
                target.mux(packet)
    reference = sets.decode_all(path)
    assert len(reference) == 35
    for number in (20, 0, 1, 34, 3):
        np.testing.assert_array_equal(np.asarray(read_video_frame(path, number)), reference[number])


def test_containers_without_time_stamps_are_counted(tmp_path):
    if "mpeg4" not in CODECS:
        pytest.skip("this PyAV has no mpeg4 encoder")
    path = tmp_path / "clip.m4v"  # an elementary stream has no container
    sets.write_video(path, noise(12), codec="mpeg4", options={"g": "4"})
    reference = sets.decode_all(path)
    for number in (7, 3, 3, 11, 0):
        np.testing.assert_array_equal(np.asarray(read_video_frame(path, number)), reference[number])


def test_the_next_frame_needs_no_seek(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "USES_BEFORE_TORCHCODEC", 10**6)
    path = clip(tmp_path / "clip.mp4", "libx264")
    seeks, seek = [], video_pyav.PyavReader._start

    def counted(reader, key):
        seeks.append(key)
        seek(reader, key)

    monkeypatch.setattr(video_pyav.PyavReader, "_start", counted)
    for number in range(10, 16):
        read_video_frame(path, number)
    assert len(seeks) == 1
    read_video_frame(path, 12)
    assert len(seeks) == 2
    read_video_frame(path, 39)
    assert len(seeks) == 3


def test_open_decoders_are_bounded_and_a_new_file_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "MAX_OPEN_VIDEOS", 3)
    paths = [tmp_path / f"{n}.mp4" for n in range(5)]
    for number, path in enumerate(paths):
        sets.write_video(path, noise(3, seed=number))
        read_video_frame(path, 1)
    assert len(video._open_videos.readers) == 3
    sets.write_video(paths[4], noise(3, seed=77))
    new = sets.decode_all(paths[4])[1]
    np.testing.assert_array_equal(np.asarray(read_video_frame(paths[4], 1)), new)


def test_a_forked_process_reads_the_same_and_leaves_the_parent_alone(tmp_path):
    path = clip(tmp_path / "clip.mp4", "libx264")
    reference = sets.decode_all(path)
    read_video_frame(path, 12)
    child = os.fork()
    if child == 0:
        same = False
        signal.alarm(20)  # a decoder of the parent may wait for a thread that was not forked
        try:
            same = all(
                (np.asarray(read_video_frame(path, n)) == reference[n]).all() for n in (3, 30)
            )
        finally:
            os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    for number in (13, 2, 31):
        np.testing.assert_array_equal(np.asarray(read_video_frame(path, number)), reference[number])


@pytest.mark.parametrize("number", [40, 10**6, -1])
def test_a_frame_past_the_end_is_named(tmp_path, number):
    path = clip(tmp_path / "clip.mp4", "libx264")
    with pytest.raises(DataError, match=f"{path} has no frame {number}, it has 40"):
        read_video_frame(path, number)


def test_a_cut_file_is_named_with_its_frame(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip(tmp_path / "whole.mp4", "libx264").read_bytes()[:3000])
    with pytest.raises(DataError, match=f"video {path} cannot be opened"):
        read_video_frame(path, 0)
    path.write_text("no video")
    with pytest.raises(DataError, match=f"video {path} cannot be opened"):
        read_video_frame(path, 0)


@pytest.mark.parametrize("codec", CODECS)
def test_damage_inside_a_file_never_gives_another_frame(tmp_path, codec, monkeypatch):
    monkeypatch.setattr(video_torchcodec, "CODECS", USED_CODECS)
    whole = clip(tmp_path / "whole.mp4", codec)
    reference = sets.decode_all(whole)
    content = bytearray(whole.read_bytes())
    middle = content.index(b"mdat") + 2000
    content[middle : middle + 600] = bytes(600)
    path = tmp_path / "damaged.mp4"
    path.write_bytes(content)
    refused = []
    for number in range(40):
        try:
            picture = np.asarray(read_video_frame(path, number)).astype(int)
        except DataError as error:
            refused.append(str(error))
            continue
        distance = [np.abs(picture - other).mean() for other in reference]
        if min(distance) < 5:
            assert int(np.argmin(distance)) == number
    assert refused
    assert all(str(path) in message for message in refused)


def test_large_videos_are_refused_before_decoding(tmp_path, monkeypatch):
    monkeypatch.setattr(picture_size, "MAX_PIXELS", 64 * 64 - 1)
    path = clip(tmp_path / "clip.mp4", "libx264")
    with pytest.raises(DataError, match="64 x 64 pixels; at most 4095"):
        read_video_frame(path, 0)


def test_time_stamps_are_kept_by_their_bytes_and_listed_once(tmp_path, monkeypatch):
    listed, list_times = [], video_reader.list_times

    def counted(container, stream):
        listed.append(container.name)
        return list_times(container, stream)

    paths = [tmp_path / f"{n}.mp4" for n in range(4)]
    for path in paths:
        sets.write_video(path, noise(3))
    monkeypatch.setattr(video, "_open_videos", video._OpenVideos())
    monkeypatch.setattr(video, "MAX_OPEN_VIDEOS", 1)
    monkeypatch.setattr(video_pyav, "list_times", counted)
    for path in paths * 2:
        read_video_frame(path, 1)
    assert listed == list(map(str, paths))
    one = video._open_videos.times_bytes // 4
    monkeypatch.setattr(video, "MAX_TIMES_BYTES", 2 * one)
    sets.write_video(paths[0], noise(3, seed=7))
    read_video_frame(paths[0], 1)
    kept = video._open_videos
    assert [key[0] for key in kept.times] == [paths[3], paths[0]]
    assert kept.times_bytes == sum(times.num_bytes for times in kept.times.values()) <= 2 * one


class FakeDecoder:
    """What torchcodec gives for a file, from PyAV; a test says what is wrong with it."""

    wrong = None
    opened = 0

    def __init__(self, path, **options):
        assert options == {"dimension_order": "NHWC", "num_ffmpeg_threads": 1}
        FakeDecoder.opened += 1
        self.frames = sets.decode_all(path)
        with av.open(str(path)) as container:
            self.times = [float(f.pts * f.time_base) for f in container.decode(video=0)]

    def get_frame_at(self, number):
        if self.wrong == "error" and number == 7:
            raise RuntimeError("no frame")
        pixels = torch.from_numpy(self.frames[number].copy())
        if self.wrong == "pixels":
            pixels[-1, -1, -1] += 1
        if self.wrong == "turned":
            pixels = pixels.flip(0, 1)
        later = self.wrong == "time" and number == 7
        return SimpleNamespace(data=pixels, pts_seconds=self.times[number + later])


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(video_torchcodec, "video_decoder", lambda: FakeDecoder)
    monkeypatch.setattr(FakeDecoder, "opened", 0)
    return lambda wrong: monkeypatch.setattr(FakeDecoder, "wrong", wrong)


@pytest.mark.parametrize(
    ("wrong", "name"), [(None, "k.mp4"), ("pixels", "k.mp4"), ("turned", "k.mp4"), (None, "k.ts")]
)
def test_torchcodec_is_used_where_it_gives_the_same_pixels(tmp_path, fake, wrong, name):
    fake(wrong)
    path = clip(tmp_path / name, "libx264")
    reference = sets.decode_all(path)
    for number in (3, 7, 7, 0, 39):
        np.testing.assert_array_equal(np.asarray(read_video_frame(path, number)), reference[number])
    used = isinstance(open_reader(path), video_torchcodec.TorchcodecReader)
    assert used == (wrong is None and name == "k.mp4")


def test_codecs_that_hide_damage_stay_with_pyav(tmp_path, fake, monkeypatch):
    fake(None)
    monkeypatch.setattr(video_torchcodec, "CODECS", USED_CODECS)
    path = clip(tmp_path / "clip.mp4", "libx264")
    for number in range(4):
        read_video_frame(path, number)
    assert FakeDecoder.opened == 0


@pytest.mark.parametrize("wrong", ["error", "time"])
def test_torchcodec_frames_of_another_time_and_errors_name_file_and_frame(tmp_path, fake, wrong):
    fake(wrong)
    path = clip(tmp_path / "clip.mp4", "libx264")
    reference = sets.decode_all(path)
    for number in (0, 1, 2):
        read_video_frame(path, number)
    assert FakeDecoder.opened == 1
    with pytest.raises(DataError, match=f"frame 7 of video {path}"):
        read_video_frame(path, 7)
    np.testing.assert_array_equal(np.asarray(read_video_frame(path, 8)), reference[8])
    assert FakeDecoder.opened == 2  # the decoder that met damage is not used again


def test_files_that_are_left_soon_are_not_opened_twice(tmp_path, fake, monkeypatch):
    fake(None)
    monkeypatch.setattr(video, "USES_BEFORE_TORCHCODEC", 4)
    path = clip(tmp_path / "clip.mp4", "libx264")
    for number in range(3):
        read_video_frame(path, number)
    assert FakeDecoder.opened == 0
    read_video_frame(path, 3)
    assert FakeDecoder.opened == 1


def test_a_torchcodec_that_cannot_be_loaded_is_named_once(monkeypatch, caplog):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    video_torchcodec.video_decoder.cache_clear()
    with caplog.at_level(logging.INFO):
        assert video_torchcodec.video_decoder() is None
        assert video_torchcodec.video_decoder() is None
    video_torchcodec.video_decoder.cache_clear()
    assert len(caplog.messages) == 1
    assert "torchcodec cannot be used" in caplog.messages[0]
