"""``opendm.json``: what a checkpoint folder says about its robot, cameras and prompt."""

import json
import types
from collections.abc import Collection
from dataclasses import MISSING, asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, get_args, get_origin

from opendm.constants.robot import ROBOT_STATE_DESCS, ActionMode, RobotType, desc_value
from opendm.errors import CheckpointError, DataError

LAYOUT_FILE: Final = "opendm.json"
FORMAT_VERSION: Final = 1
ROBOT_FIELDS: Final = (
    "image_keys", "image_prompts", "action_mode", "state_desc", "angle_dims", "action_dim",
)  # fmt: skip
"""What may differ between the robots of one checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLayout:
    """What training did to its samples, so that inference can do the same."""

    dataset_name: str
    image_keys: list[str]
    """Cameras in the order of the prompt."""
    image_prompts: list[str]
    """Their labels in the prompt."""
    action_mode: str
    """``relative`` (to the state) or ``absolute``."""
    n_bins: int
    """Bins of a state value in the prompt."""
    add_state: bool
    action_dim: int
    """Dimensions of the robot's action, before padding."""
    chunk_size: int
    max_length: int
    state_desc: list[str] | None = None
    """``joint``, ``eef`` or ``gripper`` per dimension."""
    angle_dims: list[int] | None = None
    """Dimensions in radians whose differences go the short way round the circle."""
    robot_type: str | None = None
    speed: str | None = None
    control_mode: str | None = None
    prompt_layout: int = 1
    """Version of the prompt's format; other versions give other tokens."""
    is_history: bool = False
    """Whether the prompt has slots for earlier pictures of the first camera."""
    max_history_images: int = 32
    """Their number."""
    robots: dict[str, dict[str, Any]] | None = None
    """By robot type, the :data:`ROBOT_FIELDS` that differ; None for a checkpoint of one robot."""
    format_version: int = FORMAT_VERSION

    def for_robot(self, robot_type: str | None) -> "PolicyLayout":
        """This layout as it holds for one robot; None means the checkpoint's own.

        A checkpoint without a table of robots serves its own robot, and others whose state is
        known to have as many dimensions.

        Raises:
            DataError: the robot type is unknown; the message lists those that are known.
        """
        if robot_type is None or robot_type == self.robot_type:
            robot_type = self.robot_type
            own = (self.robots or {}).get(robot_type or "", {})
            return replace(self, **own) if own else self
        if robot_type in self.robot_types():
            if self.robots is not None:
                return replace(self, robot_type=robot_type, **self.robots[robot_type])
            desc = [desc_value(part) for part in ROBOT_STATE_DESCS[RobotType(robot_type)]]
            return replace(self, robot_type=robot_type, state_desc=desc)
        raise DataError(
            f"robot_type {robot_type!r:.60} is unknown to this checkpoint; allowed: "
            f"{self.robot_types()}"
        )

    def robot_types(self) -> list[str]:
        """Robot types that :meth:`for_robot` takes, sorted."""
        names = set() if self.robot_type is None else {self.robot_type}
        if self.robots is not None:
            return sorted(names | set(self.robots))
        same = {r.value for r, desc in ROBOT_STATE_DESCS.items() if len(desc) == self.action_dim}
        return sorted(names | same)

    def save(self, folder: "str | PathLike[str]") -> None:
        """Write ``opendm.json`` into ``folder``."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        (Path(folder) / LAYOUT_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: "str | PathLike[str]") -> "PolicyLayout":
        """Read the ``opendm.json`` of ``folder``, or the file itself; unknown keys are left out.

        Raises:
            CheckpointError: the file is missing or broken; the message names file and key.
        """
        path = layout_path(Path(folder))
        values = _read_object(path)
        version = values.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version is {version!r}; this OpenDM reads {FORMAT_VERSION}"
            )
        known = {}
        for field in fields(cls):
            if field.name in values:
                _check_type(path, field.name, values[field.name], field.type)
                known[field.name] = values[field.name]
            elif field.default is MISSING:
                raise CheckpointError(f"{path}: key {field.name!r} is missing")
        layout = cls(**known)
        _check_values(path, layout)
        for robot, changes in (layout.robots or {}).items():
            _check_robot(path, robot, changes)
            _check_values(path, replace(layout, **changes))
        return layout


def layout_path(source: Path) -> Path:
    """The ``opendm.json`` of a folder; a file is one itself."""
    return source if source.is_file() else source / LAYOUT_FILE


def check_words(layout: PolicyLayout, reserved: Collection[str], where: str) -> None:
    """Refuse words of the prompt that a tokenizer would read as something else.

    Args:
        layout: whose cameras' labels, speed, control mode and robots are looked at.
        reserved: texts of the tokenizer's special tokens.
        where: the file, for the message.

    Raises:
        CheckpointError: a word holds a reserved token; the message names the file and the key.
    """
    words: list[tuple[str, str | None]] = [
        (key, getattr(layout, key)) for key in ("robot_type", "speed", "control_mode")
    ]
    words += [(f"image_prompts[{i}]", label) for i, label in enumerate(layout.image_prompts)]
    for robot, changes in (layout.robots or {}).items():
        words.append(("robots", robot))
        labels = changes.get("image_prompts", [])
        words += [(f"robots[{robot}].image_prompts[{i}]", one) for i, one in enumerate(labels)]
    for key, word in words:
        found = sorted(token for token in reserved if word is not None and token in word)
        if found:
            raise CheckpointError(
                f"{where}: key {key!r} holds the reserved token {found[0]!r}; write another word"
            )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; checkpoints of OpenDM's training have one, and a base "
            "checkpoint must be trained before it can act"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}; expected a JSON object")
    return values


def _check_type(path: Path, key: str, value: Any, expected: Any) -> None:
    if not _fits(value, expected):
        wanted = expected.__name__ if isinstance(expected, type) else str(expected)
        raise CheckpointError(f"{path}: key {key!r} is {value!r:.60}; expected {wanted}")


def _fits(value: Any, expected: Any) -> bool:
    if get_origin(expected) is types.UnionType:
        return any(_fits(value, option) for option in get_args(expected))
    if get_origin(expected) is list:
        (item,) = get_args(expected)
        return isinstance(value, list) and all(_fits(one, item) for one in value)
    if get_origin(expected) is dict:
        _, item = get_args(expected)
        return isinstance(value, dict) and all(_fits(one, item) for one in value.values())
    if expected is Any:
        return True
    return isinstance(value, expected) and (expected is bool or not isinstance(value, bool))


def _check_values(path: Path, layout: PolicyLayout) -> None:
    modes = [mode.value for mode in ActionMode]
    if layout.action_mode not in modes:
        raise CheckpointError(
            f"{path}: key 'action_mode' is {layout.action_mode!r}; allowed: {', '.join(modes)}"
        )
    if len(layout.image_keys) != len(layout.image_prompts):
        raise CheckpointError(
            f"{path}: key 'image_prompts' has {len(layout.image_prompts)} labels for "
            f"{len(layout.image_keys)} image_keys"
        )
    for key in ("n_bins", "action_dim", "chunk_size", "max_length", "max_history_images"):
        if getattr(layout, key) < 1:
            raise CheckpointError(f"{path}: key {key!r} is {getattr(layout, key)}; expected >= 1")


def _check_robot(path: Path, robot: str, changes: dict[str, Any]) -> None:
    kinds = {field.name: field.type for field in fields(PolicyLayout)}
    for key, value in changes.items():
        if key not in ROBOT_FIELDS:
            raise CheckpointError(
                f"{path}: key 'robots[{robot!r}].{key}' is unknown; allowed: "
                f"{', '.join(ROBOT_FIELDS)}"
            )
        _check_type(path, f"robots[{robot}].{key}", value, kinds[key])
