"""The training samples of a JSONL set, as a competent user of the public framework writes them.

Its behaviour is the public one: a frame is found in its episode's
file, the lines of the horizon are parsed with ``json``, pictures are Pillow's, augmentation is
torchvision's, and the checkpoint's processor makes the prompt and the pixels. Two things are better
than in the public framework: the lines of the last files are kept, and rows are padded to the
longest of the batch.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

ACTION_DIM: Final = 32
PAD_MULTIPLE: Final = 16

Sample = dict[str, Any]


class PadToSquare(torch.nn.Module):
    """Black bars around a picture that is not square."""

    def forward(self, image: Image.Image) -> Image.Image:
        width, height = image.size
        if width == height:
            return image
        side = max(width, height)
        square = Image.new("RGB", (side, side))
        square.paste(image, ((side - width) // 2, (side - height) // 2))
        return square


def training_pipeline(size: int, p: float = 0.5) -> v2.Compose:
    crop = v2.RandomResizedCrop((size, size), scale=(0.95, 0.95), ratio=(1.0, 1.0))
    jitter = v2.ColorJitter(brightness=0.3, contrast=0.4, saturation=0.3)
    return v2.Compose([
        PadToSquare(),
        v2.Resize((size, size)),
        v2.RandomApply([crop], p=p),
        v2.RandomApply([v2.RandomRotation(2.0)], p=p),
        v2.RandomApply([jitter], p=p),
    ])  # fmt: skip


class PlainFrames(torch.utils.data.Dataset):
    """States and action chunks.

    Args:
        folder: of the episodes, one JSONL file each.
        gripper: dimensions that are absolute.
        horizon: steps of a chunk.
        kept_files: files whose lines are kept in a process; 0 reads the file for every sample.
    """

    def __init__(self, folder: Path, gripper: Sequence[int], horizon: int, kept_files: int) -> None:
        self.paths = sorted(folder.glob("*.jsonl"))
        self.horizon, self.kept_files = horizon, kept_files
        self.gripper = list(gripper)
        self.kept: OrderedDict[Path, list[str]] = OrderedDict()
        self.frames = [
            (path, frame) for path in self.paths for frame in range(len(self.read(path)))
        ]

    def __len__(self) -> int:
        return len(self.frames)

    def read(self, path: Path) -> list[str]:
        with path.open(encoding="utf-8") as file:
            return file.readlines()

    def lines(self, path: Path) -> list[str]:
        if not self.kept_files:
            return self.read(path)
        if path not in self.kept:
            self.kept[path] = self.read(path)
            if len(self.kept) > self.kept_files:
                self.kept.popitem(last=False)
        self.kept.move_to_end(path)
        return self.kept[path]

    def __getitem__(self, index: int) -> Sample:
        path, frame = self.frames[index]
        lines = self.lines(path)
        records = [json.loads(line) for line in lines[frame : frame + self.horizon]]
        state = np.array(records[0]["state"])
        action = np.array([record["action"] for record in records])
        missing = self.horizon - len(action)
        mask = np.ones((self.horizon, action.shape[1]), bool)
        if missing:
            action = np.concatenate([action, np.repeat(action[-1:], missing, axis=0)])
            mask[-missing:] = False
        start = state.copy()
        start[self.gripper] = 0
        return {
            **records[0],
            "state": state.astype(np.float32),
            "action": (action - start).astype(np.float32),
            "action_mask": mask,
        }


class PlainSamples(torch.utils.data.Dataset):
    """The model's inputs of a frame."""

    def __init__(
        self,
        frames: PlainFrames,
        *,
        image_dir: Path,
        cameras: Sequence[tuple[str, str]],
        stats: dict[str, dict[str, list[float]]],
        processor: Any,
        robot_type: str,
    ) -> None:
        self.frames, self.image_dir, self.cameras = frames, image_dir, cameras
        self.q01 = {key: np.array(stats[key]["q01"]) for key in stats}
        self.q99 = {key: np.array(stats[key]["q99"]) for key in stats}
        self.processor, self.robot_type = processor, robot_type
        self.augment = training_pipeline(processor.image_processor.size["height"])

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> Sample:
        sample = self.frames[index]
        images = [self.augment(self.load(sample[key]["url"])) for key, _ in self.cameras]
        state, action = self.normalize(sample, "state"), self.normalize(sample, "action")
        inputs = self.processor.apply_chat_template(
            self.messages(sample["prompt"], images, state),
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        padding = [(0, 0), (0, ACTION_DIM - action.shape[1])]
        return {
            "input_ids": inputs["input_ids"][0],
            "attention_mask": inputs["attention_mask"][0],
            "token_type_ids": inputs["token_type_ids"][0],
            "pixel_values": inputs["pixel_values"],
            "action": torch.from_numpy(np.pad(action, padding)),
            "action_mask": torch.from_numpy(np.pad(sample["action_mask"], padding)),
        }

    def load(self, url: str) -> Image.Image:
        with Image.open(self.image_dir / url.lstrip("./")) as image:
            return image.convert("RGB")

    def normalize(self, sample: Sample, key: str) -> np.ndarray:
        low, high = self.q01[key], self.q99[key]
        values = np.clip(sample[key].astype(np.float64), low, high)
        return ((values - low) / (high - low + 1e-6) * 2.0 - 1.0).astype(np.float32)

    def messages(self, task: str, images: list[Image.Image], state: np.ndarray) -> list[Sample]:
        text = f"Robot: {self.robot_type}\nOverall speed: 0.5\nTask: {task}.\n"
        content: list[Sample] = []
        for image, (_, label) in zip(images, self.cameras, strict=True):
            content.append({"type": "text", "text": f"{text}{label} image: "})
            content.append({"type": "image", "image": image})
            text = ""
        scaled = (np.clip(state, -1, 1) + np.float32(1)) / np.float32(2) * np.float32(255)
        bins = " ".join(str(int(value)) for value in np.floor(scaled))
        content.append({"type": "text", "text": f"States: {bins}"})
        return [{"role": "user", "content": content}]


def collate(samples: list[Sample]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    length = -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE
    batch = {
        key: torch.stack([
            torch.nn.functional.pad(sample[key], (0, length - len(sample[key])))
            for sample in samples
        ])
        for key in ("input_ids", "attention_mask", "token_type_ids")
    }  # fmt: skip
    batch["pixel_values"] = torch.cat([sample["pixel_values"] for sample in samples])
    for key in ("action", "action_mask"):
        batch[key] = torch.stack([sample[key] for sample in samples])
    return batch
