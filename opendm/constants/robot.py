"""Robots, what each state dimension means, and the reserved tokens of history frames."""

from enum import Enum
from typing import Final


class ActionMode(Enum):
    """What an action chunk is learnt as."""

    ABSOLUTE = "absolute"
    RELATIVE = "relative"


class RobotStateDesc(Enum):
    """What one dimension of a state or action vector is."""

    JOINT = "joint"
    EEF = "eef"
    GRIPPER = "gripper"


def desc_value(desc: "RobotStateDesc | str") -> str:
    """The word for a dimension, from the enum or as written."""
    return desc.value if isinstance(desc, RobotStateDesc) else str(desc)


class RobotType(Enum):
    """Names of robots as they stand in prompts and statistics files."""

    DOS_W1 = "DOS W1"
    FRANKA = "Franka"
    ALOHA = "Aloha"
    ALOHA_ROBOTWIN2 = "Aloha RoboTwin2"
    SO101 = "SO101"
    ARX5 = "ARX5"
    UR5 = "UR5"
    SAWYER = "Sawyer"


def _arms(count: int, desc: RobotStateDesc, size: int) -> tuple[RobotStateDesc, ...]:
    return ((desc,) * size + (RobotStateDesc.GRIPPER,)) * count


ROBOT_STATE_DESCS: Final[dict[RobotType, tuple[RobotStateDesc, ...]]] = {
    RobotType.DOS_W1: _arms(2, RobotStateDesc.JOINT, 6),
    RobotType.ALOHA: _arms(2, RobotStateDesc.JOINT, 6),
    RobotType.ALOHA_ROBOTWIN2: _arms(2, RobotStateDesc.JOINT, 6),
    RobotType.SO101: _arms(1, RobotStateDesc.JOINT, 5),
    RobotType.ARX5: _arms(1, RobotStateDesc.JOINT, 6),
    RobotType.UR5: _arms(1, RobotStateDesc.EEF, 6),
    RobotType.SAWYER: _arms(1, RobotStateDesc.EEF, 3),
}

MAX_ACTION_DIM: Final = 32
"""Width of the action vector of every released model."""

HISTORY_TOKENS_PER_IMAGE: Final = 16
"""One history frame is pooled to a 4 x 4 grid of tokens."""

HISTORY_TOKEN: Final = "<unused0>"
HISTORY_TOKEN_ID: Final = 6
HISTORY_PAD_TOKEN: Final = "<unused1>"
HISTORY_PAD_TOKEN_ID: Final = 7
