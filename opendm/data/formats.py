"""A dataset's format, read from its folder: OpenDM JSONL, LeRobot v2.0/v2.1 or LeRobot v3.0."""

import logging
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from opendm.data.episodes import Sizes, check_record, location, parse_frame
from opendm.data.index import FrameIndex
from opendm.data.index_cache import Stamp, cached_index
from opendm.data.jsonl_files import Listing, first_line, list_jsonl
from opendm.data.jsonl_source import JsonlSource, scan_jsonl
from opendm.data.read_once import once
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
CAMERA: Final = "images_"
HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_reported: set[tuple[Path, str]] = set()


def open_source(
    root: "str | Path",
    *,
    skip_bad: bool = False,
    columns: Mapping[str, str | None] | None = None,
    index_root: "str | Path | None" = None,
    verify: bool = False,
    allow_outside_root: bool = False,
) -> Source:
    """Open a folder of any of the three formats; its index is made once and then mapped.

    Args:
        root: the folder.
        skip_bad: leave out what cannot be used, with a count, instead of refusing the dataset.
        columns: which of a LeRobot dataset's features are state, action and cameras.
        index_root: folder of the indices; the user's cache folder by default.
        verify: compare the contents of all files with those that were indexed.
        allow_outside_root: read JSONL files too that links lead out of the folder to.

    Raises:
        DataError: the folder is missing, or a record is bad and ``skip_bad`` is not given.
    """
    root, chosen = Path(root), tuple(sorted((columns or {}).items()))
    return once(
        ("source", root, chosen, skip_bad, index_root, verify, allow_outside_root),
        lambda: _open(
            root,
            columns,
            index_root,
            skip_bad=skip_bad,
            verify=verify,
            allow_outside_root=allow_outside_root,
        ),
    )


def _open(
    root: Path,
    columns: Mapping[str, str | None] | None,
    index_root: "str | Path | None",
    *,
    skip_bad: bool,
    verify: bool,
    allow_outside_root: bool,
) -> Source:
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
    listing = _listing(root, allow_outside_root=allow_outside_root)
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


def _listing(root: Path, *, allow_outside_root: bool) -> Listing:
    return once(
        ("listing", root, allow_outside_root),
        lambda: list_jsonl(root, allow_outside_root=allow_outside_root),
    )


def find_episodes(root: "str | Path") -> list[Episode]:
    """Episodes below a folder that can be trained on.

    Raises:
        DataError: the folder is missing, or holds no frame that could be trained on.
    """
    return usable_episodes(open_source(root))


def dataset_info(
    name: str, *, skip_bad: bool = False, allow_outside_root: bool = False
) -> dict[str, Any]:
    """The fields of a registered dataset, of a folder, or of a dataset on the Hub.

    Args:
        name: registered name, folder or Hub id.
        skip_bad: as in :func:`open_source`.
        allow_outside_root: as in :func:`open_source`.

    Raises:
        ConfigError: ``name`` is none of them.
        DataError: the folder holds none of the supported formats.
    """
    if is_registered(name):
        return dataset_fields(name)
    if Path(name).is_dir():
        folder = Path(name)
    elif HUB_ID.fullmatch(name):
        folder = _hub_folder(name)
    elif "/" in name or "\\" in name:
        raise ConfigError(
            f"--data-config.dataset-name {name!r} is a path, and there is no such folder; give a "
            f"registered name, a Hub id (org/name) or a folder of {SUPPORTED}"
        )
    else:
        return dataset_fields(name)  # says which registered names are near
    return describe_folder(folder, skip_bad=skip_bad, allow_outside_root=allow_outside_root)


def with_folders(
    info: Mapping[str, Any], jsonl_dir: str | None, image_dir: str | None
) -> dict[str, Any]:
    """A registration's fields with other folders, where they are given.

    Raises:
        ConfigError: the pictures of a LeRobot dataset are looked for outside of its folder.
    """
    given = {"jsonl_dir": jsonl_dir, "image_dir": image_dir}
    fields = {**info, **{key: folder for key, folder in given.items() if folder is not None}}
    root = Path(fields["jsonl_dir"])
    if (root / LEROBOT_INFO).is_file():
        if image_dir is not None and Path(image_dir).resolve() != root.resolve():
            raise ConfigError(
                f"--data-config.image-dir {image_dir!r} is another folder than the LeRobot dataset "
                f"{str(root)!r}, which has its own pictures; leave image-dir out"
            )
        fields["image_dir"] = fields["jsonl_dir"]
    return fields


def describe_folder(
    root: Path, *, skip_bad: bool = False, allow_outside_root: bool = False
) -> dict[str, Any]:
    """The fields of a registration, as far as the data itself tells them.

    The cameras are all ``images_*`` of the episodes' first frames, ``images_1`` to ``images_10`` in
    the order of their numbers, then those with names.

    Raises:
        DataError: the folder holds none of the supported formats, or no camera.
    """
    if (root / LEROBOT_INFO).is_file():
        from opendm.data.lerobot_fields import describe_lerobot

        return describe_lerobot(root)
    listing = _listing(root, allow_outside_root=allow_outside_root)
    if not listing.files:
        raise DataError(f"{root} holds no dataset of a supported format: {SUPPORTED}")
    keys = _find_cameras(root, listing, skip_bad=skip_bad)
    if not keys:
        raise DataError(
            f"{root}: no episode's first frame has a camera; expected fields images_1, images_2 "
            "and so on with an object of type and url, or register the dataset with its image_keys"
        )
    return {
        "jsonl_dir": str(root),
        "image_dir": str(root),
        "image_keys": list(keys),
        "image_prompts": [f"Camera {number}" for number in range(1, len(keys) + 1)],
    }


@lru_cache(maxsize=16)
def _find_cameras(root: Path, listing: Listing, *, skip_bad: bool) -> tuple[str, ...]:
    """Cameras of all files; they are read once for as long as the listing stays the same."""
    found: dict[str, None] = {}
    for file in listing.files:
        path = root / file.path
        line = first_line(path).strip()
        if not line:
            continue
        try:
            frame = check_record(line, "", Sizes(), has_actions=None)
        except DataError:
            if skip_bad:
                continue  # this episode ends before its first frame
            frame = parse_frame(line, location(path, 0))
        keys = [k for k, v in frame.items() if k.startswith(CAMERA) and isinstance(v, dict)]
        found |= dict.fromkeys(keys)
    return tuple(sorted(found, key=_camera_number))


def _camera_number(key: str) -> tuple[bool, int]:
    number = key.removeprefix(CAMERA)
    return (False, int(number)) if number.isdecimal() else (True, 0)


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
