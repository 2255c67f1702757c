"""What a policy must know of training to run it backwards: the content of ``opendm.json``."""

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
        ConfigError: datasets of one robot type show it in different ways.
        DataError: the statistics do not have the action.
    """
    data = exp.data_config
    statistics = NormStatsFile.load(stats_path)
    robots: dict[str | None, dict[str, Any]] = {}
    parts: dict[str | None, DM05DataConfig] = {}
    for part in data.parts():
        info = part._dataset_info()  # noqa: SLF001 - the public hook of data configurations
        robot = info.get("robot_type")
        fields = _robot_fields(part, info, statistics)
        if robots.setdefault(robot, fields) != fields:
            raise ConfigError(
                f"datasets {parts[robot].dataset_name!r} and {part.dataset_name!r} have robot type "
                f"{robot!r}, but not the same cameras, labels, action mode and state: "
                f"{robots[robot]} and {fields}; give them robot types of their own"
            )
        parts.setdefault(robot, part)
    default = statistics.default_robot_type if len(robots) > 1 else next(iter(robots))
    chosen = parts[default]
    info = chosen._dataset_info()  # noqa: SLF001
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


def _robot_fields(
    part: "DM05DataConfig", info: dict[str, Any], statistics: NormStatsFile
) -> dict[str, Any]:
    profile = statistics.select(info.get("robot_type"))
    if "action" not in profile:
        raise DataError(f"the statistics of {part.dataset_name!r} do not have the action")
    desc = info.get("state_desc")
    return {
        "image_keys": list(info["image_keys"]),
        "image_prompts": list(info["image_prompts"]),
        "action_mode": part.action_mode.value,
        "state_desc": None if desc is None else [desc_value(word) for word in desc],
        "angle_dims": list(info["angle_dims"]) if info.get("angle_dims") else None,
        "action_dim": len(profile["action"].mean),
    }
