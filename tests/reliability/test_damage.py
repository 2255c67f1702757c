"""Every kind of damage to every file of a checkpoint is seen, and the one before is used."""

import errno
import hashlib
import os
import random
import shutil
from pathlib import Path

import pytest

from opendm.errors import CheckpointError
from opendm.trainer.checkpoint_folder import begin, commit, newest_healthy
from opendm.trainer.manifest import MANIFEST, verify

NAMES = (
    "model.safetensors",
    "config.json",
    "norm_stats.json",
    "opendm.json",
    "state/state.json",
    "state/state-00000.safetensors",
    "state/state-00001.safetensors",
)


@pytest.fixture(autouse=True, scope="module")
def quick_fsync():
    """Damage is made after the save, so that nothing here depends on when bytes reach the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def save(output_dir, step):
    partial = begin(output_dir, step)
    (partial / "state").mkdir()
    for name in NAMES:
        (partial / name).write_bytes(random.Random(f"{name} {step}").randbytes(300))
    return commit(partial, step, {"configuration": "0" * 64})


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("pristine")
    save(output_dir, 10)
    save(output_dir, 20)
    return output_dir


@pytest.fixture
def output_dir(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def change(path, edit):
    data = bytearray(path.read_bytes())
    path.write_bytes(edit(data) or data)


def flip(data, byte, bit):
    data[byte] ^= 1 << bit


def replaced_by(path, make):
    copy = path.with_name("moved")
    path.rename(copy)
    make(path, copy)


def link_to_a_copy_outside(path, copy):
    outside = path.parents[len(path.parents) - 1 - path.parts.index("run")] / "outside"
    copy.rename(outside)
    path.symlink_to(outside)


DAMAGES = {
    "removed": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "cut to 100 bytes": lambda path: change(path, lambda data: data[:100]),
    "cut by 64 bytes": lambda path: change(path, lambda data: data[:-64]),
    "cut by 1 byte": lambda path: change(path, lambda data: data[:-1]),
    "1 byte more": lambda path: change(path, lambda data: data + b"\n"),
    "first bit flipped": lambda path: change(path, lambda data: flip(data, 0, 7)),
    "middle bit flipped": lambda path: change(path, lambda data: flip(data, len(data) // 2, 3)),
    "last bit flipped": lambda path: change(path, lambda data: flip(data, -1, 0)),
    "zeros of the same size": lambda path: change(path, lambda data: bytes(len(data))),
    "that of an older checkpoint": lambda path: shutil.copy(
        Path(str(path).replace("checkpoint-20", "checkpoint-10")), path
    ),
    "another name": lambda path: path.rename(path.with_name("renamed")),
    "a link": lambda path: replaced_by(path, link_to_a_copy_outside),
    "a pipe": lambda path: replaced_by(path, lambda path, copy: (copy.unlink(), os.mkfifo(path))),
}


@pytest.mark.parametrize("name", [*NAMES, MANIFEST])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(kind, name, output_dir):
    newest = output_dir / "checkpoint-20"
    assert newest_healthy(output_dir, pytest.fail) == (20, newest)
    DAMAGES[kind](newest / name)
    lines = []
    assert newest_healthy(output_dir, lines.append) == (10, output_dir / "checkpoint-10")
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert lines[0].startswith(f"{newest} cannot be used: ")
    assert name in lines[0] or "renamed" in lines[0]
    assert newest.is_dir()  # left alone
    print(f"{len(DAMAGES)} kinds of damage x {len(NAMES) + 1} files, {kind}, {name}: refused")


def add_marker(output_dir):
    (output_dir / "checkpoint-20" / "checkpoint-is-incomplete.txt").touch()


def add_hidden_file(output_dir):
    (output_dir / "checkpoint-20" / "state" / ".tmp").write_bytes(b"x")


def add_link_to_folder(output_dir):
    (output_dir / "checkpoint-20" / "more").symlink_to(output_dir / "checkpoint-10")


def rename_older_to_newer(output_dir):
    shutil.rmtree(output_dir / "checkpoint-20")
    shutil.copytree(output_dir / "checkpoint-10", output_dir / "checkpoint-20")


def empty_the_folder(output_dir):
    shutil.rmtree(output_dir / "checkpoint-20")
    (output_dir / "checkpoint-20").mkdir()


def replace_the_folder_by_a_file(output_dir):
    shutil.rmtree(output_dir / "checkpoint-20")
    (output_dir / "checkpoint-20").write_text("moved to the archive")


def replace_a_file_by_a_folder(output_dir):
    (output_dir / "checkpoint-20" / "config.json").unlink()
    (output_dir / "checkpoint-20" / "config.json").mkdir()


def replace_the_manifest_by_a_folder(output_dir):
    (output_dir / "checkpoint-20" / MANIFEST).unlink()
    (output_dir / "checkpoint-20" / MANIFEST).mkdir()


def swap_two_files(output_dir):
    first, second = (output_dir / "checkpoint-20" / name for name in NAMES[-2:])
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (add_marker, "checkpoint-is-incomplete.txt is not in the manifest"),
        (add_hidden_file, "state/.tmp is not in the manifest"),
        (add_link_to_folder, "more is neither a file nor a folder"),
        (rename_older_to_newer, "manifest.json is of step 10"),
        (empty_the_folder, "manifest.json is missing"),
        (replace_the_folder_by_a_file, "manifest.json cannot be read"),
        (replace_a_file_by_a_folder, "config.json is missing"),
        (replace_the_manifest_by_a_folder, "manifest.json is not a file"),
        (swap_two_files, "state/state-00000.safetensors differs from its SHA-256"),
    ],
)
def test_a_damaged_folder_is_named_and_the_checkpoint_before_is_used(damage, named, output_dir):
    damage(output_dir)
    lines = []
    assert newest_healthy(output_dir, lines.append) == (10, output_dir / "checkpoint-10")
    assert len(lines) == 1
    assert named in lines[0]


def test_a_file_that_the_disk_cannot_read_is_named(output_dir, monkeypatch):
    def refuse(file, name):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", refuse)
    with pytest.raises(CheckpointError, match=r"config.json cannot be read: .*Input/output error"):
        verify(output_dir / "checkpoint-20")


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.soak)])
def test_no_single_flipped_bit_is_accepted(count, output_dir):
    folder = output_dir / "checkpoint-20"
    paths = [folder / name for name in (*NAMES, MANIFEST)]
    bits = [(path, bit) for path in paths for bit in range(8 * path.stat().st_size)]
    accepted = 0
    for path, bit in random.Random(count).sample(bits, count):
        content = path.read_bytes()
        change(path, lambda data, bit=bit: flip(data, bit // 8, bit % 8))
        try:
            verify(folder)
            accepted += 1
        except CheckpointError as error:
            assert str(path.relative_to(folder)) in str(error)  # noqa: PT017
        path.write_bytes(content)
    verify(folder)
    print(f"{count} single bits flipped: {accepted} accepted")
    assert accepted == 0
