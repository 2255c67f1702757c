"""Which JSONL files and cameras a folder has, and what the first pass over them judges."""

import json
import os

import pytest

from opendm.constants.robot import ActionMode
from opendm.data import formats
from opendm.data.config import DM05DataConfig
from opendm.data.formats import dataset_info, open_source
from opendm.data.jsonl_files import list_jsonl
from opendm.data.jsonl_scan import scan_jsonl
from opendm.errors import DataError

PICTURE = {"type": "image", "url": "a.jpg"}


def frame(cameras=(1,), size=2, **changes):
    keys = [f"images_{camera}" for camera in cameras]
    values = {"state": [0.5] * size, "action": [1.0] * size, "prompt": "go"}
    return dict.fromkeys(keys, PICTURE) | values | changes


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(texts) + "\n")
    return path


def config(folder, **options):
    return DM05DataConfig(dataset_name=str(folder), action_mode=ActionMode.ABSOLUTE, **options)


def test_the_cameras_are_those_of_all_files_in_the_order_of_their_numbers(tmp_path):
    write(tmp_path / "a.jsonl", [frame((2,)), frame((9,))])
    write(tmp_path / "b.jsonl", [frame((10, "wrist", 1))])
    info = dataset_info(str(tmp_path))
    assert info["image_keys"] == ["images_1", "images_2", "images_10", "images_wrist"]
    assert info["image_prompts"] == ["Camera 1", "Camera 2", "Camera 3", "Camera 4"]
    write(tmp_path / "c.jsonl", [frame((3,))])
    assert dataset_info(str(tmp_path))["image_keys"][2] == "images_3"


def test_first_frames_are_read_once_while_nothing_changes(tmp_path, monkeypatch):
    path, reads, first_line = write(tmp_path / "a.jsonl", [frame()]), [], formats.first_line
    monkeypatch.setattr(formats, "first_line", lambda p: reads.append(p) or first_line(p))
    for _ in range(3):
        dataset_info(str(tmp_path))
    assert reads == [path]
    os.utime(path, ns=(1, 1))
    dataset_info(str(tmp_path))
    assert reads == [path] * 2


def test_a_folder_without_cameras_is_refused_by_name(tmp_path):
    write(tmp_path / "a.jsonl", [frame(())])
    with pytest.raises(DataError, match=f"{tmp_path}: no episode's first frame has a camera"):
        dataset_info(str(tmp_path))


def test_a_broken_first_line_is_named_or_skipped(tmp_path):
    write(tmp_path / "a.jsonl", ["", '{"state": [0.5', frame((7,))])
    write(tmp_path / "b.jsonl", [frame((2,))])
    with pytest.raises(DataError, match=rf"{tmp_path}/a\.jsonl:2 is not valid JSON .*column 15\)"):
        config(tmp_path).validate()
    skip = config(tmp_path, bad_records="skip")
    skip.validate()
    assert skip._dataset_info()["image_keys"] == ["images_2"]
    assert skip.open_source().episodes == (1,)


@pytest.mark.parametrize("name", ["link.jsonl", "sub/link.jsonl"])
def test_a_link_to_episodes_elsewhere_needs_permission(tmp_path, name):
    root, other = tmp_path / "root", write(tmp_path / "other" / "x.jsonl", [frame()])
    inside = write(root / "a.jsonl", [frame()])
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).symlink_to(other)
    (root / "same.jsonl").symlink_to(inside)
    for read in (open_source, lambda folder: config(folder).open_source()):
        with pytest.raises(DataError, match=rf"{name}' leaves the folder .*allow-outside-root"):
            read(root)
    source = config(root, allow_outside_root=True).open_source().source
    assert sorted(source.index.episodes) == sorted(["a.jsonl", name])
    assert source.record(source.index.episodes.index(name), 0) == frame()


def test_a_listing_is_that_of_pathlib(tmp_path):
    for name in ("b/1.jsonl", "b.c/1.jsonl", "b/a/x.jsonl", ".h/.y.jsonl", "a.jsonl", "Z.jsonl"):
        write(tmp_path / name, [frame()])
    write(tmp_path / "b" / "c.JSONL", [frame()])
    (tmp_path / "folder").symlink_to(tmp_path / "b")
    expected = [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*.jsonl"))]
    found = list_jsonl(tmp_path).files
    assert [file.path for file in found] == expected
    assert found[0].num_bytes == (tmp_path / expected[0]).stat().st_size
    assert found[0].mtime_ns == (tmp_path / expected[0]).stat().st_mtime_ns


@pytest.mark.parametrize("field", ["state", "action"])
def test_most_files_say_how_many_numbers_a_vector_has(tmp_path, field):
    write(tmp_path / "a.jsonl", [frame(**{field: [1.0] * 4})] * 9)
    for name in "bcd":
        write(tmp_path / f"{name}.jsonl", [frame()] * 2)
    index = scan_jsonl(tmp_path, skip_bad=True)
    assert index.num_frames == 6
    assert f"a.jsonl:1: {field} has 4 values, expected 2" in index.dropped[0]


def test_a_broken_first_frame_does_not_count_for_the_sizes(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", [frame(size=3, prompt=None)])
    write(tmp_path / "c.jsonl", [frame()])
    assert scan_jsonl(tmp_path, skip_bad=True).state.shape == (1, 2)


def test_half_a_character_in_a_prompt_is_refused(tmp_path):
    write(tmp_path / "a.jsonl", [frame(prompt="pick \U0001f600"), frame(prompt="pick \ud83d")])
    with pytest.raises(DataError, match=r"a\.jsonl:2: prompt 'pick \\ud83d' holds '\\ud83d'"):
        scan_jsonl(tmp_path, skip_bad=False)
    assert scan_jsonl(tmp_path, skip_bad=True).tasks == ("pick \U0001f600",)
