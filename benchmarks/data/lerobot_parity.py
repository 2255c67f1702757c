"""A v3.0 dataset written by the ``lerobot`` package: the same samples, and the time of each reader.

Needs an environment where ``lerobot`` (0.4.4 was used) and OpenDM can both be imported.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from opendm.data.dataset import JsonlDataset
from opendm.data.lerobot_fields import describe_lerobot
from opendm.data.transforms import LoadImages

CAMERAS: Final = ("observation.images.top", "observation.images.wrist")
LENGTHS: Final = (40, 25, 33, 61)
TASKS: Final = ("pick up the cup", "open the drawer")
FPS: Final = 30


def write_dataset(root: Path, height: int, width: int, *, use_videos: bool) -> None:
    rng = np.random.default_rng(0)
    kind = "video" if use_videos else "image"
    camera = {"dtype": kind, "shape": (height, width, 3), "names": ["height", "width", "channels"]}
    vector = {"dtype": "float32", "shape": (4,), "names": ["waist", "shoulder", "elbow", "gripper"]}
    features = {"observation.state": vector, "action": vector, **dict.fromkeys(CAMERAS, camera)}
    dataset = LeRobotDataset.create("local/parity", FPS, features, root, "so101", use_videos)
    for episode, length in enumerate(LENGTHS):
        scene = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        scene = scene.repeat(8, axis=0).repeat(8, axis=1)
        for frame in range(length):
            dataset.add_frame({
                "observation.state": rng.normal(size=4).astype(np.float32),
                "action": rng.normal(size=4).astype(np.float32),
                CAMERAS[0]: np.roll(scene, 3 * frame, axis=1),
                CAMERAS[1]: np.roll(scene, 5 * frame, axis=0),
                "task": TASKS[(episode + frame // 20) % 2],
            })  # fmt: skip
        dataset.save_episode()
    dataset.finalize()


def largest_differences(ours: JsonlDataset, theirs: LeRobotDataset) -> dict[str, float]:
    """Largest difference of any frame; pictures in steps of 1/255."""
    largest = dict.fromkeys(("state", "action", "task", "picture"), 0.0)
    for index in range(len(theirs)):
        mine, other = ours[index], theirs[index]
        pairs = [
            ("state", mine["state"], other["observation.state"].numpy()),
            ("action", mine["action"], other["action"].numpy()),
        ]
        for picture, camera in zip(mine["images"], CAMERAS, strict=True):
            pixels = (other[camera] * 255).round().permute(1, 2, 0).numpy()
            pairs.append(("picture", np.asarray(picture), pixels))
        for name, left, right in pairs:
            distance = np.abs(np.asarray(left, np.float64) - right.astype(np.float64)).max()
            largest[name] = max(largest[name], float(distance))
        largest["task"] = max(largest["task"], float(mine["prompt"] != other["task"]))
    return largest


def seconds_per_sample(read: Callable[[int], Any], order: list[int]) -> float:
    start = time.perf_counter()
    for index in order:
        read(index)
    return (time.perf_counter() - start) / len(order)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--height", type=int, default=240)
    parser.add_argument("--width", type=int, default=320)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for use_videos in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "set"
            write_dataset(root, options.height, options.width, use_videos=use_videos)
            theirs = LeRobotDataset("local/parity", root=root)
            fields = describe_lerobot(root)
            load = LoadImages(fields["image_keys"], str(root))
            ours = JsonlDataset(str(root), load, dataset_meta=fields)
            kind = "videos" if use_videos else "pictures in parquet"
            print(f"{kind}: {len(ours)} frames, lerobot {len(theirs)}")
            print("largest difference:", largest_differences(ours, theirs))
            order = torch.randperm(len(ours)).tolist()
            readers = {"opendm": ours.__getitem__, "lerobot": theirs.__getitem__}
            best = dict.fromkeys(readers, float("inf"))
            for _, (name, read) in itertools.product(range(3), readers.items()):
                best[name] = min(best[name], seconds_per_sample(read, order))
            text = ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in best.items())
            ratio = best["lerobot"] / best["opendm"]
            print(f"a random sample, two cameras: {text}; ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
