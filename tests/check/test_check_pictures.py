"""Pictures and videos: what is wrong with a file is said with the record that uses it."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from lerobot_sets import write_video
from PIL import Image

from opendm.check.pictures import PictureRules, check_pictures
from opendm.check.records import PictureUse
from opendm.data.picture_size import MAX_PIXELS, MAX_SIDE


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "good.jpg")
    Image.fromarray(pixels).save(folder / "good.png")
    Image.fromarray(pixels).save(folder / "good.webp")
    write_video(folder / "good.mp4", [pixels] * 6)
    return folder


def look(root, url, kind="image", last_frame=0, **rules):
    use = PictureUse("e.jsonl:7", "images_1", kind)
    use.add(last_frame)
    problems = check_pictures({url: use}, PictureRules(str(root), **rules))
    assert all(problem.where == "e.jsonl:7" for problem in problems)
    return [(problem.field, problem.code) for problem in problems]


URL = "images_1.url"


@pytest.mark.parametrize("decode", [False, True])
def test_good_files_have_no_problem(root, decode):
    for name in ("good.jpg", "./good.png", "good.webp"):
        assert look(root, name, decode=decode) == []
    assert look(root, "good.mp4", "video", 5, decode=decode) == []


def test_a_camera_that_appends_bytes_or_drops_the_end_marker_is_not_refused(root):
    content = (root / "good.jpg").read_bytes()
    (root / "long.jpg").write_bytes(content + b"\0" * 5000)
    assert look(root, "long.jpg") == []


@pytest.mark.parametrize("name", ["good.jpg", "good.png"])
@pytest.mark.parametrize("share", [0.5, 0.97])
def test_cut_files_are_found_by_their_headers_alone(root, name, share):
    content = (root / name).read_bytes()
    (root / f"cut-{name}").write_bytes(content[: int(len(content) * share)])
    assert look(root, f"cut-{name}") == [(URL, "picture_truncated")]


def test_files_that_are_no_pictures(root):
    (root / "text.jpg").write_text("no picture")
    (root / "empty.jpg").touch()
    (root / "folder.jpg").mkdir()
    os.mkfifo(root / "pipe.jpg")
    assert look(root, "text.jpg") == [(URL, "picture_corrupt")]
    assert look(root, "empty.jpg") == [(URL, "picture_empty")]
    assert look(root, "folder.jpg") == look(root, "pipe.jpg") == [(URL, "picture_file")]
    assert look(root, "gone.jpg") == [(URL, "picture_missing")]


def bomb(width, height):
    """A PNG whose header promises ``width`` x ``height`` pixels, in a few bytes."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(
            ">I", zlib.crc32(kind + data)
        )  # fmt: skip

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0" * 10)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_decompression_bombs_are_refused_from_their_headers(root):
    for width, height in ((13_000, 13_000), (20_000, 20_000), (1, MAX_SIDE + 1), (50_000, 1)):
        assert width * height > MAX_PIXELS or max(width, height) > MAX_SIDE
        (root / "bomb.png").write_bytes(bomb(width, height))
        assert look(root, "bomb.png") == [(URL, "picture_large")]


def test_damage_inside_a_jpeg_is_found_by_decoding_where_a_decoder_sees_it(root):
    """No decoder sees two thirds of it; of the rest, some only shows in pixels."""
    good = (root / "good.jpg").read_bytes()
    rng = np.random.default_rng(0)
    by_pixels_only = 0
    for _ in range(60):
        content = bytearray(good)
        place = int(rng.integers(len(good) // 2, len(good) - 10))
        content[place : place + 8] = rng.bytes(8)
        (root / "rotten.jpg").write_bytes(content)
        try:
            Image.open(io.BytesIO(content)).load()
        except OSError:
            assert look(root, "rotten.jpg", decode=True) == [(URL, "picture_truncated")]
            by_pixels_only += look(root, "rotten.jpg") == []
        else:
            assert look(root, "rotten.jpg", decode=True) == []
    assert by_pixels_only


@pytest.mark.parametrize("scheme", ["http://169.254.169.254/x", "s3://b/x", "file:///etc/hostname"])
def test_schemes_are_refused_and_no_network_is_asked(root, scheme):
    assert look(root, scheme) == [(URL, "scheme")]


def test_paths_and_links_that_leave_the_root_are_refused_unless_allowed(root):
    outside = root.parent / "outside.jpg"
    outside.write_bytes((root / "good.jpg").read_bytes())
    (root / "link.jpg").symlink_to(outside)
    (root / "folder").symlink_to(root.parent)
    for url in ("../outside.jpg", "a/../../outside.jpg", "link.jpg", "folder/outside.jpg"):
        assert look(root, url) == [(URL, "outside_root")], url
        if not url.startswith("a/"):
            assert look(root, url, allow_outside_root=True) == []


def test_a_video_is_compared_with_the_frames_that_are_used(root):
    assert look(root, "good.mp4", "video", 6) == [("images_1.frame_idx", "frame_index")]
    (root / "text.mp4").write_text("no video")
    assert look(root, "text.mp4", "video") == [(URL, "picture_corrupt")]
    content = (root / "good.mp4").read_bytes()
    (root / "cut.mp4").write_bytes(content[: len(content) // 2])
    [(_, code)] = look(root, "cut.mp4", "video", 5)
    assert code in ("picture_corrupt", "frame_index")
