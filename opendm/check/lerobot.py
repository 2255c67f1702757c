"""A LeRobot folder: metadata, parquet files, and the pictures and videos that frames refer to."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow import parquet

from opendm.check.pictures import BadPicture, check_image_stream
from opendm.check.problem import FILE, Problem, Severity
from opendm.check.records import PictureUse
from opendm.data.index import FrameIndex
from opendm.data.lerobot_fields import Columns, Fields, find_fields
from opendm.data.lerobot_meta import (
    INFO_FILE,
    EpisodeTable,
    LeRobotMeta,
    read_episodes,
    read_meta,
    read_tasks,
)
from opendm.data.lerobot_scan import episode_name, scan_lerobot
from opendm.errors import DataError

EPISODE: Final = re.compile(r"(.*?), (episodes? [\d, to]+) \(\d+ frames\): (.*)", re.DOTALL)
"""How the scan names what it leaves out."""
ROW: Final = re.compile(r"row (\d+): ([\w.]+(?:\[\d+\])?) (.*)", re.DOTALL)
BATCH_ROWS: Final = 64
LARGE_GROUP_BYTES: Final = 64 * 1024**2
"""Pictures of a row group; a frame drawn at random reads all of its group."""


def check_metadata(
    root: Path, columns: Columns | None, image_keys: Sequence[str]
) -> tuple[list[Problem], LeRobotMeta | None]:
    """Every file of ``meta``, each read although another one is broken."""
    try:
        meta = read_meta(root)
    except DataError as error:
        return [Problem(str(root / INFO_FILE), FILE, str(error), code="metadata")], None
    problems = []
    steps = {
        "tasks": lambda: read_tasks(meta),
        "episodes": lambda: read_episodes(meta),
        "features": lambda: find_fields(meta, columns, image_keys),
    }
    for name, step in steps.items():
        try:
            step()
        except DataError as error:
            code = "camera_unknown" if name == "features" else "metadata"
            problems.append(Problem(str(root / "meta"), name, str(error), code=code))
    return problems, None if problems else meta


def check_footers(root: Path) -> Iterator[Problem]:
    """Every parquet file below the folder must be whole (T28), also one that no episode names."""
    for path in sorted(root.rglob("*.parquet")):
        try:
            with parquet.ParquetFile(path) as file:
                _ = file.metadata.num_rows
        except (pa.ArrowException, OSError) as error:
            reason = f"is not a whole parquet file ({error}); an interrupted recording leaves such"
            yield Problem(str(path), FILE, reason, code="parquet")


def check_numbers(
    root: Path, columns: Columns | None, *, skip_bad: bool
) -> tuple[list[Problem], FrameIndex | None]:
    """Every episode's rows; what ``skip_bad`` leaves out is a warning.

    The scan names all bad episodes at once, and leaves them out, so that the others are checked on.
    """
    try:
        index = scan_lerobot(root, columns, skip_bad=True)
        return [from_scan(line, root, is_left_out=skip_bad) for line in index.dropped], index
    except DataError:
        pass  # nothing is usable; the strict scan says why
    try:
        return [], scan_lerobot(root, columns, skip_bad=False)
    except DataError as error:
        lines = str(error).split("\n")
        return [from_scan(line, root, is_left_out=False) for line in lines[:-1] or lines], None


def from_scan(line: str, root: Path, *, is_left_out: bool) -> Problem:
    """A line of the scan as a problem with its place."""
    severity: Severity = "warning" if is_left_out else "error"
    match = EPISODE.fullmatch(line)
    if match is None:
        return Problem(str(root), "episodes", line, severity, "episode")
    where, episode, reason = match.groups()
    row = ROW.match(reason)
    if row is not None:
        number, name, rest = row.groups()
        return Problem(f"{where}:row {number}", name, f"{rest} ({episode})", severity, "row")
    code = "parquet" if "parquet file" in reason or "is missing" in reason else "episode"
    return Problem(where, episode, reason, severity, code)


def video_uses(
    meta: LeRobotMeta, fields: Fields, image_keys: Sequence[str], table: EpisodeTable
) -> dict[str, PictureUse]:
    """Every video file, and the last frame of it that an episode reads."""
    uses: dict[str, PictureUse] = {}
    for key in image_keys:
        places = table.videos.get(fields.cameras[key])
        if places is None:
            continue
        rows = zip(table.number.tolist(), table.length.tolist(), places.tolist(), strict=True)
        for number, length, (chunk, file, first) in rows:
            url = meta.video_file(fields.cameras[key], chunk, file)
            where = f"{meta.root / 'meta'}:{episode_name(number)}"
            use = uses.setdefault(url, PictureUse(where, key, "video"))
            use.add(first)
            use.add(first + length - 1)
            if use.last_frame == first + length - 1:
                use.where = where
    return uses


def check_parquet_pictures(
    index: FrameIndex, root: Path, columns: Mapping[str, str], *, decode: bool
) -> Iterator[Problem]:
    """Every encoded picture in the data files.

    Args:
        index: names the files.
        root: the dataset's folder.
        columns: camera to its column.
        decode: decode all pixels, not only headers.
    """
    for entry in index.files:
        path = root / entry.path
        for key, column in columns.items():
            try:
                yield from _check_groups(path, key, column)
                yield from _check_column(path, key, column, decode=decode)
            except (pa.ArrowException, OSError) as error:
                reason = f"column {column} cannot be read: {error}"
                yield Problem(str(path), key, reason, code="parquet")


def _check_groups(path: Path, key: str, column: str) -> Iterator[Problem]:
    """Whether a frame can be read without many others."""
    with parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    largest, rows = 0, 0
    for group in groups:
        parts = [group.column(number) for number in range(group.num_columns)]
        size = sum(
            part.total_uncompressed_size
            for part in parts
            if part.path_in_schema == column or part.path_in_schema.startswith(f"{column}.")
        )
        if size > largest:
            largest, rows = size, group.num_rows
    if largest > LARGE_GROUP_BYTES:
        reason = (
            f"has row groups of up to {rows:,} rows with {largest / 1024**2:.0f} MB of pictures, "
            "and every frame that is drawn at random reads a whole one; write the file again with "
            "row_group_size=100, or record videos"
        )
        yield Problem(str(path), key, reason, "warning", "row_group_large")


def _check_column(path: Path, key: str, column: str, *, decode: bool) -> Iterator[Problem]:
    row = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH_ROWS, columns=[column]):
            for cell in batch.column(0).to_pylist():
                content = cell if isinstance(cell, bytes) else (cell or {}).get("bytes")
                where = f"{path}:row {row}"
                row += 1
                if not content:
                    if not (isinstance(cell, dict) and cell.get("path")):
                        yield Problem(where, key, "holds no picture", code="picture_empty")
                    continue
                try:
                    check_image_stream(io.BytesIO(content), "in the row", decode=decode)
                except BadPicture as bad:
                    yield Problem(where, key, str(bad), code=bad.code)
