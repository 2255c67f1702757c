"""Meta-World demonstrations that ``playground/collect_metaworld.py`` records, two cameras.

State: end-effector x, y, z in metres and gripper opening. Action: end-effector target x, y, z in
metres and gripper command. ``metaworld`` is one task, ``metaworld_five`` five of them. The folders
are relative to the working directory; ``--data-config.jsonl-dir`` and ``image-dir`` name others.
"""

from typing import Any

from opendm.constants.robot import ROBOT_STATE_DESCS, RobotType
from opendm.dataset.register import register_dataset


def _split(name: str, folder: str) -> dict[str, Any]:
    return {
        "jsonl_dir": f"data/{name}/{folder}",
        "image_dir": f"data/{name}/images",
        "image_keys": ["images_1", "images_2"],
        "image_prompts": ["Corner", "Gripper"],
        "state_desc": list(ROBOT_STATE_DESCS[RobotType.SAWYER]),
        "robot_type": RobotType.SAWYER.value,
    }


for _name in ("metaworld", "metaworld_five"):
    register_dataset({_name: _split(_name, "train"), f"{_name}_heldout": _split(_name, "heldout")})
