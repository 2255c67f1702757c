"""Meta-World demonstrations that ``playground/collect_metaworld.py`` records, two cameras.

State: end-effector x, y, z in metres and gripper opening. Action: end-effector target x, y, z in
metres and gripper command. The folders are relative to the working directory;
``--data-config.jsonl-dir`` and ``image-dir`` name others.
"""

from typing import Any

from opendm.constants.robot import ROBOT_STATE_DESCS, RobotType
from opendm.dataset.register import register_dataset


def _split(folder: str) -> dict[str, Any]:
    return {
        "jsonl_dir": f"data/metaworld/{folder}",
        "image_dir": "data/metaworld/images",
        "image_keys": ["images_1", "images_2"],
        "image_prompts": ["Corner", "Gripper"],
        "state_desc": list(ROBOT_STATE_DESCS[RobotType.SAWYER]),
        "robot_type": RobotType.SAWYER.value,
    }


register_dataset({"metaworld": _split("train"), "metaworld_heldout": _split("heldout")})
