"""Frames of videos by number: bit-equal to decoding the file from its start, in any order."""

import os
import signal
from fractions import Fraction

import av
import lerobot_sets as sets
import numpy as np
import pytest

from opendm.data import video
from opendm.data.video import read_video_frame
from opendm.errors import DataError

CODECS = [
    codec for codec in ("libx264", "mpeg4", "libsvtav1") if codec in av.codec.codecs_available
]
B_FRAMES = {"g": "8", "bf": "3", "b": "400k"}
# gaps of 1 to 9 units of 1/90 s, as from a camera that drops frames
UNEVEN = np.cumsum([1, 3, 9, 2, 1, 7, 3, 3, 8] * 6).tolist()


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
def test_random_access_equals_decoding_from_the_start(tmp_path, kind):
    path = clip(tmp_path / "clip.mp4", kind)
    reference = sets.decode_all(path)
    assert len(reference) == 40
    forward = list(range(40))
    shuffled = np.random.default_rng(1).permutation(40).tolist()
    for number in [*shuffled, *forward, *forward[::-1], 5, 5, 39, 0]:
        np.testing.assert_array_equal(np.asarray(read_video_frame(path, number)), reference[number])


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
    path = clip(tmp_path / "clip.mp4", "libx264")
    seeks, seek = [], video.VideoReader._start

    def counted(reader, key):
        seeks.append(key)
        seek(reader, key)

    monkeypatch.setattr(video.VideoReader, "_start", counted)
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
def test_damage_inside_a_file_never_gives_another_frame(tmp_path, codec):
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
    monkeypatch.setattr(video, "MAX_PIXELS", 64 * 64 - 1)
    path = clip(tmp_path / "clip.mp4", "libx264")
    with pytest.raises(DataError, match="64 x 64 pixels; at most 4095"):
        read_video_frame(path, 0)


def test_time_stamps_are_kept_by_their_bytes_and_listed_once(tmp_path, monkeypatch):
    listed, list_times = [], video.list_times

    def counted(container, stream):
        listed.append(container.name)
        return list_times(container, stream)

    paths = [tmp_path / f"{n}.mp4" for n in range(4)]
    for path in paths:
        sets.write_video(path, noise(3))
    monkeypatch.setattr(video, "_open_videos", video._OpenVideos())
    monkeypatch.setattr(video, "MAX_OPEN_VIDEOS", 1)
    monkeypatch.setattr(video, "list_times", counted)
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
