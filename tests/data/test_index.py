"""The index on disk: what it holds, when it still counts, and several processes at once."""

import json
import multiprocessing
import os
import pickle
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from opendm.data.formats import open_source
from opendm.data.index import FrameIndex, IndexedFile
from opendm.data.index_cache import cached_index
from opendm.data.jsonl_scan import scan_jsonl
from opendm.errors import DataError
from opendm.runtime import cache_folder

FORK = multiprocessing.get_context("fork")


def write_set(folder, lengths=(4, 3), first=0.0):
    folder.mkdir(parents=True, exist_ok=True)
    for number, length in enumerate(lengths):
        rows = [
            {"state": [first + t, 2.0], "action": [float(number)], "prompt": f"task {number}"}
            for t in range(length)
        ]
        path = folder / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def constant_index(value, num_frames=300):
    """An index all of whose numbers are ``value``."""
    return FrameIndex(
        files=(IndexedFile("a.jsonl", value, value, f"{value:064x}"),),
        episodes=("a.jsonl",),
        tasks=(str(value),),
        dropped=(),
        episode_file=np.zeros(1, np.int32),
        has_actions=np.ones(1, bool),
        starts=np.array([0, num_frames + value]),
        state=np.full((num_frames + value, 3), float(value)),
        action=np.full((num_frames + value, 3), float(value)),
        task=np.zeros(num_frames + value, np.int32),
        position=np.full(num_frames + value, value),
        num_bytes=np.full(num_frames + value, value, np.int32),
    )


def same(one, other):
    for field in fields(FrameIndex):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            np.testing.assert_array_equal(left, right)
            assert left.dtype == right.dtype
        elif field.name != "folder":
            assert left == right


@pytest.fixture
def data(tmp_path):
    return write_set(tmp_path / "data")


@pytest.fixture
def opened(data, tmp_path, monkeypatch):
    """Open ``data``; the index and how often it was made so far."""
    from opendm.data import formats

    scans = []

    def counted(*args, **kwargs):
        scans.append(1)
        return scan_jsonl(*args, **kwargs)

    monkeypatch.setattr(formats, "scan_jsonl", counted)

    def opened(**options):
        source = open_source(data, index_root=tmp_path / "cache", **options)
        return source.index, len(scans)

    return opened


def index_folder(tmp_path):
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    return folder


def test_open_gives_what_was_saved(data, tmp_path):
    index = scan_jsonl(data, skip_bad=False)
    folder = tmp_path / "saved"
    folder.mkdir()
    index.save(folder)
    same(FrameIndex.open(folder), index)


def test_a_set_without_actions_and_an_empty_one_survive(tmp_path):
    for number, text in enumerate(['{"state": [1.0], "prompt": ""}\n' * 2, ""]):
        data, folder = tmp_path / f"data{number}", tmp_path / f"saved{number}"
        data.mkdir()
        folder.mkdir()
        (data / "a.jsonl").write_text(text)
        index = scan_jsonl(data, skip_bad=False)
        index.save(folder)
        same(FrameIndex.open(folder), index)
        assert index.num_samples(0) == 1 - number


def test_pickle_sends_the_folder_and_not_the_numbers(opened):
    index, _ = opened()
    text = pickle.dumps(index)
    assert len(text) < 600
    same(pickle.loads(text), index)
    in_memory = replace(index, folder=None)
    same(pickle.loads(pickle.dumps(in_memory)), index)


def test_a_process_that_comes_after_a_change_is_refused(opened, data):
    text = pickle.dumps(opened()[0])
    write_set(data, (5, 3))
    opened()
    with pytest.raises(DataError, match="changed during the run"):
        pickle.loads(text)


def test_an_index_is_made_once_and_outside_of_the_dataset(opened, data):
    public = data / "index_cache.json"
    public.write_text('{"data": {}}')
    before = sorted(data.iterdir())
    assert [opened()[1] for _ in range(3)] == [1, 1, 1]
    assert sorted(data.iterdir()) == before
    assert public.read_text() == '{"data": {}}'


def test_the_users_cache_is_used_where_no_folder_is_given(data, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENDM_CACHE", str(tmp_path / "mine"))
    open_source(data)
    assert cache_folder() == tmp_path / "mine"
    assert len(list((tmp_path / "mine" / "index").glob("data-*/index.json"))) == 1
    monkeypatch.delenv("OPENDM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "opendm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "opendm"


def extend(path):
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")


def shorten(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def edit(path):
    path.write_text(path.read_text().replace("2.0", "3.0"))


CHANGES = {
    "extended": extend,
    "shortened": shorten,
    "edited in place": edit,
    "touched": lambda path: os.utime(path, ns=(1, 1)),
    "removed": Path.unlink,
    "renamed": lambda path: path.rename(path.with_name("9.jsonl")),
    "another beside it": lambda path: (path.parent / "new.jsonl").write_text(path.read_text()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_dataset_is_indexed_again(opened, data, change):
    opened()
    CHANGES[change](data / "0.jsonl")
    index, scans = opened()
    assert scans == 2
    same(index, scan_jsonl(data, skip_bad=False))
    assert opened()[1] == 2


def test_contents_are_compared_on_request(opened, data):
    opened()
    path = data / "0.jsonl"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    edit(path)
    os.utime(path, ns=times)
    assert opened()[1] == 1
    index, scans = opened(verify=True)
    assert scans == 2
    assert index.state[0, 1] == 3.0
    assert opened(verify=True)[1] == 2


DAMAGES = {
    "empty table": lambda folder: (folder / "index.json").write_text(""),
    "no JSON": lambda folder: (folder / "index.json").write_text("\0\xff garbage"),
    "another shape": lambda folder: (folder / "index.json").write_text('{"data": {"a": 3}}'),
    "a list": lambda folder: (folder / "index.json").write_text("[1, 2]"),
    "another version": lambda folder: (folder / "index.json").write_text('{"format_version": 0}'),
    "array missing": lambda folder: (folder / "state.npy").unlink(),
    "array empty": lambda folder: (folder / "action.npy").write_bytes(b""),
    "array cut": lambda folder: os.truncate(folder / "state.npy", 140),
    "array of another set": lambda folder: np.save(folder / "position.npy", np.zeros(3, int)),
    "stamp missing": lambda folder: (folder / "stamp.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_made_again_with_one_line(opened, data, tmp_path, caplog, damage):
    opened()
    folder = index_folder(tmp_path)
    DAMAGES[damage](folder)
    caplog.clear()
    index, scans = opened()
    assert scans == 2
    same(index, scan_jsonl(data, skip_bad=False))
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        f"index {folder} is damaged"
    ]
    assert opened()[1] == 2


def test_nothing_in_the_index_names_the_place_of_the_dataset(opened, tmp_path):
    opened()
    for path in index_folder(tmp_path).iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()


def test_an_index_that_is_replaced_stays_readable_for_who_has_it(opened, data):
    index, _ = opened()
    before = np.array(index.state)
    write_set(data, (6, 6), first=50.0)
    newer, _ = opened()
    np.testing.assert_array_equal(index.state, before)
    assert newer.state[0, 0] == 50.0


def test_a_cache_that_cannot_be_written_costs_one_line_and_no_run(data, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    source = open_source(data, index_root=tmp_path / "file" / "cache")
    same(source.index, scan_jsonl(data, skip_bad=False))
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text
    assert not source.index.folder.is_relative_to(tmp_path)


def test_leftovers_of_a_killed_process_are_removed(opened, data, tmp_path):
    opened()
    folder = index_folder(tmp_path)
    leftover = folder.with_name(f"new-{folder.name}-x")
    leftover.mkdir()
    edit(data / "0.jsonl")
    opened()
    assert not leftover.exists()
    assert index_folder(tmp_path) == folder


def in_processes(work, count):
    """Run ``work(number, queue)`` in forked processes; what they put."""
    queue = FORK.Queue()
    processes = [FORK.Process(target=work, args=(number, queue)) for number in range(count)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=30) for _ in processes]
    for process in processes:
        process.join(30)
    return results


def test_of_four_processes_one_reads_the_dataset_and_all_get_its_index(tmp_path):
    log = tmp_path / "scans"

    def scan():
        with log.open("a") as file:
            file.write("x")
        time.sleep(0.2)
        return constant_index(7)

    def work(number, queue):
        stamp = [("a.jsonl", 7, 7)]
        index = cached_index(tmp_path, "k", stamp, scan, index_root=tmp_path / "cache")
        queue.put((float(index.state.min()), float(index.position.max()), index.num_frames))

    assert in_processes(work, 4) == [(7.0, 7.0, 307)] * 4
    assert log.read_text() == "x"


def test_no_reader_sees_parts_of_two_indices_while_they_replace_each_other(tmp_path):
    def open_version(value):
        stamp = [("a.jsonl", value, value)]
        return cached_index(
            tmp_path, "k", stamp, lambda: constant_index(value), index_root=tmp_path / "cache"
        )

    def work(number, queue):
        wrong = 0
        for turn in range(6):
            value = 1 + (number + turn) % 3
            index = open_version(value)
            columns = (index.state, index.action, index.position, index.num_bytes)
            wrong += index.tasks != (str(value),) or any((c != value).any() for c in columns)
        queue.put(wrong)

    assert in_processes(work, 4) == [0] * 4
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1
