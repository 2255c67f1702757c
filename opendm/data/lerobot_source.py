"""``LeRobotSource``: frames of a LeRobot dataset in the form of JSONL records."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from opendm.data.index import FrameIndex, IndexedFile
from opendm.data.lerobot_fields import Columns, find_fields
from opendm.data.lerobot_meta import EpisodeTable, read_episodes, read_meta
from opendm.data.lerobot_scan import episode_name, scan_lerobot
from opendm.data.source import Source, check_unchanged
from opendm.errors import DataError

__all__ = ["LeRobotSource", "scan_lerobot"]


class LeRobotSource(Source):
    """A LeRobot dataset of version 2.0, 2.1 or 3.0.

    A record's pictures are of type ``video`` (``frame_idx`` counts the frames of the whole file) or
    ``parquet`` (``row`` and ``column`` of the file); its urls are relative to the dataset's folder.

    Args:
        root: the dataset's folder.
        index: what :func:`scan_lerobot` gave for it.
        columns: as given to the scan.

    Raises:
        DataError: the metadata cannot be read.
    """

    def __init__(self, root: Path, index: FrameIndex, columns: Columns | None = None) -> None:
        super().__init__(root, index)
        self.meta = read_meta(root)
        self.cameras = find_fields(self.meta, columns).cameras

    @cached_property
    def _table(self) -> EpisodeTable:
        return read_episodes(self.meta)

    @cached_property
    def _table_rows(self) -> dict[str, int]:
        return {episode_name(n): row for row, n in enumerate(self._table.number.tolist())}

    def record(self, episode: int, frame: int) -> dict[str, Any]:
        """A frame as a JSONL record.

        Raises:
            DataError: a file with its pictures has changed or cannot be read.
        """
        index = self.index
        row = int(index.starts[episode]) + frame
        record: dict[str, Any] = {
            key: self._picture(feature, episode, frame) for key, feature in self.cameras.items()
        }
        record["state"] = index.state[row].tolist()
        if index.has_actions[episode]:
            record["action"] = index.action[row].tolist()
        record["prompt"] = index.tasks[index.task[row]]
        return record

    def _picture(self, feature: str, episode: int, frame: int) -> dict[str, Any]:
        if feature in self._table.videos:
            table_row = self._table_rows[self.index.episodes[episode]]
            chunk, file, first = self._table.videos[feature][table_row].tolist()
            url = self.meta.video_file(feature, chunk, file)
            return {"type": "video", "url": url, "frame_idx": first + frame}
        file = self.index.files[self.index.episode_file[episode]]
        _check_unchanged(self.root / file.path, file)
        return {
            "type": "parquet",
            "url": file.path,
            "row": int(self.index.position[self.index.starts[episode] + frame]),
            "column": feature,
        }

    def line(self, episode: int, frame: int) -> str:
        """:meth:`record` as JSON text."""
        return json.dumps(self.record(episode, frame))

    def location(self, episode: int, frame: int) -> str:
        """File, episode and row."""
        row = self.index.position[self.index.starts[episode] + frame]
        return f"{self.path(episode)}, {self.index.episodes[episode]}, row {row}"


def _check_unchanged(path: Path, file: IndexedFile) -> None:
    try:
        check_unchanged(path, file, path.stat())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
