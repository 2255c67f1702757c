"""A dataset's format, read from its folder: OpenDM JSONL, LeRobot v2.0/v2.1 or LeRobot v3.0."""

import logging
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from opendm.data.episodes import parse_frame
from opendm.data.index import FrameIndex
from opendm.data.index_cache import Stamp, cached_index
from opendm.data.jsonl_files import first_line, list_jsonl
from opendm.data.jsonl_source import JsonlSource, scan_jsonl
from opendm.data.selection import Episode, usable_episodes
from opendm.data.source import Source
from opendm.dataset.register import dataset_fields, is_registered
from opendm.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

LEROBOT_INFO: Final = Path("meta") / "info.json"
SUPPORTED: Final = (
    "OpenDM JSONL (*.jsonl, one JSON object per line), LeRobot v2.0/v2.1 and LeRobot v3.0 "
    "(meta/info.json)"
)
HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_reported: set[tuple[Path, str]] = set()


def open_source(
    root: "str | Path",
    *,
    skip_bad: bool = False,
    columns: Mapping[str, str | None] | None = None,
    index_root: "str | Path | None" = None,
    verify: bool = False,
) -> Source:
    """Open a folder of any of the three formats; its index is made once and then mapped.

    Args:
        root: the folder.
        skip_bad: leave out what cannot be used, with a count, instead of refusing the dataset.
        columns: which of a LeRobot dataset's features are state, action and cameras.
        index_root: folder of the indices; the user's cache folder by default.
        verify: compare the contents of all files with those that were indexed.

    Raises:
        DataError: the folder is missing, or a record is bad and ``skip_bad`` is not given.
    """
    root = Path(root)
    mode = "skip" if skip_bad else "refuse"
    if (root / LEROBOT_INFO).is_file():
        from opendm.data.lerobot_source import LeRobotSource, scan_lerobot

        index = cached_index(
            root,
            f"lerobot {mode} {sorted((columns or {}).items())}",
            _lerobot_stamp(root),
            lambda: scan_lerobot(root, columns, skip_bad=skip_bad),
            index_root=index_root,
            verify=verify,
        )
        _report(root, index)
        return LeRobotSource(root, index, columns)
    listing = list_jsonl(root)
    index = cached_index(
        root,
        f"jsonl {mode}",
        [(file.path, file.num_bytes, file.mtime_ns) for file in listing.files],
        lambda: scan_jsonl(root, skip_bad=skip_bad, listing=listing),
        index_root=index_root,
        verify=verify,
    )
    _report(root, index)
    return JsonlSource(root, index)


def find_episodes(root: "str | Path") -> list[Episode]:
    """Episodes below a folder that can be trained on.

    Raises:
        DataError: the folder is missing, or holds no frame that could be trained on.
    """
    return usable_episodes(open_source(root))


def dataset_info(name: str) -> dict[str, Any]:
    """The fields of a registered dataset, of a folder, or of a dataset on the Hub.

    Raises:
        ConfigError: ``name`` is none of them.
        DataError: the folder holds none of the supported formats.
    """
    if is_registered(name):
        return dataset_fields(name)
    if Path(name).is_dir():
        return describe_folder(Path(name))
    if HUB_ID.fullmatch(name):
        return describe_folder(_hub_folder(name))
    if "/" in name or "\\" in name:
        raise ConfigError(
            f"--data-config.dataset-name {name!r} is a path, and there is no such folder; give a "
            f"registered name, a Hub id (org/name) or a folder of {SUPPORTED}"
        )
    return dataset_fields(name)  # says which registered names are near


def describe_folder(root: Path) -> dict[str, Any]:
    """The fields of a registration, as far as the data itself tells them.

    Raises:
        DataError: the folder holds none of the supported formats.
    """
    if (root / LEROBOT_INFO).is_file():
        from opendm.data.lerobot_fields import describe_lerobot

        return describe_lerobot(root)
    for file in list_jsonl(root).files:
        line = first_line(root / file.path)
        if line:
            frame = parse_frame(line, f"first frame of {root / file.path}")
            keys = [k for k, v in frame.items() if k.startswith("images_") and isinstance(v, dict)]
            prompts = [f"Camera {number}" for number in range(1, len(keys) + 1)]
            folders = {"jsonl_dir": str(root), "image_dir": str(root)}
            return {**folders, "image_keys": keys, "image_prompts": prompts}
    raise DataError(f"{root} holds no dataset of a supported format: {SUPPORTED}")


@cache
def _hub_folder(name: str) -> Path:
    from opendm.data.hub import dataset_folder

    return dataset_folder(name)


def _lerobot_stamp(root: Path) -> Stamp:
    files = [*(root / "data").rglob("*.parquet"), *(root / "meta").rglob("*.*")]
    entries = [(path.relative_to(root).as_posix(), path.stat()) for path in sorted(files)]
    return [(name, entry.st_size, entry.st_mtime_ns) for name, entry in entries]


def _report(root: Path, index: FrameIndex) -> None:
    """Say once in a process what of a dataset is not used."""
    key = (root.resolve(), index.fingerprint())
    if key in _reported:
        return
    _reported.add(key)
    lengths = [len(index.episode_rows(number)) for number in range(len(index.episodes))]
    unused = sum(not index.num_samples(number) for number in range(len(index.episodes)))
    if unused:
        logger.warning(
            "%s: %d of %d episodes have no frame to train on (%d are empty)",
            root, unused, len(lengths), lengths.count(0),
        )  # fmt: skip
    for line in index.dropped:
        logger.warning("%s: %s", root, line)
