"""The manifest of a checkpoint: size and SHA-256 of every file, and whether a folder matches it."""

import hashlib
import json
import re
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from opendm.errors import CheckpointError

MANIFEST = "manifest.json"
CHECKPOINT = re.compile(r"checkpoint-(0|[1-9]\d*)")
"""Name of a committed checkpoint; the number is its step."""
_NUM_HASHING_THREADS = 4


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest says of one file."""

    size: int
    """Bytes."""
    sha256: str
    """Lower-case hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    """Optimizer steps done."""
    hashes: Mapping[str, str]
    """Of what the run was made from: configuration, dataset, statistics."""
    files: Mapping[str, FileRecord]
    """By path below the folder, parts joined by ``/``; the manifest itself is not listed."""

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(record.size for record in self.files.values())


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of the file: strict JSON that carries a SHA-256 of itself."""
    content = asdict(manifest)
    body = json.dumps(content, sort_keys=True, allow_nan=False)
    content["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    return (json.dumps(content, sort_keys=True, allow_nan=False, indent=2) + "\n").encode()


def decode_manifest(data: bytes) -> Manifest:
    """The inverse of ``encode_manifest``.

    Raises:
        ValueError: any byte differs from what ``encode_manifest`` writes.
    """
    try:
        content = json.loads(data)
        files = {
            name: FileRecord(int(record["size"]), record["sha256"])
            for name, record in content["files"].items()
        }
        manifest = Manifest(int(content["step"]), dict(content["hashes"]), files)
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError("the structure is another") from error
    # there is one way to write it, so that also an altered space or digest shows
    if encode_manifest(manifest) != data:
        raise ValueError("it was altered")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, itself checked; the other files are not looked at.

    Raises:
        CheckpointError: it is missing, altered, or of another step than the folder's name says.
    """
    path = folder / MANIFEST
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise _unusable(folder, MANIFEST, "is not a file")
        manifest = decode_manifest(path.read_bytes())
    except FileNotFoundError:
        raise _unusable(folder, MANIFEST, "is missing, its save did not end") from None
    except OSError as error:
        raise _unusable(folder, MANIFEST, f"cannot be read: {error}") from error
    except ValueError as error:
        raise _unusable(folder, MANIFEST, f"is garbled: {error}") from error
    name = CHECKPOINT.fullmatch(folder.name)
    if name and int(name[1]) != manifest.step:
        raise _unusable(folder, MANIFEST, f"is of step {manifest.step}")
    return manifest


def verify(folder: Path) -> Manifest:
    """Read every file of a checkpoint and compare it with the manifest.

    Raises:
        CheckpointError: names the first file that differs, and how.
    """
    manifest = verify_sizes(folder)
    records = file_records(folder, list(manifest.files))
    for name, record in manifest.files.items():
        if records[name] != record:
            raise _unusable(folder, name, "differs from its SHA-256 in the manifest")
    return manifest


def verify_sizes(folder: Path) -> Manifest:
    """Compare names and sizes of the files with the manifest, without reading them.

    Raises:
        CheckpointError: names the first file that is missing, left over or of another size.
    """
    manifest = read_manifest(folder)
    sizes = file_sizes(folder)
    del sizes[MANIFEST]
    for name in sorted(manifest.files.keys() | sizes.keys()):
        if name not in sizes:
            raise _unusable(folder, name, "is missing")
        if name not in manifest.files:
            raise _unusable(folder, name, "is not in the manifest")
        size, recorded = sizes[name], manifest.files[name].size
        if size != recorded:
            raise _unusable(folder, name, f"has {size:,} bytes in place of {recorded:,}")
    return manifest


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by relative path.

    Raises:
        CheckpointError: there is a link, a pipe or the like, or the folder cannot be read.
    """
    sizes = {}
    try:
        for path in folder.rglob("*"):
            status, name = path.lstat(), path.relative_to(folder).as_posix()
            if stat.S_ISREG(status.st_mode):
                sizes[name] = status.st_size
            elif not stat.S_ISDIR(status.st_mode):
                raise _unusable(folder, name, "is neither a file nor a folder")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return sizes


def file_records(folder: Path, names: Sequence[str]) -> dict[str, FileRecord]:
    """Size and SHA-256 of files, as read back from the disk by a few threads.

    Raises:
        CheckpointError: a file cannot be read.
    """

    def record(name: str) -> FileRecord:
        try:
            with (folder / name).open("rb", buffering=0) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return FileRecord(file.tell(), digest)
        except OSError as error:
            raise _unusable(folder, name, f"cannot be read: {error}") from error

    with ThreadPoolExecutor(_NUM_HASHING_THREADS) as pool:
        return dict(zip(names, pool.map(record, names), strict=True))


def _unusable(folder: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(f"{folder} cannot be used: {name} {why}")
