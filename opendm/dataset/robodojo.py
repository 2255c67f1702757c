"""RoboDojo in simulation: covering blocks with the two-armed Aloha, three cameras, 25 Hz.

The rate is part of the registration because the preset shows the policy earlier frames.
"""

from opendm.constants.robot import ROBOT_STATE_DESCS, RobotType
from opendm.dataset.register import register_dataset

register_dataset(
    {
        "robodojo_sim_cover_blocks": {
            "jsonl_dir": "data/robodojo/sim_cover_blocks",
            "image_dir": "data/robodojo/sim_cover_blocks",
            "image_keys": ["images_1", "images_2", "images_3"],
            "image_prompts": ["Head", "Left wrist", "Right wrist"],
            "state_desc": list(ROBOT_STATE_DESCS[RobotType.ALOHA]),
            "robot_type": RobotType.ALOHA.value,
            "fps": 25,
        }
    }
)
