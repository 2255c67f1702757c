"""Pictures from records: what is read, what is refused, and who shares an augmentation."""

import json
import struct
import time
import zlib

import lerobot_sets as sets
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torchvision.transforms import v2

from opendm.data import parquet_images
from opendm.data.augmentations import TrainingTransformPipeline
from opendm.data.parquet_images import read_image_cell
from opendm.data.transforms import LoadHistory, LoadImages, PixelTransform
from opendm.data.transforms.images import load_image
from opendm.errors import DataError


def picture(seed=0, size=(40, 30)):
    return Image.fromarray(sets._pictures(np.random.default_rng(seed), 1, *size)[0])


def load(root, url, **options):
    return load_image(
        {"type": "image", "url": url}, str(root), **{"allow_outside_root": False, **options}
    )


def png_of(width, height):
    """A PNG whose header says this size; its few bytes of data do not matter."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("width", "height"), [(7100, 7100), (13000, 13000), (60000, 60000), (1, 50000), (50000, 1)]
)
def test_large_pictures_are_refused_by_their_header(tmp_path, width, height):
    (tmp_path / "bomb.png").write_bytes(png_of(width, height))
    start = time.perf_counter()
    with pytest.raises(DataError, match=r"bomb\.png .*pixels"):
        load(tmp_path, "bomb.png")
    assert time.perf_counter() - start < 0.5


def test_large_pictures_in_parquet_are_refused(tmp_path):
    cells = [{"bytes": png_of(7100, 7100), "path": None}]
    sets.write_parquet(tmp_path / "a.parquet", pa.table({"camera": cells}))
    record = {"type": "parquet", "url": "a.parquet", "row": 0, "column": "camera"}
    with pytest.raises(DataError, match=r"a\.parquet, row 0 has 7100 x 7100 pixels"):
        load_image(record, str(tmp_path), allow_outside_root=False)


@pytest.mark.parametrize("url", [
    "http://localhost/a.png", "https://h/a.png", "s3://bucket/a.png", "file:///etc/hostname",
    "FILE:/etc/hostname", "data:image/png;base64,AA"])  # fmt: skip
@pytest.mark.parametrize("outside", [True, False])
def test_only_paths_are_read(tmp_path, url, outside):
    with pytest.raises(DataError, match="is not a path"):
        load(tmp_path, url, allow_outside_root=outside)


def test_links_out_of_the_folder_need_permission(tmp_path):
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir(), other.mkdir()
    picture().save(other / "a.png")
    picture().save(root / "b.png")
    (root / "file.png").symlink_to(other / "a.png")
    (root / "folder").symlink_to(other)
    (root / "inside.png").symlink_to(root / "b.png")
    for url in ("file.png", "folder/a.png"):
        with pytest.raises(DataError, match="allow-outside-root"):
            load(root, url)
        assert load(root, url, allow_outside_root=True).size == (40, 30)
    assert load(root, "inside.png").size == (40, 30)
    (tmp_path / "rooty").mkdir()
    picture().save(tmp_path / "rooty" / "a.png")
    (root / "near").symlink_to(tmp_path / "rooty")
    with pytest.raises(DataError, match="allow-outside-root"):
        load(root, "near/a.png")


def test_a_root_that_is_a_link_itself_is_a_root(tmp_path):
    (tmp_path / "real").mkdir()
    picture().save(tmp_path / "real" / "a.png")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert load(tmp_path / "link", "a.png").size == (40, 30)


def test_downloads_of_the_hub_are_links_to_its_blobs(tmp_path):
    blobs, snapshot = tmp_path / "set" / "blobs", tmp_path / "set" / "snapshots" / "1234"
    blobs.mkdir(parents=True), snapshot.mkdir(parents=True)
    picture().save(blobs / "0a1b", format="PNG")
    (snapshot / "a.png").symlink_to("../../blobs/0a1b")
    assert load(snapshot, "a.png").size == (40, 30)
    (snapshot / "b.png").symlink_to("/etc/hostname")
    with pytest.raises(DataError, match="allow-outside-root"):
        load(snapshot, "b.png")


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize("keep", [0, 20, 600])
def test_cut_files_are_named(tmp_path, suffix, keep):
    path = tmp_path / f"a.{suffix}"
    picture(size=(200, 200)).save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=rf"{path} cannot be decoded"):
        load(tmp_path, path.name)


@pytest.mark.parametrize(("record", "message"), [
    ({"type": "video", "url": "a"}, "has no 'frame_idx'"),
    ({"type": "video", "url": "a", "frame_idx": -1}, "frame_idx -1 .*not a whole number"),
    ({"type": "video", "url": "a", "frame_idx": 1.0}, "not a whole number"),
    ({"type": "video", "url": "a", "frame_idx": True}, "not a whole number"),
    ({"type": "parquet", "url": "a", "row": "1", "column": "c"}, "not a whole number"),
    ({"type": "parquet", "url": "a", "row": 1}, "has no 'column'"),
    ({"type": "tiff", "url": "a"}, "unknown type"),
])  # fmt: skip
def test_records_that_lack_something_say_so(tmp_path, record, message):
    (tmp_path / "a").write_text("")
    with pytest.raises(DataError, match=message):
        load_image(record, str(tmp_path), allow_outside_root=False)


def test_parquet_rows_and_columns_that_do_not_exist_are_named(tmp_path):
    path = tmp_path / "a.parquet"
    sets.write_parquet(path, pa.table({"camera": [{"bytes": b"x", "path": None}] * 3}))
    for row, column, message in ((3, "camera", "no row 3"), (1, "wrist", "no column 'wrist'")):
        with pytest.raises(DataError, match=f"{path} has {message}"):
            load_image({"type": "parquet", "url": "a.parquet", "row": row, "column": column},
                       str(tmp_path), allow_outside_root=False)  # fmt: skip


def test_parquet_cells_may_name_a_file(tmp_path):
    picture(3).save(tmp_path / "3.png")
    sets.write_parquet(tmp_path / "a.parquet",
                       pa.table({"camera": [{"bytes": None, "path": "3.png"},
                                            {"bytes": None, "path": "../3.png"}]}))  # fmt: skip
    record = {"type": "parquet", "url": "a.parquet", "row": 0, "column": "camera"}
    found = load_image(record, str(tmp_path), allow_outside_root=False)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(picture(3)))
    with pytest.raises(DataError, match="leaves the folder"):
        load_image({**record, "row": 1}, str(tmp_path), allow_outside_root=False)


def test_jpeg_pixels_are_those_of_a_whole_decode(tmp_path):
    picture(size=(640, 480)).save(tmp_path / "a.jpg", quality=90)
    with Image.open(tmp_path / "a.jpg") as image:
        expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(np.asarray(load(tmp_path, "a.jpg")), expected)


def test_history_goes_back_in_steps_and_names_bad_frames(tmp_path):
    for t in range(8):
        picture(t).save(tmp_path / f"{t}.png")
    lines = [json.dumps({"images_1": {"type": "image", "url": f"{t}.png"}}) for t in range(8)]
    history = LoadHistory("images_1", str(tmp_path), 3, uniform_fps=2.0)
    sample = {"raw_lines": lines, "meta_data": {"frame_index": 5, "fps": 4}}
    found = history(dict(sample))["history_images"]
    assert len(found) == 2
    for image, t in zip(found, (1, 3), strict=True):
        np.testing.assert_array_equal(np.asarray(image), np.asarray(picture(t)))
    lines[3] = json.dumps({"images_2": {}})
    with pytest.raises(DataError, match="'images_1' is missing in history frame 3"):
        history(dict(sample))
    (tmp_path / "1.png").unlink()
    with pytest.raises(DataError, match="history frame 1: image file"):
        history(dict(sample))


def augment(views, history, seed):
    torch.manual_seed(seed)
    sample = {"images": views} | ({"history_images": history} if history is not None else {})
    done = PixelTransform(TrainingTransformPipeline(32))(sample)
    after = torch.rand(3)
    return [[np.asarray(i) for i in done.get(k, [])] for k in ("images", "history_images")], after


@pytest.mark.parametrize("seed", range(6))
def test_history_changes_neither_the_views_nor_later_draws(seed):
    views = [picture(1), picture(2)]
    torch.manual_seed(seed)
    pipeline = TrainingTransformPipeline(32)
    plain = [np.asarray(pipeline(image)) for image in views]
    without, after_without = augment(views, None, seed)
    with_history, after_with = augment(views, [picture(3)] * 2, seed)
    np.testing.assert_array_equal(plain, without[0])
    np.testing.assert_array_equal(without[0], with_history[0])
    assert torch.equal(after_without, after_with)


def test_history_draws_what_the_first_view_draws_and_the_others_their_own():
    same = picture(1)
    different = 0
    for seed in range(20):
        (views, history), _ = augment([same, same], [same, same, same], seed)
        for earlier in history:
            np.testing.assert_array_equal(earlier, views[0])
        different += bool((views[0] != views[1]).any())
    assert different > 10


def test_history_geometry_does_not_depend_on_the_picture_size():
    turned = {}
    for size in ((64, 64), (64, 48)):
        torch.manual_seed(4)
        white = Image.new("RGB", (64, 64), "white")
        steps = v2.Compose([v2.Resize((32, 32)), v2.RandomRotation(45)])
        sample = {"images": [white], "history_images": [Image.new("RGB", size, "white")]}
        done = PixelTransform(steps)(sample)
        turned[size] = np.asarray(done["history_images"][0])
        np.testing.assert_array_equal(turned[size], np.asarray(done["images"][0]))


def test_views_and_keys_without_history_are_as_before(tmp_path):
    picture().save(tmp_path / "a.png")
    sample = {"images_1": {"type": "image", "url": "a.png"}}
    done = LoadImages(["images_1"], str(tmp_path))(sample)
    assert "history_images" not in PixelTransform(lambda image: image)(done)


def test_frames_that_follow_each_other_read_a_row_group_once_whatever_its_size(
    tmp_path, monkeypatch
):
    cells = {
        name: [{"bytes": bytes([number, t]) * 50, "path": None} for t in range(9)]
        for number, name in enumerate(["top", "wrist", "side"])
    }
    parquet.write_table(pa.table(cells), tmp_path / "a.parquet", row_group_size=3)
    reads, read = [], parquet.ParquetFile.read_row_group

    def counted(file, group, columns):
        reads.append((group, *columns))
        return read(file, group, columns=columns)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", counted)
    monkeypatch.setattr(parquet_images, "_open_tables", parquet_images._OpenTables())
    monkeypatch.setattr(parquet_images, "MAX_GROUP_BYTES", 1)
    for t in range(9):
        for name, column in cells.items():
            assert read_image_cell(tmp_path / "a.parquet", t, name) == column[t]
    assert reads == [(group, name) for group in range(3) for name in cells]
    assert len(parquet_images._open_tables.groups) == 3
