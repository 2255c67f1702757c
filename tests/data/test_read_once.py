"""While a run starts its data is read once; otherwise every call sees what lies there now."""

import hashlib
import threading

import pytest
from test_found_files import config, frame, write

from opendm.data import jsonl_files
from opendm.data.dataset import JsonlDataset
from opendm.data.formats import dataset_info
from opendm.data.read_once import once, read_once
from opendm.errors import DataError


@pytest.fixture
def listed(monkeypatch):
    """Folders that were listed."""
    folders, entries = [], jsonl_files._entries
    monkeypatch.setattr(
        jsonl_files, "_entries", lambda *words: folders.append(words[0]) or entries(*words)
    )
    return folders


def test_inside_a_folder_is_listed_and_opened_once(tmp_path, listed):
    write(tmp_path / "a.jsonl", [frame()] * 3)
    data = config(tmp_path, norm_stats_root=str(tmp_path / "statistics"))
    with read_once():
        first = data.open_source().source
        for _ in range(3):
            assert data.open_source("train").source is first
            data.fingerprint()
            data.norm_stats_path(4)
        data.compute_norm_stats(4)
        samples = [len(data.split_dataset(lambda sample: sample, "train"))]
    assert listed == [str(tmp_path)]
    assert samples == [3]


def test_outside_what_has_changed_is_seen(tmp_path, listed):
    write(tmp_path / "a.jsonl", [frame()] * 3)
    with read_once():
        assert dataset_info(str(tmp_path))["image_keys"] == ["images_1"]
    write(tmp_path / "b.jsonl", [frame((1, 2))] * 2)
    assert dataset_info(str(tmp_path))["image_keys"] == ["images_1", "images_2"]
    assert config(tmp_path).open_source().source.index.num_frames == 5
    assert len(listed) > 2
    with read_once():
        assert len(JsonlDataset(str(tmp_path))) == 5


def test_contents_are_compared_once(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", [frame()] * 3)
    data = config(tmp_path, verify_index=True)
    data.open_source()
    hashed, digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *a: hashed.append(a[0].name) or digest(*a))
    with read_once():
        for _ in range(3):
            data.open_source()
    assert hashed == [str(tmp_path / "a.jsonl")]


def test_other_settings_are_opened_by_themselves(tmp_path):
    write(tmp_path / "a.jsonl", [frame(), frame(prompt=3)])
    with read_once():
        with pytest.raises(DataError, match="prompt is 3"):
            config(tmp_path).open_source()
        skipping = config(tmp_path, bad_records="skip")
        assert skipping.open_source().source.index.num_frames == 1
        with pytest.raises(DataError, match="prompt is 3"):
            config(tmp_path).open_source()


def test_errors_are_not_kept_and_nesting_and_threads_have_their_own():
    answers = iter([DataError("gone"), 1, 2, 3])

    def read():
        answer = next(answers)
        if isinstance(answer, DataError):
            raise answer
        return answer

    with read_once():
        with pytest.raises(DataError):
            once("key", read)
        assert once("key", read) == once("key", read) == 1
        with read_once():
            assert once("key", read) == 1
        in_thread = []
        thread = threading.Thread(target=lambda: in_thread.append(once("key", read)))
        thread.start()
        thread.join()
        assert in_thread == [2]
    assert once("key", read) == 3
