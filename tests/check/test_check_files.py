"""Names that are no episodes: all are reported at once, and nothing blocks."""

import os

import numpy as np
import pytest
from bad_records import CAMERAS, STATE_SIZE, write_good

from opendm.check import listing
from opendm.check.records import scan_records


@pytest.fixture
def folder(tmp_path):
    write_good(tmp_path / "set", np.random.default_rng(0), num_files=3, num_frames=3)
    return tmp_path / "set"


def scan(folder, **rules):
    return scan_records(folder, CAMERAS, state_size=STATE_SIZE, **rules)


def test_all_names_that_cannot_be_read_are_reported_in_one_pass(folder):
    (folder / "folder.jsonl").mkdir()
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "loop.jsonl").symlink_to(folder / "loop.jsonl")
    (folder / "dangling.jsonl").symlink_to(folder / "gone")
    result = scan(folder)
    names = {problem.where.rsplit("/", 1)[-1]: problem.code for problem in result.problems}
    bad = ("folder.jsonl", "pipe.jsonl", "loop.jsonl", "dangling.jsonl")
    assert names == dict.fromkeys(bad, "file")
    assert result.num_files == 3


def test_a_file_that_may_not_be_read_is_named(folder, monkeypatch):
    path = next(folder.rglob("*.jsonl"))
    monkeypatch.setattr(listing.os, "access", lambda name, mode: name != path)
    assert [(p.where, p.field) for p in scan(folder).problems] == [(str(path), "file")]


def test_a_file_under_two_names_is_counted_once(folder):
    before = scan(folder).num_records
    first = next(folder.rglob("*.jsonl"))
    (folder / "again.jsonl").symlink_to(first)
    result = scan(folder)
    assert [problem.code for problem in result.problems] == ["repeated_file"]
    assert not any(problem.is_error for problem in result.problems)
    assert result.num_records == before


def test_a_link_that_leaves_the_folder_is_refused_unless_allowed(folder, tmp_path):
    outside = tmp_path / "outside.jsonl"
    outside.write_bytes(next(folder.rglob("*.jsonl")).read_bytes())
    (folder / "link.jsonl").symlink_to(outside)
    assert [problem.code for problem in scan(folder).problems] == ["outside_root"]
    assert scan(folder, allow_outside_root=True).problems == ()


def test_empty_episodes_are_counted_and_an_empty_folder_is_an_error(folder, tmp_path):
    (folder / "empty.jsonl").touch()
    assert [(p.severity, p.code) for p in scan(folder).problems] == [("warning", "empty_episode")]
    (tmp_path / "nothing").mkdir()
    assert [problem.code for problem in scan(tmp_path / "nothing").problems] == ["no_episodes"]
    assert [problem.code for problem in scan(tmp_path / "missing").problems] == ["file"]
