"""Episodes that a policy has not seen: their frames, and what it does on them."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from opendm.constants.robot import ActionMode
from opendm.data.dataset import JsonlDataset, Sample
from opendm.data.formats import dataset_info
from opendm.data.norm_stats_job import robot_name
from opendm.data.transforms.actions import BuildAction
from opendm.data.transforms.images import LoadImages
from opendm.data.transforms.pipeline import Pipeline
from opendm.errors import DataError
from opendm.eval.action_errors import name_dimensions
from opendm.eval.report import EpisodeView
from opendm.infer.layout import PolicyLayout
from opendm.infer.policy import Observation, Policy

FRAMES_SHOWN: Final = 6


@dataclass(frozen=True, eq=False)
class HeldOut:
    """A dataset with absolute targets and loaded pictures, and how to act on it."""

    dataset: JsonlDataset
    layout: PolicyLayout
    starts: list[int] = field(default_factory=list)
    """Index of each episode's first sample."""

    @classmethod
    def open(cls, name: str, layout: PolicyLayout) -> "HeldOut":
        """Open a registered dataset for a policy; of several robots it acts as the dataset's.

        Raises:
            DataError: its cameras are not the policy's, or the policy does not know its robot.
        """
        fields = dataset_info(name)
        if layout.robots is not None:
            layout = layout.for_robot(robot_name(fields.get("robot_type")))
        missing = [key for key in layout.image_keys if key not in fields["image_keys"]]
        if missing:
            raise DataError(
                f"dataset {name!r} has no camera {missing[0]!r}, which the policy needs; it has "
                f"{fields['image_keys']}"
            )
        transforms = Pipeline(
            [
                BuildAction(layout.chunk_size, ActionMode.ABSOLUTE),
                LoadImages(layout.image_keys, fields["image_dir"]),
            ]
        )
        dataset = JsonlDataset(fields["jsonl_dir"], transforms, name, fields)
        counts = [episode.num_samples for episode in dataset.episodes]
        return cls(dataset, layout, [0, *accumulate(counts)][:-1])

    def observation(self, sample: Sample) -> Observation:
        """What a policy gets to see of a sample."""
        meta = sample["meta_data"]
        return Observation(
            state=sample["state"],
            images=dict(zip(self.layout.image_keys, sample["images"], strict=True)),
            prompt=sample["prompt"],
            robot_type=robot_name(meta.get("robot_type")),
            speed=meta.get("speed"),
            control_mode=meta.get("control_mode"),
        )

    def batches(
        self, indices: Sequence[int], size: int
    ) -> Iterator[tuple[list[int], list[Sample]]]:
        """Samples in batches, with their indices."""
        for first in range(0, len(indices), size):
            part = list(indices[first : first + size])
            yield part, [self.dataset[index] for index in part]

    def act(
        self, policy: Policy, part: Sequence[int], samples: Sequence[Sample], num_steps: int
    ) -> np.ndarray:
        """A policy's chunks ``[B, T, D]``; the noise of a frame depends on its index only."""
        observations = [self.observation(sample) for sample in samples]
        return policy.act_batch(observations, num_steps=num_steps, noise=policy.noise_for(part))


def hold_last_state(samples: Sequence[Sample], true: np.ndarray) -> np.ndarray:
    """The state, repeated; NaN where a state is no action (it has another size)."""
    states = np.stack([sample["state"] for sample in samples])
    if states.shape[-1] != true.shape[-1]:
        return np.full(true.shape, np.nan)
    return np.broadcast_to(states[:, None], true.shape)


def different_tasks(held_out: HeldOut, count: int) -> list[int]:
    """Numbers of the first episodes of up to ``count`` different tasks."""
    first_of: dict[str, int] = {}
    for number, start in enumerate(held_out.starts):
        if len(first_of) >= count:
            break
        first_of.setdefault(held_out.dataset[start]["prompt"], number)
    return list(first_of.values())[:count]


def episode_view(
    held_out: HeldOut, policy: Policy, number: int, num_steps: int, batch_size: int
) -> EpisodeView:
    """One episode, every chunk executed to its end before the next is predicted."""
    episode, start = held_out.dataset.episodes[number], held_out.starts[number]
    length = episode.num_samples
    predicted, true = [], []
    chunk_starts = range(start, start + length, held_out.layout.chunk_size)
    for part, samples in held_out.batches(chunk_starts, batch_size):
        chunks = held_out.act(policy, part, samples, num_steps)
        for sample, chunk in zip(samples, chunks, strict=True):
            real = sample["action_mask"][0].all(axis=-1)
            true.append(sample["action"][0][real])
            predicted.append(chunk[real])
    frames: dict[str, list[tuple[int, bytes]]] = {key: [] for key in held_out.layout.image_keys}
    for frame in np.unique(np.linspace(0, length - 1, FRAMES_SHOWN).round().astype(int)).tolist():
        sample = held_out.dataset[start + frame]
        for key, image in zip(held_out.layout.image_keys, sample["images"], strict=True):
            frames[key].append((frame, jpeg(image)))
    dimensions, units = name_dimensions(held_out.layout)
    return EpisodeView(
        name=Path(episode.name).stem,
        task=held_out.dataset[start]["prompt"],
        dimensions=dimensions,
        units=units,
        predicted=np.concatenate(predicted),
        true=np.concatenate(true),
        frames=frames,
    )


def jpeg(image: Image.Image) -> bytes:
    """The picture as a JPEG file."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
