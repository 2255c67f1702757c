"""LIBERO: four suites of table-top tasks with a Franka arm, two cameras.

State: six joint-like values and two finger positions. Action: end-effector displacement and gripper
command as recorded, so the presets learn them as they are (ABSOLUTE). The folders are relative to
the working directory; ``--data-config.jsonl-dir`` and ``image-dir`` name others.
"""

from opendm.constants.robot import RobotStateDesc
from opendm.dataset.register import register_dataset

STATE = [RobotStateDesc.JOINT.value] * 6 + [RobotStateDesc.GRIPPER.value] * 2

register_dataset(
    {
        subset: {
            "jsonl_dir": f"data/libero/{subset}",
            "image_dir": f"data/libero/{subset}",
            "image_keys": ["images_1", "images_2"],
            "image_prompts": ["Front", "Wrist"],
            "state_desc": STATE,
        }
        for subset in ("goal", "10", "spatial", "object", "pi0_all", "oft_all")
    },
    prefix="libero",
)
