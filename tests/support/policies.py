"""A tiny checkpoint that looks trained: layout, statistics and weights of a Sawyer."""

import numpy as np

from opendm.data.normalize import NormStats, NormStatsFile
from opendm.infer.layout import PolicyLayout
from opendm.model.dm05.tiny import build_tiny_checkpoint

CHUNK = 6
Q01, Q99 = np.array([-0.1, -0.2, -0.3, 0.0]), np.array([0.3, 0.2, 0.5, 1.0])


def make_layout(**changes):
    fields = {
        "dataset_name": "demo",
        "image_keys": ["images_1", "images_2"],
        "image_prompts": ["Corner", "Gripper"],
        "action_mode": "relative",
        "state_desc": ["eef", "eef", "eef", "gripper"],
        "robot_type": "Sawyer",
        "n_bins": 256,
        "add_state": True,
        "action_dim": 4,
        "chunk_size": CHUNK,
        "max_length": 256,
    }
    return PolicyLayout(**{**fields, **changes})


def save_stats(folder):
    state = NormStats(np.zeros(4), np.ones(4), np.array([-1.0, 0, 0, 0]), np.ones(4))
    action = NormStats(np.zeros(4), np.ones(4), Q01, Q99)
    NormStatsFile({"Sawyer": {"state": state, "action": action}}, "Sawyer").save(
        folder / "norm_stats.json"
    )


def make_checkpoint(folder):
    build_tiny_checkpoint(folder, ["Reach"])
    make_layout().save(folder)
    save_stats(folder)
    return folder


def link_checkpoint(source, folder, **changes):
    """The same checkpoint in another place, its layout changed."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "opendm.json":
            (folder / path.name).hardlink_to(path)
    make_layout(**changes).save(folder)
    return folder
