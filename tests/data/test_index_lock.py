"""The lock of an index: who waits, and what a killed process leaves behind."""

import logging
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from opendm.check import records
from opendm.data import jsonl_scan
from opendm.data.episodes import Sizes
from opendm.data.index import FrameIndex, IndexedFile
from opendm.data.index_cache import cached_index
from opendm.data.jsonl_pieces import Piece

FORK = multiprocessing.get_context("fork")
STAMP = [("a.jsonl", 1, 1)]


def small_index():
    return FrameIndex(
        files=(IndexedFile("a.jsonl", 1, 1, "00" * 32),),
        episodes=("a.jsonl",),
        tasks=("go",),
        dropped=(),
        episode_file=np.zeros(1, np.int32),
        has_actions=np.ones(1, bool),
        starts=np.array([0, 1]),
        state=np.zeros((1, 2)),
        action=np.zeros((1, 2)),
        task=np.zeros(1, np.int32),
        position=np.zeros(1, np.int64),
        num_bytes=np.ones(1, np.int32),
    )


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def end(pid):
    if is_running(pid):
        os.kill(pid, signal.SIGKILL)


def note_and_sleep(folder):
    """Leave this process's number in a folder, and work for long."""
    (folder / f"{os.getpid()}.pid").touch()
    time.sleep(60)


def numbers(folder):
    return [int(path.stem) for path in folder.glob("*.pid")]


def sleep_over_pieces(pieces, sizes):
    note_and_sleep(pieces[0].path.parent)


def sleep_over_file(path, image_keys):
    note_and_sleep(path.parent)


def test_a_killed_reader_whose_child_lives_on_locks_nobody_out(tmp_path):
    def scan_with_child():
        if os.fork() == 0:
            note_and_sleep(tmp_path)
        time.sleep(60)

    def read(scan):
        cached_index(tmp_path, "k", STAMP, scan, index_root=tmp_path / "cache")

    first = FORK.Process(target=read, args=(scan_with_child,))
    first.start()
    assert wait_for(lambda: numbers(tmp_path))
    (child,) = numbers(tmp_path)
    first.kill()
    first.join()
    second = FORK.Process(target=read, args=(small_index,))
    second.start()
    second.join(5)
    try:
        assert is_running(child)
        assert second.exitcode == 0
    finally:
        end(child)
        second.kill()


@pytest.mark.parametrize("work", ["scan", "check"])
def test_workers_end_with_the_process_that_started_them(tmp_path, monkeypatch, work):
    def scan():
        piece = Piece(0, tmp_path / "0.jsonl", "0.jsonl", 0, 3)
        jsonl_scan._in_processes([[piece], [piece]], Sizes())

    def check():
        records.scan_records(tmp_path, ["images_1"])

    monkeypatch.setattr(jsonl_scan, "_scan_pieces", sleep_over_pieces)
    monkeypatch.setattr(records, "scan_file", sleep_over_file)
    monkeypatch.setattr(records, "FORK_BYTES", 0)
    for number in range(8):  # the pool hands four to a worker
        (tmp_path / f"{number}.jsonl").write_text("{}\n")
    reader = FORK.Process(target={"scan": scan, "check": check}[work])
    reader.start()
    assert wait_for(lambda: len(numbers(tmp_path)) == 2)
    workers = numbers(tmp_path)
    try:
        assert all(map(is_running, workers))
        reader.kill()
        reader.join()
        assert wait_for(lambda: not any(map(is_running, workers)), 5)
    finally:
        for worker in workers:
            end(worker)


def test_who_waits_for_another_process_says_so_once(tmp_path, caplog):
    started = tmp_path / "started"

    def slow():
        started.touch()
        time.sleep(0.3)
        return small_index()

    def read(scan):
        return cached_index(tmp_path, "k", STAMP, scan, index_root=tmp_path / "cache")

    other = FORK.Process(target=read, args=(slow,))
    other.start()
    assert wait_for(started.exists)
    with caplog.at_level(logging.INFO):
        assert read(lambda: 1 / 0).num_frames == 1
    other.join()
    assert [r.message.split(" the index")[0] for r in caplog.records] == [
        "waiting for another process that opens or makes"
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        read(lambda: 1 / 0)
    assert not caplog.records


def test_of_several_threads_one_reads_the_dataset(tmp_path):
    scans = []

    def scan():
        scans.append(1)
        time.sleep(0.1)
        return small_index()

    def read():
        cached_index(tmp_path, "k", STAMP, scan, index_root=tmp_path / "cache")

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scans == [1]


def test_a_cache_that_cannot_be_written_means_one_scan_per_process(tmp_path, caplog):
    (tmp_path / "file").touch()
    scans = []

    def read(stamp):
        scan = lambda: scans.append(1) or small_index()  # noqa: E731
        return cached_index(tmp_path, "k", stamp, scan, index_root=tmp_path / "file" / "cache")

    folders = {read(STAMP).folder for _ in range(3)}
    assert (len(folders), len(scans), len(caplog.records)) == (1, 1, 1)
    read([("a.jsonl", 2, 2)])
    assert len(scans) == 2
