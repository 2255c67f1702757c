"""Which fields of a LeRobot dataset are the state, the action and the cameras."""

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from opendm.constants.robot import RobotStateDesc
from opendm.data.lerobot_meta import LeRobotMeta, read_meta
from opendm.errors import DataError

DEFAULT_COLUMNS: Final = {"state": "observation.state", "action": "action"}

Columns = Mapping[str, str | None]
"""``state``, ``action`` and names of cameras, to names of features. An ``action`` of None: there is
none, and the next states are the targets."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of features."""

    state: str
    action: str | None
    cameras: dict[str, str]
    """Name in a record to name of the feature, all cameras of the dataset."""


def find_fields(
    meta: LeRobotMeta, columns: Columns | None, image_keys: Sequence[str] | None = None
) -> Fields:
    """The features behind a registration's names.

    Args:
        meta: the dataset's.
        columns: the registration's; None and names it leaves out stand for ``DEFAULT_COLUMNS``.
        image_keys: the cameras that the registration expects; None: those of the dataset.

    Raises:
        DataError: a feature does not exist; the message has a table of all of them.
    """
    wanted = {**DEFAULT_COLUMNS, **(columns or {})}
    vectors = {key: wanted.pop(key) for key in DEFAULT_COLUMNS}
    given = {key: name or key for key, name in wanted.items()}
    renamed = set(given.values())
    cameras = given | {name: name for name in meta.cameras if name not in renamed}
    expected = [(key, name, False) for key, name in vectors.items() if name or key == "state"]
    keys = list(dict.fromkeys([*given, *(cameras if image_keys is None else image_keys)]))
    expected += [(key, cameras.get(key, key), True) for key in keys]
    if any(not _fits(meta, name, is_camera=is_camera) for _, name, is_camera in expected):
        raise DataError(_table(meta, expected))
    unused = sorted(set(cameras) - set(keys))
    if unused:
        logger.warning("%s: cameras %s are not in image_keys and not used", meta.root, unused)
    return Fields(str(vectors["state"]), vectors["action"], cameras)


def _fits(meta: LeRobotMeta, name: str | None, *, is_camera: bool) -> bool:
    return name in meta.features and (name in meta.cameras) is is_camera


def _table(meta: LeRobotMeta, expected: list[tuple[str, str | None, bool]]) -> str:
    rows = [("expected", "feature", "found")]
    hints = []
    for key, name, is_camera in expected:
        if _fits(meta, name, is_camera=is_camera):
            rows.append((key, str(name), _shape(meta, str(name))))
            continue
        kind = [n for n in meta.features if (n in meta.cameras) is is_camera]
        free = [n for n in kind if n not in [other for _, other, _ in expected]]
        near = difflib.get_close_matches(str(name), free, n=1, cutoff=0.0)
        rows.append((key, str(name), f"missing; closest: {near[0]}" if near else "missing"))
        hints += [f'"{key}": "{near[0]}"'] if near else []
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows]
    lines.append("  all features of the dataset:")
    lines += [f"    {name}  {_shape(meta, name)}" for name in meta.features]
    advice = f"columns={{{', '.join(hints)}}}" if hints else "fewer image_keys"
    return (
        f"{meta.root}: the registration and the dataset have different fields\n"
        + "\n".join(lines)
        + f"\nIf the closest is what you mean, register the dataset with {advice}"
    )


def _shape(meta: LeRobotMeta, name: str) -> str:
    return f"{meta.features[name].get('dtype')} {list(meta.features[name]['shape'])}"


def describe_lerobot(folder: "str | Path", columns: Columns | None = None) -> dict[str, Any]:
    """The fields of a registration, from a dataset's own metadata.

    Raises:
        DataError: the metadata is broken, or state or action have other names.
    """
    meta = read_meta(folder)
    fields = find_fields(meta, columns)
    used = {"state": fields.state, "action": fields.action}
    return {
        "jsonl_dir": str(folder),
        "image_dir": str(folder),
        "image_keys": list(fields.cameras),
        "image_prompts": [_label(key) for key in fields.cameras],
        "state_desc": _state_desc(meta, fields),
        "robot_type": meta.robot_type,
        "fps": meta.fps,
        "columns": {**used, **{k: n for k, n in fields.cameras.items() if k != n}},
    }


def _label(key: str) -> str:
    """``observation.images.left_wrist`` is the "Left wrist"."""
    words = re.sub(r"[_\-\s]+", " ", key.rsplit(".", 1)[-1]).strip()
    return words[:1].upper() + words[1:]


def _state_desc(meta: LeRobotMeta, fields: Fields) -> list[RobotStateDesc] | None:
    names = _flat_names(meta.features[fields.state].get("names"))
    sizes = {meta.size(name) for name in (fields.state, fields.action) if name}
    if sizes != {len(names)}:
        return None
    return [
        RobotStateDesc.GRIPPER if "gripper" in name.lower() else RobotStateDesc.JOINT
        for name in names
    ]


def _flat_names(names: Any) -> list[str]:
    """Names of the dimensions; recorders write a list, or lists by group."""
    if isinstance(names, str):
        return [names]
    if isinstance(names, dict):
        names = list(names.values())
    return [flat for name in names for flat in _flat_names(name)] if isinstance(names, list) else []
