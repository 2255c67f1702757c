"""LeRobot folders: every bad file, episode and video frame is named in one pass."""

import json

import pyarrow as pa
import pytest
from lerobot_sets import SmallSet, decoded_pictures, episode_table, write_jsonl, write_v2, write_v3
from pyarrow import parquet

from opendm.check import lerobot
from opendm.check.contents import read_contents
from opendm.check.pictures import PictureRules
from opendm.data.lerobot_fields import describe_lerobot

DATA = SmallSet()
TOTAL = sum(DATA.lengths)


def look(root, *, skip_bad=False, info=None):
    info = info or describe_lerobot(root)
    return read_contents(info, "set", PictureRules(info["image_dir"]), skip_bad=skip_bad)


def found(root, **options):
    return [(p.where, p.field, p.code) for p in look(root, **options).problems]


@pytest.fixture
def v2(tmp_path):
    return write_v2(tmp_path / "v2", DATA)


@pytest.fixture
def v3(tmp_path):
    return write_v3(tmp_path / "v3", DATA)


def test_good_sets_of_every_layout_have_no_problem(v2, v3, tmp_path):
    pictures = decoded_pictures(write_jsonl(tmp_path / "jsonl", DATA), DATA)
    encoded = write_v3(tmp_path / "encoded", DATA, pictures=pictures)
    for root, num_pictures in ((v2, 6), (v3, 2), (encoded, 0)):
        contents = look(root)
        assert contents.problems == []
        assert (contents.num_episodes, contents.num_frames) == (len(DATA.lengths), TOTAL)
        assert contents.num_pictures == num_pictures


def test_files_cut_by_an_interrupted_recording_are_all_named(v2):
    data = v2 / "data/chunk-000"
    for name in ("episode_000000.parquet", "episode_000002.parquet"):
        content = (data / name).read_bytes()
        (data / name).write_bytes(content[:-20])
    (data / "left_over.parquet").write_bytes(b"PAR1 and then the power went")
    assert [(field, code) for _, field, code in found(v2)] == [
        ("file", "parquet"),
        ("episode 0", "parquet"),
        ("episode 2", "parquet"),
    ]
    texts = [str(problem) for problem in look(v2).problems]
    names = ("left_over.parquet", "episode_000000.parquet", "episode_000002.parquet")
    assert all(name in text for name, text in zip(names, texts, strict=True))


def spoil_row(path, row, column, value):
    table = parquet.read_table(path)
    values = table[column].to_pylist()
    values[row] = value
    number = table.column_names.index(column)
    parquet.write_table(table.set_column(number, column, [pa.array(values)]), path)


def test_nan_and_wrong_rows_are_named_by_file_and_row(v2):
    path = v2 / "data/chunk-000/episode_000001.parquet"
    spoil_row(path, 2, "action", [0.0, float("nan"), 0.0, 0.0])
    assert found(v2) == [(f"{path}:row 2", "action[1]", "row")]
    assert [p.severity for p in look(v2, skip_bad=True).problems] == ["warning"]
    spoil_row(path, 2, "action", [0.0, 0.0, 0.0, 0.0])
    spoil_row(path, 3, "task_index", 9)
    [(where, field, _)] = found(v2)
    assert (where, field) == (str(path), "episode 1")


def test_missing_files_of_all_kinds_are_named_in_one_pass(v2):
    (v2 / "data/chunk-000/episode_000001.parquet").unlink()
    video = "videos/chunk-000/observation.images.top/episode_000002.mp4"
    (v2 / video).unlink()
    assert {(field, code) for _, field, code in found(v2)} == {
        ("episode 1", "parquet"),
        ("observation.images.top.url", "picture_missing"),
    }


def test_every_broken_file_of_meta_is_named(v2):
    (v2 / "meta/tasks.jsonl").unlink()
    (v2 / "meta/episodes.jsonl").write_text('{"episode_index": 0}\n')
    info = describe_lerobot(v2)
    assert {(field, code) for _, field, code in found(v2, info=info)} == {
        ("tasks", "metadata"),
        ("episodes", "metadata"),
    }
    (v2 / "meta/info.json").write_text("{")
    assert found(v2, info=info) == [(str(v2 / "meta/info.json"), "file", "metadata")]


def test_a_video_shorter_than_its_episodes_is_named_with_the_episode(v3):
    info = json.loads((v3 / "meta/info.json").read_text())
    (v3 / "meta/info.json").write_text(json.dumps(info))
    short = SmallSet(lengths=(5, 4, 5))
    other = write_v3(v3.parent / "short", short)
    name = "videos/observation.images.top/chunk-000/file-000.mp4"
    (v3 / name).write_bytes((other / name).read_bytes())
    assert found(v3) == [
        (f"{v3 / 'meta'}:episode_000002", "observation.images.top.frame_idx", "frame_index")
    ]


def test_a_column_that_is_missing_and_a_camera_of_another_name(v2):
    path = v2 / "data/chunk-000/episode_000000.parquet"
    parquet.write_table(episode_table(DATA, 0).drop_columns(["observation.state"]), path)
    [(_, field, _)] = found(v2)
    assert field == "episode 0"
    info = {**describe_lerobot(v2), "image_keys": ["observation.images.topp"]}
    [problem] = [p for p in look(v2, info=info).problems if p.code == "camera_unknown"]
    assert "observation.images.top" in problem.reason


def test_pictures_in_parquet_files_are_looked_at(tmp_path):
    pictures = decoded_pictures(write_jsonl(tmp_path / "jsonl", DATA), DATA)
    root = write_v3(tmp_path / "encoded", DATA, pictures=pictures)
    path = root / "data/chunk-000/file-000.parquet"
    cell = parquet.read_table(path)["observation.images.top"][7].as_py()
    spoil_row(path, 7, "observation.images.top", {**cell, "bytes": cell["bytes"][:-30]})
    assert found(root) == [(f"{path}:row 7", "observation.images.top", "picture_truncated")]


def test_row_groups_with_many_pictures_are_a_warning(tmp_path, monkeypatch):
    pictures = decoded_pictures(write_jsonl(tmp_path / "jsonl", DATA), DATA)
    root = write_v3(tmp_path / "encoded", DATA, pictures=pictures)
    path = root / "data/chunk-000/file-000.parquet"
    table = parquet.read_table(path)
    group = table["observation.images.top"][4:8].to_pylist()  # groups have 4 rows
    size = sum(len(cell["bytes"]) for cell in group)
    monkeypatch.setattr(lerobot, "LARGE_GROUP_BYTES", 2 * size)
    assert look(root).problems == []
    parquet.write_table(table, path)
    problems = look(root).problems
    assert [(p.where, p.code, p.severity) for p in problems] == [
        (str(path), "row_group_large", "warning")
    ] * len(pictures)
    assert f"up to {TOTAL} rows" in problems[0].reason
