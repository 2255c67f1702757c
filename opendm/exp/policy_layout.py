"""What a policy must know of training to run it backwards: the content of ``opendm.json``."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opendm.constants.robot import desc_value
from opendm.data.normalize import NormStatsFile
from opendm.data.transforms.prompt import PROMPT_LAYOUT_VERSION
from opendm.errors import ConfigError, DataError
from opendm.infer.layout import PolicyLayout

if TYPE_CHECKING:
    from opendm.data.config import DM05DataConfig
    from opendm.exp.dm05_exp import DM05Exp


def policy_layout(exp: "DM05Exp", stats_path: Path) -> PolicyLayout:
    """The layout of a run's checkpoints, with one entry per robot where there are several.

    Raises:
        ConfigError: datasets of one robot type show it in different ways, or the statistics have
            no robot type for requests without one.
        DataError: the statistics do not have the action.
    """
    data = exp.data_config
    statistics = NormStatsFile.load(stats_path)
    parts = robot_parts(data)
    robots = {
        robot: {**_robot_fields(part), "action_dim": _action_dim(part, robot, statistics)}
        for robot, part in parts.items()
    }
    default = _default_robot(parts, statistics, stats_path)
    chosen = parts[default]
    info = chosen._dataset_info()  # noqa: SLF001 - the public hook of data configurations
    return PolicyLayout(
        dataset_name=chosen.dataset_name,
        **robots[default],
        robot_type=default,
        speed=info.get("speed"),
        control_mode=info.get("control_mode"),
        n_bins=data.n_bins,
        add_state=data.add_state,
        chunk_size=exp.model_config.chunk_size,
        max_length=exp.trainer_config.model_max_length,
        is_history=data.is_history,
        prompt_layout=PROMPT_LAYOUT_VERSION,
        robots={str(robot): entry for robot, entry in robots.items()} if len(robots) > 1 else None,
    )


def robot_parts(data: "DM05DataConfig") -> "dict[str | None, DM05DataConfig]":
    """The first dataset of each robot type, which stands for all of that type.

    Raises:
        ConfigError: datasets of one robot type show it in different ways.
    """
    parts: dict[str | None, DM05DataConfig] = {}
    for part in data.parts():
        robot = part._dataset_info().get("robot_type")  # noqa: SLF001 - the public hook
        first, fields = parts.setdefault(robot, part), _robot_fields(part)
        if _robot_fields(first) != fields:
            raise ConfigError(
                f"datasets {first.dataset_name!r} and {part.dataset_name!r} have robot type "
                f"{robot!r}, but not the same cameras, labels, action mode and state: "
                f"{_robot_fields(first)} and {fields}; give them robot types of their own"
            )
    return parts


def _default_robot(
    parts: "Mapping[str | None, DM05DataConfig]", statistics: NormStatsFile, path: Path
) -> str | None:
    if len(parts) == 1:
        return next(iter(parts))
    default = statistics.default_robot_type
    if default not in parts:
        said = "do not name a robot type" if default is None else f"stand for {default!r}"
        raise ConfigError(
            f"statistics {path} {said}, and the datasets have {sorted(map(str, parts))}; leave "
            "--data-config.norm-stats-file out, and statistics of each robot are computed, or give "
            "a file with one of these as default_robot_type"
        )
    return default


def _robot_fields(part: "DM05DataConfig") -> dict[str, Any]:
    info = part._dataset_info()  # noqa: SLF001
    desc = info.get("state_desc")
    return {
        "image_keys": list(info["image_keys"]),
        "image_prompts": list(info["image_prompts"]),
        "action_mode": part.action_mode.value,
        "state_desc": None if desc is None else [desc_value(word) for word in desc],
        "angle_dims": list(info["angle_dims"]) if info.get("angle_dims") else None,
    }


def _action_dim(part: "DM05DataConfig", robot: str | None, statistics: NormStatsFile) -> int:
    profile = statistics.select(robot)
    if "action" not in profile:
        raise DataError(f"the statistics of {part.dataset_name!r} do not have the action")
    return len(profile["action"].mean)
