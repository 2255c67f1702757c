import errno
import hashlib
import os
import resource
import shutil
import signal
from functools import partial as bound

import pytest
import torch
from crash_points import fail_at, is_killed_at, logged
from safetensors.torch import save_file

from opendm.errors import CheckpointError
from opendm.trainer.checkpoint_folder import (
    begin,
    commit,
    discard,
    healthy_checkpoints,
    newest_healthy,
    remove,
    rotate,
    sync,
    writing,
)
from opendm.trainer.manifest import (
    decode_manifest,
    encode_manifest,
    read_manifest,
    verify,
)

HASHES = {"configuration": "c" * 64, "dataset": "d" * 64}
FILES = ("model.safetensors", "config.json", "state/state.json", "state/state-00000.safetensors")


@pytest.fixture(autouse=True)
def quick_fsync(monkeypatch):
    """A process that dies leaves the same files with and without fsync; only its calls count."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def no_report(line):
    raise AssertionError(line)


def write_files(partial, step):
    with writing(partial, "the files"):
        (partial / "state").mkdir()
        for name in FILES:
            (partial / name).write_bytes(f"{name} of step {step}".encode() * 20)


def save(output_dir, step, keep=None):
    partial = begin(output_dir, step)
    try:
        write_files(partial, step)
    except CheckpointError:
        discard(partial)
        raise
    folder = commit(partial, step, HASHES)
    if keep:
        rotate(output_dir, keep, folder)
    return folder


def names(output_dir):
    return sorted(path.name for path in output_dir.iterdir())


def with_leftovers(output_dir):
    save(output_dir, 1)
    for name in (".checkpoint-2.partial", ".checkpoint-1.removed"):
        (output_dir / name).mkdir()
        (output_dir / name / "manifest.json").write_text("{}")


def with_damaged_one_of_the_same_step(output_dir):
    save(output_dir, 1)
    (save(output_dir, 2) / FILES[0]).unlink()


@pytest.mark.parametrize(
    "prepare",
    [with_leftovers, with_damaged_one_of_the_same_step],
    ids=lambda p: p.__name__,
)
def test_killed_at_any_call_of_a_save_the_old_or_the_new_checkpoint_is_whole(prepare, tmp_path):
    found = []
    while True:
        output_dir = tmp_path / str(len(found))
        prepare(output_dir)
        was_killed = is_killed_at(bound(save, output_dir, 2, keep=1), len(found))
        reported = []
        newest = newest_healthy(output_dir, reported.append)
        assert newest is not None
        found.append(newest[0])
        if prepare is not with_damaged_one_of_the_same_step:
            assert not reported
        save(output_dir, 3, keep=1)  # the run that follows is not hindered and clears away
        assert newest_healthy(output_dir, no_report)[0] == 3
        assert set(names(output_dir)) <= {"checkpoint-2", "checkpoint-3"}
        shutil.rmtree(output_dir)
        if not was_killed:
            break
    assert found == sorted(found)
    assert set(found) == {1, 2}
    print(f"killed at {len(found) - 1} of {len(found) - 1} calls of a save: old or new whole")


def test_every_byte_is_on_the_disk_before_the_rename_and_the_rename_before_a_removal(tmp_path):
    save(tmp_path, 1)
    log = logged(lambda: save(tmp_path, 2, keep=1))
    partial = tmp_path / ".checkpoint-2.partial"
    renames = [i for i, (call, path) in enumerate(log) if (call, path) == ("rename", partial)]
    assert len(renames) == 1
    rename = renames[0]
    written = {path for call, path in log if call == "write"}
    assert written == {partial / name for name in (*FILES, "manifest.json")}
    for path in written:
        last = max(i for i, entry in enumerate(log) if entry == ("write", path))
        assert ("fsync", path) in log[last:rename]
    last = max(i for i, (call, _) in enumerate(log) if call == "write")
    assert {("fsync", partial), ("fsync", partial / "state")} <= set(log[last:rename])
    assert [path.name for call, path in log if call == "open"][-1] == "manifest.json"
    removal = log.index(("rename", tmp_path / "checkpoint-1"))
    assert ("fsync", tmp_path) in log[rename:removal]
    hidden = tmp_path / ".checkpoint-1.removed"
    removed = {path for call, path in log[:removal] if call in ("unlink", "rmdir", "remove")}
    assert removed <= {hidden}  # what is not there yet
    assert log[removal + 1] == ("fsync", tmp_path)


@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        (errno.ENOSPC, False),
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.EROFS, True),
        (errno.EIO, False),
    ],
)
def test_an_error_at_any_call_of_a_save_says_what_is_needed_and_leaves_no_part(
    error, lasting, tmp_path
):
    save(tmp_path / "whole", 1)
    log = logged(lambda: save(tmp_path / "whole", 2))
    assert log[0] == ("mkdir", tmp_path / "whole")  # needless here, so its failure is none
    found = []
    for index in range(1, len(log)):
        output_dir = tmp_path / str(index)
        save(output_dir, 1)
        with pytest.raises(CheckpointError) as raised:
            fail_at(bound(save, output_dir, 2), index, error, lasting=lasting)
        message = str(raised.value)
        assert os.strerror(error) in message
        assert "bytes were written" in message
        assert "are free there" in message
        assert "\n" not in message
        found.append([step for step, _ in healthy_checkpoints(output_dir, no_report)])
        assert set(names(output_dir)) <= {"checkpoint-1", "checkpoint-2"}
    # the call after the rename forces the new name to the disk: there the new one stands already
    assert found == [[1]] * (len(log) - 2) + [[1, 2]]
    print(f"{os.strerror(error)} at each of {len(found)} calls: 0 healthy checkpoints lost")


def test_a_file_over_the_real_limit_of_the_system_is_explained(tmp_path):
    save(tmp_path, 1)
    partial = begin(tmp_path, 2)
    (partial / "small").write_bytes(b"x" * 500)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with (
            pytest.raises(CheckpointError) as raised,
            writing(partial, "the state of rank 3", needed=40_500),
        ):
            save_file({"weight": torch.zeros(10_000)}, partial / "state.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    message = str(raised.value)
    assert "the state of rank 3" in message
    assert "File too large" in message
    assert "500 bytes of about 40,500 needed were written" in message
    discard(partial)
    assert names(tmp_path) == ["checkpoint-1"]
    verify(tmp_path / "checkpoint-1")


def test_too_little_space_is_refused_before_anything_is_written(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(
        CheckpointError, match=r"about 1,000,000,000,000,000,000 bytes, .* are free"
    ):
        begin(tmp_path, 2, needed=10**18)
    assert names(tmp_path) == ["checkpoint-1"]


def test_rotation_goes_by_the_number_not_by_name_or_time(tmp_path):
    for step in (100, 9, 10, 20):
        save(tmp_path, step)
    rotate(tmp_path, 3, save(tmp_path, 30))
    assert names(tmp_path) == ["checkpoint-100", "checkpoint-20", "checkpoint-30"]
    rotate(tmp_path, 4, tmp_path / "checkpoint-30")
    assert len(names(tmp_path)) == 3


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_rotation_keeps_the_committed_one_and_never_counts_damaged_ones(keep, tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "checkpoint-4" / FILES[0]).write_bytes(b"")
    (tmp_path / "checkpoint-1" / "manifest.json").unlink()
    rotate(tmp_path, keep, save(tmp_path, 5))
    kept = [step for step, _ in healthy_checkpoints(tmp_path, lambda _: None)]
    assert kept == [2, 3, 5][-keep:]
    assert {"checkpoint-1", "checkpoint-4"} < set(names(tmp_path))


def test_a_committed_older_step_outlives_newer_ones_of_a_run_before(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    rotate(tmp_path, 1, save(tmp_path, 5))
    assert names(tmp_path) == ["checkpoint-5"]


def test_a_checkpoint_that_cannot_be_removed_is_named(tmp_path):
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"checkpoint-1 could not be removed: .*denied"):
        fail_at(lambda: rotate(tmp_path, 1, folder), 0, errno.EACCES, lasting=False)
    assert len(healthy_checkpoints(tmp_path, no_report)) == 2


def test_a_checkpoint_is_removed_over_what_a_removal_before_left(tmp_path):
    with_leftovers(tmp_path)
    remove(tmp_path / "checkpoint-1")
    assert names(tmp_path) == [".checkpoint-2.partial"]


def test_of_a_linked_checkpoint_only_the_link_is_removed(tmp_path):
    folder = save(tmp_path / "archive", 1)
    (tmp_path / "checkpoint-1").symlink_to(folder)
    assert newest_healthy(tmp_path, no_report) == (1, tmp_path / "checkpoint-1")
    remove(tmp_path / "checkpoint-1")
    assert names(tmp_path) == ["archive"]
    verify(folder)


def test_only_leftovers_of_dead_saves_are_cleared(tmp_path):
    with_leftovers(tmp_path)
    others = [".checkpoint-x.partial", ".git", "checkpoint-7-mine", "metrics.jsonl"]
    for name in others:
        (tmp_path / name).mkdir()
    partial = begin(tmp_path, 5)
    assert names(tmp_path) == sorted([*others, "checkpoint-1", partial.name])
    assert not list(partial.iterdir())


def test_a_healthy_checkpoint_is_never_written_over(tmp_path):
    before = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="checkpoint-1 holds a healthy checkpoint"):
        begin(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-1"]
    verify(before)
    remove(before)
    assert not names(tmp_path)
    save(tmp_path, 1)


def test_checkpoints_are_listed_ascending_and_other_names_left_out(tmp_path):
    assert healthy_checkpoints(tmp_path / "none", no_report) == []
    assert newest_healthy(tmp_path / "none", no_report) is None
    for step in (100, 20, 3):
        save(tmp_path, step)
    shutil.copytree(tmp_path / "checkpoint-100", tmp_path / "checkpoint-0200")
    shutil.copytree(tmp_path / "checkpoint-100", tmp_path / "checkpoint-100-best")
    begin(tmp_path, 400)
    expected = [(step, tmp_path / f"checkpoint-{step}") for step in (3, 20, 100)]
    assert healthy_checkpoints(tmp_path, no_report) == expected
    assert newest_healthy(tmp_path, no_report) == expected[-1]


def test_the_manifest_lists_every_file_as_it_is_on_the_disk(tmp_path):
    folder = save(tmp_path, 12)
    manifest = verify(folder)
    assert (manifest.step, manifest.hashes) == (12, HASHES)
    contents = {name: (folder / name).read_bytes() for name in FILES}
    assert {name: (record.size, record.sha256) for name, record in manifest.files.items()} == {
        name: (len(content), hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
    assert manifest.num_bytes == sum(map(len, contents.values()))
    assert read_manifest(folder) == manifest
    assert decode_manifest(encode_manifest(manifest)) == manifest


@pytest.mark.parametrize(
    "content",
    [
        "",
        "null",
        "[]",
        "{}",
        "\xff",
        "[" * 100_000,
        '{"step": 1e999, "files": {}, "hashes": {}}',
        '{"step": NaN, "files": {}, "hashes": {}}',
        '{"step": 1, "files": {"a": 3}, "hashes": {}}',
        '{"step": 1, "files": [], "hashes": {}}',
        '{"step": 1, "files": {}, "hashes": {}}',
    ],
    ids=range(11),
)
def test_any_other_content_is_no_manifest(content):
    with pytest.raises(ValueError):  # noqa: PT011 - several texts
        decode_manifest(content.encode("latin-1"))


def test_a_checkpoint_copied_under_a_free_name_still_verifies(tmp_path):
    shutil.copytree(save(tmp_path, 1), tmp_path / "best")
    assert verify(tmp_path / "best").step == 1


def test_a_folder_that_cannot_be_synchronised_is_accepted_a_file_not(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    sync(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError, match="Invalid"):
        sync(file)
