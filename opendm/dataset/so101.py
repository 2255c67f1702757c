"""SO101: a five-joint arm with a gripper picks up a cube, two cameras."""

from opendm.constants.robot import ROBOT_STATE_DESCS, RobotType
from opendm.dataset.register import register_dataset

register_dataset(
    {
        "so101_pick_cube": {
            "jsonl_dir": "data/so101/pick_cube",
            "image_dir": "data/so101/pick_cube",
            "image_keys": ["images_1", "images_2"],
            "image_prompts": ["Front", "Wrist"],
            "state_desc": list(ROBOT_STATE_DESCS[RobotType.SO101]),
            "robot_type": RobotType.SO101.value,
        }
    }
)
