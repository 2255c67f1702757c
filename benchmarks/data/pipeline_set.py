"""The set of ``pipeline.py``: one walk of a robot, cut into episodes of several lengths."""

import io
import json
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from opendm.data.augmentations import TrainingTransformPipeline
from opendm.data.dataset import JsonlDataset
from opendm.data.formats import open_source
from opendm.data.transforms import (
    BuildAction,
    ChatTokenization,
    LoadImages,
    Normalize,
    PadAction,
    Pipeline,
    PixelTransform,
)

DIMS: Final = 14
HORIZON: Final = 50
IMAGE_SIZE: Final = 448
CAMERAS: Final = (("images_1", "Head"), ("images_2", "Left wrist"))
ROBOT: Final = "Aloha"
DESC: Final = (*("joint",) * 6, "gripper") * 2
GRIPPER: Final = tuple(i for i, name in enumerate(DESC) if name == "gripper")
TASKS: Final = (
    "put the red cube into the box", "open the drawer", "fold the towel twice", "close the lid",
    "stack the bowls and move them to the left of the plate",
)  # fmt: skip
NUM_JPEGS: Final = 64
"""Different pictures; all others are links to them."""


def jpeg(rng: np.random.Generator) -> bytes:
    """A smooth 640 x 480 scene with a camera's noise."""
    coarse = Image.fromarray(rng.integers(0, 256, (60, 80, 3), dtype=np.uint8))
    scene = np.asarray(coarse.resize((640, 480), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = (scene + rng.integers(-8, 9, scene.shape)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=85)
    return file.getvalue()


def write_pictures(folder: Path, num_frames: int) -> int:
    """``images/<camera>/<frame>.jpg``; the mean number of bytes."""
    rng = np.random.default_rng(0)
    originals = []
    for number in range(NUM_JPEGS):
        originals.append(folder / f"original_{number}.jpg")
        originals[-1].write_bytes(jpeg(rng))
    for camera, _ in CAMERAS:
        (folder / "images" / camera).mkdir(parents=True)
    for frame in range(num_frames):
        for number, (camera, _) in enumerate(CAMERAS):
            source = originals[(3 * frame + number) % NUM_JPEGS]
            os.link(source, folder / f"images/{camera}/{frame:06d}.jpg")
    return sum(path.stat().st_size for path in originals) // NUM_JPEGS


def write_episodes(folder: Path, num_frames: int, length: int) -> None:
    """One file per ``length`` frames; the frames are the same for every length."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)
    state = rng.normal(0, 0.02, (num_frames, DIMS)).cumsum(axis=0).round(6) % 3
    action = (state + rng.normal(0, 0.01, state.shape)).round(6)
    for first in range(0, num_frames, length):
        lines = []
        for frame in range(first, min(first + length, num_frames)):
            records = ", ".join(
                f'"{camera}": {{"type": "image", "url": "./images/{camera}/{frame:06d}.jpg"}}'
                for camera, _ in CAMERAS
            )
            lines.append(
                f'{{{records}, "state": {state[frame].tolist()}, '
                f'"action": {action[frame].tolist()}, '
                f'"prompt": "{TASKS[frame // 100 % len(TASKS)]}", "is_robot": true}}\n'
            )
        (folder / f"episode_{first:06d}.jsonl").write_text("".join(lines))


def write_statistics(path: Path) -> None:
    """A statistics file for one robot."""
    stats = statistics()
    content = {
        "default_robot_type": ROBOT,
        "norm_stats": stats,
        "norm_stats_by_robot": {ROBOT: stats},
    }
    path.write_text(json.dumps(content))


def statistics() -> dict[str, dict[str, list[float]]]:
    """Quantiles that some values lie outside of; their exactness is not what is measured here."""
    state = {"q01": [0.05] * DIMS, "q99": [2.9] * DIMS, "mean": [1.5] * DIMS, "std": [1.0] * DIMS}
    low = [0.05 if i in GRIPPER else -0.3 for i in range(DIMS)]
    high = [2.9 if i in GRIPPER else 0.3 for i in range(DIMS)]
    action = {"q01": low, "q99": high, "mean": [0.0] * DIMS, "std": [1.0] * DIMS}
    return {"state": state, "action": action}


def transforms(root: Path, processor: Any) -> Pipeline:
    """The training transforms of ``DM05DataConfig.build_transforms``."""
    keys, labels = zip(*CAMERAS, strict=True)
    return Pipeline([
        BuildAction(HORIZON),
        LoadImages(keys, str(root)),
        PixelTransform(TrainingTransformPipeline(IMAGE_SIZE)),
        Normalize(root / "stats.json", ("state", "action")),
        ChatTokenization(processor, image_prompts=labels, as_bytes=True),
        PadAction(),
    ])  # fmt: skip


def our_dataset(root: Path, length: int, steps: Any) -> JsonlDataset:
    """The set with episodes of ``length`` frames, its index below ``root``."""
    folder = root / f"episodes_{length}"
    source = open_source(folder, index_root=root / "index")
    meta = {"state_desc": DESC, "robot_type": ROBOT}
    return JsonlDataset(str(folder), steps, dataset_meta=meta, source=source)
