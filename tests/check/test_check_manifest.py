"""Manifests: what changed, is missing or is new in a set is named; sha256sum agrees."""

import hashlib
import os
import random
import shutil
import subprocess
from pathlib import Path

import lerobot_sets as sets
import pytest
from robot_sets import write_robot_set

from opendm.check import run as check_run
from opendm.check.manifest import (
    FileSum,
    check_manifest,
    decode,
    encode,
    list_files,
    read_manifest,
    write_manifest,
)
from opendm.check.problem import to_json
from opendm.cli import main
from opendm.errors import ConfigError

NAMES = ["a.jpg", "b c.jpg", "b\nc", "b\\c\\n", "r\r", " x ", "#x", "ü", "d/e.png", "\\", "\udcff"]


@pytest.fixture(params=["jsonl", "v2", "v3"])
def root(request, tmp_path):
    folder = tmp_path / "set"
    if request.param == "jsonl":
        return write_robot_set(folder, num_images=2, state_dim=2, action_dim=2)
    {"v2": sets.write_v2, "v3": sets.write_v3}[request.param](folder, sets.SmallSet())
    return folder


def written(root, path):
    write_manifest(path, list_files([str(root)]))
    return path


def look(root, path):
    """(name, code, severity) of each finding."""
    found = check_manifest(path, read_manifest(path), list_files([str(root)], [str(path)]))
    return sorted((Path(p.where).relative_to(root).as_posix(), p.code, p.severity) for p in found)


def largest_of_each_kind(root):
    kinds = {}
    for path in sorted(root.rglob("*.*"), key=lambda path: path.stat().st_size):
        if path.is_file():
            kinds[path.suffix] = path
    assert len(kinds) > 1
    return kinds.values()


def test_an_untouched_set_has_no_finding(root, tmp_path):
    assert look(root, written(root, tmp_path / "sums")) == []
    inside = written(root, root / "meta.sha256")
    assert look(root, inside) == []


def test_one_bit_is_found_in_files_of_all_kinds(root, tmp_path):
    """The case that decoders do not see: of 40 random bits of each kind of file all are found."""
    path, draws = written(root, tmp_path / "sums"), random.Random(0)
    for file in largest_of_each_kind(root):
        content = file.read_bytes()
        for _ in range(40):
            bit = draws.randrange(8 * len(content))
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            name = file.relative_to(root).as_posix()
            assert look(root, path) == [(name, "manifest_changed", "error")]
        file.write_bytes(content)
    assert look(root, path) == []


def test_what_is_cut_missing_or_new_is_named_with_expected_and_found(root, tmp_path):
    path = written(root, tmp_path / "sums")
    cut, gone = list(largest_of_each_kind(root))[:2]
    size = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    (root / "new.jpg").write_bytes(b"x")
    assert look(root, path) == sorted([
        (cut.relative_to(root).as_posix(), "manifest_changed", "error"),
        (gone.relative_to(root).as_posix(), "manifest_missing", "error"),
        ("new.jpg", "manifest_extra", "warning"),
    ])  # fmt: skip
    texts = [str(p) for p in check_manifest(path, read_manifest(path), list_files([str(root)]))]
    assert f"{cut} file has {size - 1} bytes; the manifest says {size}" in texts


def test_a_file_of_another_size_is_not_read(root, tmp_path, monkeypatch):
    path = written(root, tmp_path / "sums")
    cut = next(iter(largest_of_each_kind(root)))
    cut.write_bytes(b"")
    read = []
    digest = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda f, n: (read.append(Path(f.name)), digest(f, n))[1]
    )
    assert len(look(root, path)) == 1
    assert set(read) == {path for path in root.rglob("*") if path.is_file()} - {cut}


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="coreutils")
def test_sha256sum_reads_it_and_its_own_are_read(tmp_path):
    root = tmp_path / "odd names"
    for number, name in enumerate(NAMES):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(bytes([number]))
    path = written(root, tmp_path / "sums")
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", path], cwd=root, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b": OK") == len(NAMES)
    theirs = tmp_path / "theirs"
    listed = [os.fsencode(f"./{name}") for name in NAMES]
    theirs.write_bytes(subprocess.run(["sha256sum", *listed], cwd=root, capture_output=True,
                                      check=True).stdout)  # fmt: skip
    assert look(root, theirs) == []
    (root / "a.jpg").write_bytes(b"y")
    assert look(root, theirs) == [("a.jpg", "manifest_changed", "error")]


def test_decode_is_the_inverse_of_encode():
    sums = {
        name: FileSum(hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest(), size)
        for name, size in zip(NAMES, [0, 1, None, 2**40, *range(7)], strict=True)
    }
    assert decode(encode(sums)) == sums


def test_folders_beside_each_other_and_links_are_listed_once(tmp_path):
    for name in ("train/e.jsonl", "images/0.jpg", "elsewhere/1.jpg", "other/2.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "images" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "images" / "again").symlink_to(tmp_path / "images")
    (tmp_path / "images" / "nowhere.jpg").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "images" / "pipe.jpg")
    found = list_files([str(tmp_path / name) for name in ("train", "images", "images")])
    assert found.base == tmp_path
    assert list(found.sizes) == ["images/0.jpg", "images/linked/1.jpg", "train/e.jsonl"]
    alone = list_files([str(tmp_path / "images"), str(tmp_path / "images" / "linked")])
    assert alone.base == tmp_path


def test_what_is_no_manifest_or_of_another_set_is_said(root, tmp_path):
    with pytest.raises(ConfigError, match="--write-manifest"):
        look(root, tmp_path / "gone")
    (tmp_path / "text").write_text("# 3 bytes\nno manifest\n")
    with pytest.raises(ConfigError, match="line 2 is 'no manifest'"):
        look(root, tmp_path / "text")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.png").write_bytes(b"x")
    path = written(tmp_path / "other", tmp_path / "sums")
    [problem] = check_manifest(path, read_manifest(path), list_files([str(root)]))
    assert problem.is_error
    assert "'x.png'" in problem.reason
    assert "manifest_other" in to_json([problem], {})


def test_a_name_that_leaves_the_folder_is_not_opened(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a").write_bytes(b"x")
    (tmp_path / "secret").write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    (tmp_path / "sums").write_text(f"{digest}  a\n{digest}  ../secret\n{digest}  /etc/hostname\n")
    found = list(
        check_manifest(
            tmp_path / "sums", read_manifest(tmp_path / "sums"), list_files([str(tmp_path / "set")])
        )
    )
    assert [problem.code for problem in found] == ["manifest_missing"] * 2


def test_the_command_writes_verifies_and_ends_with_3(
    tmp_path, tiny_checkpoint, capsys, monkeypatch
):
    root = write_robot_set(tmp_path / "set", num_images=1, state_dim=2, action_dim=2)
    path = tmp_path / "out" / "sums"
    flags = [
        "check", "--no-model",
        "--data-config.dataset-name", str(root),
        "--data-config.action-mode", "absolute",
        "--data-config.norm-stats-root", str(tmp_path / "stats"),
        "--model-config.model-name-or-path", str(tiny_checkpoint),
        "--trainer-config.per-device-train-batch-size", "2",
    ]  # fmt: skip

    def code(*more):
        with pytest.raises(SystemExit) as ended:
            main([*flags, *more])
        return ended.value.code, capsys.readouterr()

    assert code("--write-manifest", str(path))[0] == 0
    assert len(decode(path.read_text())) == 2 + 2 * 8
    status, output = code("--manifest", str(path))
    assert status == 0
    assert "no difference; 18 files" in output.out
    picture = root / "images/1/1/3.jpg"
    content = bytearray(picture.read_bytes())
    content[len(content) // 2] ^= 1
    picture.write_bytes(content)
    status, output = code("--manifest", str(path), "--write-manifest", str(tmp_path / "bad"))
    assert status == 3
    assert f"error: {picture} file has SHA-256 {hashlib.sha256(content).hexdigest()}" in output.out
    assert not (tmp_path / "bad").exists()
    monkeypatch.setattr(check_run, "_check_files", None)  # refused before any data is read
    assert code("--manifest", str(tmp_path / "gone"))[0] == 2


def test_a_folder_that_is_gone_is_an_error_of_the_set(root, tmp_path):
    path = written(root, tmp_path / "sums")
    shutil.rmtree(root)
    found = list(check_manifest(path, read_manifest(path), list_files([str(root)])))
    assert found
    assert {problem.severity for problem in found} == {"error"}
