"""Checkpoint folders on disk: begun hidden, committed by one rename, verified, rotated.

A save writes into ``.checkpoint-N.partial``; its manifest comes last, and one rename then makes it
``checkpoint-N``. A folder that does not match its manifest is never used. Several ranks may write
into one partial folder; ``begin``, ``commit``, ``rotate`` and ``remove`` are for one of them.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from opendm.errors import CheckpointError
from opendm.trainer.manifest import (
    CHECKPOINT,
    MANIFEST,
    Manifest,
    encode_manifest,
    file_records,
    file_sizes,
    verify,
    verify_sizes,
)

_LEFTOVER = re.compile(r"\.checkpoint-\d+\.(partial|removed)")


# Writing


def begin(output_dir: Path, step: int, *, needed: int = 0) -> Path:
    """Make an empty folder for the files of a checkpoint and clear away what dead runs left.

    Args:
        output_dir: folder of all checkpoints of the run; made if missing.
        step: optimizer steps done.
        needed: estimated size of the checkpoint in bytes; 0: not known.

    Raises:
        CheckpointError: a healthy checkpoint of this step exists, the folder cannot be written,
            or less than ``needed`` is free.
    """
    partial, final = output_dir / f".checkpoint-{step}.partial", output_dir / f"checkpoint-{step}"
    with writing(partial, f"the checkpoint of step {step}", needed=needed):
        output_dir.mkdir(parents=True, exist_ok=True)
        for path in output_dir.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                _delete(path)
        partial.mkdir()
    try:
        _refuse_healthy(final)
        _require_space(partial, needed)
    except CheckpointError:
        discard(partial)
        raise
    return partial


def commit(partial: Path, step: int, hashes: Mapping[str, str]) -> Path:
    """Turn a folder whose files are all written into the checkpoint of ``step``.

    Everything reaches the disk before the rename, so that also a power cut leaves the whole
    checkpoint or none. On any error the partial folder is removed.

    Args:
        partial: what ``begin`` returned.
        step: the same as there.
        hashes: of configuration, dataset, statistics; kept in the manifest.

    Returns:
        The committed folder.

    Raises:
        CheckpointError: what could not be written, why, and what is free.
    """
    final = partial.with_name(f"checkpoint-{step}")
    try:
        with writing(partial, f"the checkpoint of step {step}"):
            names = sorted(file_sizes(partial))
            for name in names:
                sync(partial / name)
            records = file_records(partial, names)
            _write(partial / MANIFEST, encode_manifest(Manifest(step, dict(hashes), records)))
            for folder in (*filter(Path.is_dir, partial.rglob("*")), partial):
                sync(folder)
            if final.exists():
                remove(final)  # a damaged one: begin() refuses to write beside a healthy one
            partial.rename(final)
            sync(final.parent)
    except CheckpointError:
        discard(partial)
        raise
    return final


def discard(partial: Path) -> None:
    """Remove the folder of a checkpoint that is not to be committed."""
    shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def writing(partial: Path, what: str, *, needed: int = 0) -> Iterator[None]:
    """Explain an error of the file system in one line; the folder stays for ``discard``.

    Args:
        partial: folder that the block writes into.
        what: what the block writes, as it is to appear in the message.
        needed: estimated size of the whole checkpoint in bytes; 0: not known.

    Raises:
        CheckpointError: in place of an OSError or an error of safetensors.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        about = f" of about {needed:,} needed" if needed else ""
        raise CheckpointError(
            f"{what} could not be written at {partial.parent}: {error}. {_num_written(partial):,} "
            f"bytes{about} were written, {_free(partial.parent)} are free there. Earlier "
            "checkpoints are untouched; free space or name another output folder"
        ) from error


def sync(path: Path) -> None:
    """Force a file, or the list of names of a folder, to the disk.

    With several nodes every rank does this for the files that it wrote: rank 0 cannot flush what
    another machine still holds.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some file systems know no fsync of folders and answer EINVAL
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


# Reading


def healthy_checkpoints(output_dir: Path, report: Callable[[str], None]) -> list[tuple[int, Path]]:
    """Steps and folders of all checkpoints that verify, ascending by step.

    Args:
        output_dir: folder of all checkpoints of a run; need not exist.
        report: gets one line for every checkpoint that does not verify; it is left alone.
    """
    numbered = _numbered(output_dir)
    return [(step, folder) for step, folder in numbered if _is_healthy(folder, report)]


def newest_healthy(output_dir: Path, report: Callable[[str], None]) -> tuple[int, Path] | None:
    """Step and folder of the newest checkpoint that verifies; older ones are not read.

    Args:
        output_dir: folder of all checkpoints of a run; need not exist.
        report: gets one line for every newer checkpoint that does not verify.
    """
    for step, folder in reversed(_numbered(output_dir)):
        if _is_healthy(folder, report):
            return step, folder
    return None


# Removing


def rotate(output_dir: Path, keep: int, committed: Path) -> None:
    """Remove the oldest checkpoints so that ``keep`` are left; the committed one always stays.

    Damaged ones neither count nor are removed. Files are compared by size alone here: hashing
    every older checkpoint at every save would cost more than the save.

    Args:
        output_dir: folder of all checkpoints of the run.
        keep: 1 or more.
        committed: what ``commit`` has just returned.

    Raises:
        CheckpointError: one could not be removed.
    """
    older = [folder for _, folder in _numbered(output_dir) if folder.name != committed.name]
    older = [folder for folder in older if _has_right_sizes(folder)]
    for folder in older[: max(0, len(older) - keep + 1)]:
        try:
            remove(folder)
        except OSError as error:
            raise CheckpointError(f"{folder} could not be removed: {error}") from error


def remove(folder: Path) -> None:
    """Remove a checkpoint; a kill in between leaves it whole or invisible."""
    hidden = folder.with_name(f".{folder.name}.removed")
    _delete(hidden)
    folder.rename(hidden)
    sync(hidden.parent)
    _delete(hidden)


# Parts


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _numbered(output_dir: Path) -> list[tuple[int, Path]]:
    if not output_dir.is_dir():
        return []
    found = [(CHECKPOINT.fullmatch(path.name), path) for path in output_dir.iterdir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def _is_healthy(folder: Path, report: Callable[[str], None]) -> bool:
    try:
        verify(folder)
    except CheckpointError as error:
        report(str(error))
        return False
    return True


def _has_right_sizes(folder: Path) -> bool:
    try:
        verify_sizes(folder)
    except CheckpointError:
        return False
    return True


def _refuse_healthy(final: Path) -> None:
    if final.exists() and _is_healthy(final, lambda _: None):
        raise CheckpointError(
            f"{final} holds a healthy checkpoint of this step already; remove it first, or write "
            "into another output folder"
        )


def _require_space(partial: Path, needed: int) -> None:
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise CheckpointError(
            f"the next checkpoint needs about {needed:,} bytes, {free:,} are free at "
            f"{partial.parent}; free space or name another output folder"
        )


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _num_written(partial: Path) -> int:
    try:
        return sum(file_sizes(partial).values())
    except CheckpointError:
        return 0


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,}"
    except OSError:
        return "an unknown number"
