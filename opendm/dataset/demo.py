"""The demonstrations shipped in ``assets/demo``: three Meta-World tasks, two cameras.

State: end-effector x, y, z in metres and gripper opening. Action: end-effector target x, y, z in
metres and gripper command. ``demo_heldout`` holds episodes that no training reads; ``demo_mem`` is
``demo`` with its frame rate, for policies that see earlier frames.
"""

from pathlib import Path
from typing import Any

from opendm.constants.robot import ROBOT_STATE_DESCS, RobotType
from opendm.dataset.register import register_dataset

ROOT = Path(__file__).parents[2] / "assets" / "demo"


def _split(folder: str) -> dict[str, Any]:
    return {
        "jsonl_dir": str(ROOT / folder),
        "image_dir": str(ROOT / "images"),
        "image_keys": ["images_1", "images_2"],
        "image_prompts": ["Corner", "Gripper"],
        "state_desc": list(ROBOT_STATE_DESCS[RobotType.SAWYER]),
        "robot_type": RobotType.SAWYER.value,
    }


register_dataset(
    {
        "demo": _split("train"),
        "demo_heldout": _split("heldout"),
        "demo_mem": {**_split("train"), "fps": 80},
    }
)
