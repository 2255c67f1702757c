"""The JSONL files of a folder, and those of its names that are no files to read."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from opendm.check.problem import FILE, Problem
from opendm.data.paths import check_inside
from opendm.errors import DataError


@dataclass(frozen=True, slots=True)
class EpisodeFiles:
    """What lies below a folder."""

    files: tuple[Path, ...]
    problems: tuple[Problem, ...]


def list_episodes(root: Path, *, allow_outside_root: bool = False) -> EpisodeFiles:
    """All ``*.jsonl`` below a folder; nothing is opened, so that a pipe cannot block."""
    files: list[Path] = []
    problems: list[Problem] = []
    first_of: dict[tuple[int, int], Path] = {}
    if not root.is_dir():
        return EpisodeFiles((), (Problem(str(root), FILE, "is no folder", code="file"),))
    for path in sorted(root.rglob("*.jsonl")):
        entry, problem = _look_at(path, root, allow_outside_root=allow_outside_root)
        if problem is not None or entry is None:
            problems += [problem] if problem else []
            continue
        other = first_of.setdefault((entry.st_dev, entry.st_ino), path)
        if other != path and (path.is_symlink() or other.is_symlink()):
            reason = f"is the same file as {other}; it is counted once"
            problems.append(Problem(str(path), FILE, reason, "warning", "repeated_file"))
            continue
        if entry.st_size == 0:
            problems.append(Problem(str(path), FILE, "is empty", "warning", "empty_episode"))
        files.append(path)
    if not files:
        problems.append(Problem(str(root), FILE, "has no *.jsonl to read", code="no_episodes"))
    return EpisodeFiles(tuple(files), tuple(problems))


def _look_at(
    path: Path, root: Path, *, allow_outside_root: bool
) -> tuple[os.stat_result | None, Problem | None]:
    try:
        entry = path.stat()
    except OSError as error:
        return None, Problem(str(path), FILE, f"leads nowhere ({error.strerror})", code="file")
    reason = ""
    if stat.S_ISDIR(entry.st_mode):
        reason = "is a folder; expected a file of one JSON object per line"
    elif not stat.S_ISREG(entry.st_mode):
        reason = "is a pipe, socket or device; expected a file"
    elif not os.access(path, os.R_OK):
        reason = "may not be read by this user"
    if reason:
        return None, Problem(str(path), FILE, reason, code="file")
    if not allow_outside_root:
        try:
            check_inside(path, str(root))
        except DataError as error:
            return None, Problem(str(path), FILE, str(error), code="outside_root")
    return entry, None
