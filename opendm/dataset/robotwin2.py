"""RoboTwin 2.0: two-armed tasks of the Aloha platform in simulation, three cameras.

State and action: six joint angles in radians and a gripper, for the left and the right arm.
"""

from opendm.constants.robot import ROBOT_STATE_DESCS, RobotType
from opendm.dataset.register import register_dataset

register_dataset(
    {
        "robotwin2_generalist": {
            "jsonl_dir": "data/robotwin2/generalist",
            "image_dir": "data/robotwin2/generalist",
            "image_keys": ["images_1", "images_2", "images_3"],
            "image_prompts": ["Head", "Left wrist", "Right wrist"],
            "state_desc": list(ROBOT_STATE_DESCS[RobotType.ALOHA_ROBOTWIN2]),
            "robot_type": RobotType.ALOHA_ROBOTWIN2.value,
        }
    }
)
