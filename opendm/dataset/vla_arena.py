"""VLA-Arena: Franka tasks in end-effector space, two cameras.

State and action: x, y, z, three rotation values and a gripper.
"""

from opendm.constants.robot import RobotStateDesc, RobotType
from opendm.dataset.register import register_dataset

register_dataset(
    {
        "vla_arena_eef_L0_L": {
            "jsonl_dir": "data/vla_arena/eef_L0_L",
            "image_dir": "data/vla_arena/eef_L0_L",
            "image_keys": ["images_1", "images_2"],
            "image_prompts": ["Front", "Wrist"],
            "state_desc": [RobotStateDesc.EEF.value] * 6 + [RobotStateDesc.GRIPPER.value],
            "robot_type": RobotType.FRANKA.value,
        }
    }
)
