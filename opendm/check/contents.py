"""The contents of a dataset's files, whatever its format: one shape of result for the check."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from opendm.check import lerobot
from opendm.check.episodes import check_public_index
from opendm.check.pictures import PictureRules, check_pictures
from opendm.check.problem import Problem
from opendm.check.prompts import check_cameras
from opendm.check.records import scan_records
from opendm.data.formats import LEROBOT_INFO
from opendm.data.index import FrameIndex
from opendm.data.lerobot_fields import find_fields
from opendm.data.lerobot_meta import read_episodes


@dataclass(slots=True)
class Contents:
    """What was found in the files."""

    kind: str
    problems: list[Problem] = field(default_factory=list)
    num_frames: int = 0
    """Frames in the files, the bad ones included."""
    num_episodes: int = 0
    num_pictures: int = 0
    """Files of pictures and videos."""
    cameras: Mapping[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    """Task to the place of its first frame, where the format has such a place."""
    lines: Mapping[str, np.ndarray] = field(default_factory=dict)
    """JSONL file to the line numbers of its records."""


def read_contents(
    info: Mapping[str, Any], name: str, rules: PictureRules, *, skip_bad: bool
) -> Contents:
    """Read all files of a dataset.

    Args:
        info: the registration's fields.
        name: of the dataset, for messages.
        rules: for pictures and paths.
        skip_bad: whether bad episodes of a LeRobot dataset are left out.
    """
    root = Path(info["jsonl_dir"])
    if (root / LEROBOT_INFO).is_file():
        return _read_lerobot(info, root, rules, skip_bad=skip_bad)
    desc = info.get("state_desc")
    scan = scan_records(
        root,
        info["image_keys"],
        state_size=None if desc is None else len(desc),
        allow_outside_root=rules.allow_outside_root,
    )
    cameras = list(check_cameras(info["image_keys"], scan.cameras, scan.num_records, name))
    nowhere = {problem.field for problem in cameras if problem.code == "camera_unknown"}
    found = Contents(
        kind="OpenDM JSONL",
        problems=[*(p for p in scan.problems if not _is_known(p, nowhere)), *cameras],
        num_frames=scan.num_records,
        num_episodes=scan.num_files,
        num_pictures=len(scan.pictures),
        cameras=scan.cameras,
        places=scan.prompts,
        lines=scan.lines,
    )
    found.problems += check_public_index(root, list(map(Path, scan.lines)))
    found.problems += check_pictures(scan.pictures, rules)
    return found


def _is_known(problem: Problem, nowhere: set[str]) -> bool:
    """Whether a camera that no record has explains the problem."""
    return problem.code == "camera_missing" and problem.field in nowhere


def _read_lerobot(
    info: Mapping[str, Any], root: Path, rules: PictureRules, *, skip_bad: bool
) -> Contents:
    columns, keys = info.get("columns"), info["image_keys"]
    found = Contents(kind="LeRobot")
    problems, meta = lerobot.check_metadata(root, columns, keys)
    found.problems += problems
    footers = list(lerobot.check_footers(root))
    if meta is None:
        found.problems += footers
        return found
    found.kind = f"LeRobot {meta.version}"
    table, fields = read_episodes(meta), find_fields(meta, columns, keys)
    found.num_episodes, found.num_frames = len(table.number), int(table.length.sum())
    found.cameras = dict.fromkeys(fields.cameras, found.num_frames)
    problems, index = lerobot.check_numbers(root, columns, skip_bad=skip_bad)
    found.problems += _not_named_by(footers, problems) + problems
    uses = lerobot.video_uses(meta, fields, keys, table)
    found.num_pictures = len(uses)
    found.problems += check_pictures(uses, rules)
    if index is not None:
        in_parquet = {key: fields.cameras[key] for key in keys if
                      meta.features[fields.cameras[key]].get("dtype") == "image"}  # fmt: skip
        found.problems += lerobot.check_parquet_pictures(
            index, root, in_parquet, decode=rules.decode
        )
    return found


def _not_named_by(footers: list[Problem], scanned: list[Problem]) -> list[Problem]:
    """Broken files that no episode's problem names already."""
    texts = [f"{problem.where} {problem.reason}" for problem in scanned]
    return [footer for footer in footers if not any(footer.where in text for text in texts)]


def leave_out(contents: Contents, root: Path, index: FrameIndex) -> None:
    """Make warnings of the problems in records that skip mode leaves out.

    An episode ends before its first bad record, so that a problem in record number r of a file
    concerns nobody where the index has at most r frames of the file.
    """
    kept = {
        str(root / name): len(index.episode_rows(number))
        for number, name in enumerate(index.episodes)
    }

    def is_left_out(problem: Problem) -> bool:
        path, _, line = problem.where.rpartition(":")
        if not line.isdecimal() or path not in contents.lines or path not in kept:
            return False
        record = int(np.searchsorted(contents.lines[path], int(line)))
        return record >= kept[path]

    contents.problems = [
        problem.as_warning() if problem.is_error and is_left_out(problem) else problem
        for problem in contents.problems
    ]


def count_left_out(contents: Contents, root: Path, index: FrameIndex) -> tuple[int, int]:
    """Episodes that lose frames, and frames that are lost, exactly."""
    frames = contents.num_frames - index.num_frames
    if not contents.lines:
        return contents.num_episodes - len(index.episodes), frames
    lengths = {
        str(root / name): len(index.episode_rows(number))
        for number, name in enumerate(index.episodes)
    }
    shortened = sum(lengths.get(path, 0) < len(lines) for path, lines in contents.lines.items())
    return shortened, frames


def camera_row(expected: Sequence[str], found: Mapping[str, int]) -> str:
    """Cameras expected and found, side by side."""
    counts = Counter(found)
    pairs = [f"{key}: {counts[key]:,} frames" for key in expected]
    others = [f"{key}: {count:,} frames, not used" for key, count in found.items()
              if key not in expected]  # fmt: skip
    return "; ".join([*pairs, *others])
