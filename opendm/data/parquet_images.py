"""Encoded pictures in parquet files, read one row group at a time."""

import os
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import parquet

from opendm.errors import DataError

MAX_OPEN_FILES: Final = 16
MAX_GROUP_BYTES: Final = 256 * 1024**2
"""Encoded pictures that a process keeps; the last row group of every camera is kept whatever its
size, so that frames that follow each other are read once."""

GroupKey = tuple[str, int, int, int, str]


@dataclass(frozen=True, slots=True, eq=False)
class _OpenFile:
    file: parquet.ParquetFile
    ends: list[int]
    """Row after each row group."""


class _OpenTables:
    """Open files and row groups, the least recently used dropped first."""

    def __init__(self) -> None:
        self.process = 0
        self.files: OrderedDict[tuple[str, int, int], _OpenFile] = OrderedDict()
        self.groups: OrderedDict[GroupKey, pa.ChunkedArray] = OrderedDict()

    def cell(self, path: Path, row: int, column: str) -> Any:
        if self.process != os.getpid():  # after a fork the files' positions are shared
            self.process = os.getpid()
            self.files, self.groups = OrderedDict(), OrderedDict()
        status = path.stat()
        key = (str(path), status.st_size, status.st_mtime_ns)
        opened = self._file(key)
        if not 0 <= row < (opened.ends or [0])[-1]:
            raise DataError(f"{path} has no row {row}")
        group = bisect_right(opened.ends, row)
        start = opened.ends[group - 1] if group else 0
        return self._group(opened, (*key, group, column))[row - start].as_py()

    def _file(self, key: tuple[str, int, int]) -> _OpenFile:
        if key not in self.files:
            file = parquet.ParquetFile(key[0])
            counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            self.files[key] = _OpenFile(file, list(accumulate(counts)))
            while len(self.files) > MAX_OPEN_FILES:
                self.files.popitem(last=False)[1].file.close()
        self.files.move_to_end(key)
        return self.files[key]

    def _group(self, opened: _OpenFile, key: GroupKey) -> pa.ChunkedArray:
        if key not in self.groups:
            column = key[-1]
            table = opened.file.read_row_group(key[3], columns=[column])
            if column not in table.column_names:
                raise DataError(f"{key[0]} has no column {column!r}")
            self.groups[key] = table[column]
            while self._num_bytes() > MAX_GROUP_BYTES and (old := self._replaced()):
                del self.groups[old]
        self.groups.move_to_end(key)
        return self.groups[key]

    def _replaced(self) -> GroupKey | None:
        """The least recently used group of a column that has a later one."""
        keys = list(self.groups)
        latest = {key[-1]: key for key in keys}
        return next((key for key in keys if latest[key[-1]] != key), None)

    def _num_bytes(self) -> int:
        return sum(group.nbytes for group in self.groups.values())


_open_tables = _OpenTables()


def read_image_cell(path: Path, row: int, column: str) -> dict[str, Any]:
    """``{"bytes": ..., "path": ...}`` of one row; a column of plain bytes has no path.

    Raises:
        DataError: the file, the row or the column is missing or broken.
    """
    try:
        cell = _open_tables.cell(path, row, column)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"row {row} of {path} cannot be read: {error}") from error
    if isinstance(cell, bytes):
        return {"bytes": cell, "path": None}
    if not isinstance(cell, dict) or not (cell.get("bytes") or cell.get("path")):
        raise DataError(f"row {row} of {path}: column {column!r} holds no picture")
    return cell
