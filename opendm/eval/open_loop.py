"""Open-loop error of a policy on held-out episodes, against two baselines."""

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from opendm.constants.robot import ActionMode, RobotStateDesc
from opendm.data.dataset import JsonlDataset, Sample
from opendm.data.formats import dataset_info
from opendm.data.norm_stats_job import robot_name
from opendm.data.transforms.actions import BuildAction
from opendm.data.transforms.images import LoadImages
from opendm.data.transforms.pipeline import Pipeline
from opendm.errors import DataError
from opendm.eval.report import EpisodeView, ErrorRow, Report, display_unit, write_report
from opendm.eval.run_record import read_run, versions
from opendm.infer.layout import PolicyLayout
from opendm.infer.policy import Observation, Policy

LIMIT: Final = 0.7
"""A trained policy's error shall be at most this share of the better baseline's."""
FRAMES_SHOWN: Final = 6
TRAINED, UNTRAINED, HOLD = "trained", "untrained", "hold last state"
EEF_NAMES: Final = ("x", "y", "z", "rx", "ry", "rz")

Show = Callable[[str], None]


@dataclass(eq=False)
class MeanError:
    """Mean absolute error per dimension over real chunk steps."""

    total: np.ndarray
    count: np.ndarray
    num_frames: int = 0

    @classmethod
    def zeros(cls, size: int) -> "MeanError":
        """Nothing measured yet."""
        return cls(np.zeros(size), np.zeros(size))

    def add(self, predicted: np.ndarray, true: np.ndarray, mask: np.ndarray) -> None:
        """Count chunks ``[B, T, D]`` where ``mask`` is true."""
        difference = np.abs(predicted.astype(np.float64) - true)
        self.total += np.where(mask, difference, 0.0).sum(axis=(0, 1))
        self.count += mask.sum(axis=(0, 1))
        self.num_frames += len(true)

    def mean(self) -> np.ndarray:
        """Per dimension."""
        return self.total / self.count


@dataclass(frozen=True, slots=True)
class OpenLoopErrors:
    """Errors per policy, and their mean over the dimensions that move the arm."""

    dimensions: list[str]
    units: list[str]
    by_policy: dict[str, list[float]]
    """Per dimension."""
    moving: list[int]
    """The dimensions that the headline averages: positions where there are any."""
    num_frames: int

    def headline(self, policy: str) -> float:
        """Mean error of the moving dimensions."""
        return float(np.mean([self.by_policy[policy][index] for index in self.moving]))

    @property
    def ratio(self) -> float:
        """Trained error over that of the better baseline; NaN where neither says anything."""
        known = [e for e in map(self.headline, (UNTRAINED, HOLD)) if math.isfinite(e) and e > 0]
        return self.headline(TRAINED) / min(known) if known else math.nan

    def sentence(self) -> str:
        """The result in one line."""
        unit, factor = display_unit(self.units[self.moving[0]])
        name, suffix = ("xyz", f" {unit}") if unit == "mm" else ("arm", "")
        trained, untrained, hold = (
            f"{factor * self.headline(policy):.3g}{suffix}" for policy in (TRAINED, UNTRAINED, HOLD)
        )
        return (
            f"{name} error {trained}; untrained {untrained}; hold last state {hold}; "
            f"ratio {self.ratio:.3f} (limit {LIMIT})"
        )

    def rows(self) -> list[ErrorRow]:
        """One row per dimension for the report."""
        return [
            ErrorRow(
                dimension,
                unit,
                self.by_policy[TRAINED][index],
                {name: self.by_policy[name][index] for name in (UNTRAINED, HOLD)},
            )
            for index, (dimension, unit) in enumerate(zip(self.dimensions, self.units, strict=True))
        ]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """A dataset with absolute targets and loaded pictures, and how to act on it."""

    dataset: JsonlDataset
    layout: PolicyLayout
    starts: list[int] = field(default_factory=list)
    """Index of each episode's first sample."""

    @classmethod
    def open(cls, name: str, layout: PolicyLayout) -> "HeldOut":
        """Open a registered dataset for a policy.

        Raises:
            DataError: its cameras are not the policy's.
        """
        fields = dataset_info(name)
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


def evaluate_open_loop(
    checkpoint: Path,
    *,
    untrained: Path,
    dataset_name: str,
    output: Path,
    num_steps: int = 10,
    stride: int = 4,
    batch_size: int = 32,
    num_episode_views: int = 2,
    device: str = "cpu",
    show: Show = print,
) -> Report:
    """Compare predicted with recorded actions and write ``report.html`` and ``open_loop.json``.

    Args:
        checkpoint: folder of the trained policy.
        untrained: folder that its training started from.
        dataset_name: registered name of the held-out episodes.
        output: folder to write into.
        num_steps: integration steps.
        stride: every how many frames a chunk is predicted.
        batch_size: frames per model call.
        num_episode_views: episodes to show, each of another task.
        device: where the models run.
        show: takes lines of progress and the result.

    Raises:
        CheckpointError: a checkpoint does not load.
        DataError: the episodes do not fit the policy.
    """
    trained = Policy.from_checkpoint(checkpoint, device=device)
    base = Policy.from_checkpoint(untrained, layout_from=checkpoint, device=device)
    held_out = HeldOut.open(dataset_name, trained.layout)
    indices = range(0, len(held_out.dataset), stride)
    show(f"open loop: {len(indices)} frames of {dataset_name}, horizon {trained.layout.chunk_size}")
    policies = {TRAINED: trained, UNTRAINED: base}
    errors = measure(
        held_out, policies, indices, num_steps=num_steps, batch_size=batch_size, show=show
    )
    views = [
        episode_view(held_out, trained, number, num_steps, batch_size)
        for number in different_tasks(held_out, num_episode_views)
    ]
    show(error_table(errors))
    show(errors.sentence())
    training, settings = read_run(checkpoint)
    report = Report(
        title=f"{trained.layout.dataset_name}: {checkpoint.name}",
        settings={
            "checkpoint": str(checkpoint),
            "held-out dataset": dataset_name,
            "sampling steps": str(num_steps),
            "frames": f"{errors.num_frames} (every {stride})",
            **settings,
        },
        versions=versions(),
        training=training,
        errors=errors.rows(),
        summary=[errors.sentence()],
        episodes=views,
    )
    write_report(report, output / "report.html")
    write_figures(errors, output / "open_loop.json", dataset_name, stride, num_steps)
    return report


def measure(
    held_out: HeldOut,
    policies: Mapping[str, Policy],
    indices: Sequence[int],
    *,
    num_steps: int,
    batch_size: int,
    show: Show,
) -> OpenLoopErrors:
    """Errors of the policies and of holding the last state."""
    size = held_out.layout.action_dim
    errors = {name: MeanError.zeros(size) for name in (*policies, HOLD)}
    done = 0
    for part, samples in held_out.batches(indices, batch_size):
        true = np.concatenate([sample["action"] for sample in samples])
        mask = np.concatenate([sample["action_mask"] for sample in samples])
        if true.shape[-1] != size:
            raise DataError(f"actions have {true.shape[-1]} dimensions, the policy has {size}")
        predicted = {
            name: held_out.act(policy, part, samples, num_steps)
            for name, policy in policies.items()
        }
        predicted[HOLD] = hold_last_state(samples, true)
        for name, chunks in predicted.items():
            errors[name].add(chunks, true, mask)
        done += len(part)
        show(f"open loop: {done}/{len(indices)} frames")
    dimensions, units = name_dimensions(held_out.layout)
    return OpenLoopErrors(
        dimensions,
        units,
        {name: error.mean().tolist() for name, error in errors.items()},
        moving_dimensions(dimensions, units),
        done,
    )


def hold_last_state(samples: Sequence[Sample], true: np.ndarray) -> np.ndarray:
    """The state, repeated; NaN where a state is no action (it has another size)."""
    states = np.stack([sample["state"] for sample in samples])
    if states.shape[-1] != true.shape[-1]:
        return np.full(true.shape, np.nan)
    return np.broadcast_to(states[:, None], true.shape)


def name_dimensions(layout: PolicyLayout) -> tuple[list[str], list[str]]:
    """Names and units of the action's dimensions, from ``state_desc`` where that is known."""
    desc = layout.state_desc
    if desc is None or len(desc) != layout.action_dim:
        return [f"action {index}" for index in range(layout.action_dim)], [""] * layout.action_dim
    num_arms = max(1, desc.count(RobotStateDesc.GRIPPER.value))
    names, units, arm, place = [], [], 1, 0
    for word in desc:
        is_eef = word == RobotStateDesc.EEF.value
        name = EEF_NAMES[place % 6] if is_eef else f"joint {place + 1}"
        place += 1
        if word == RobotStateDesc.GRIPPER.value:
            name, place = "gripper", 0
        names.append(name if num_arms == 1 else f"arm {arm} {name}")
        units.append(("m" if name in EEF_NAMES[:3] else "rad") if is_eef else "")
        arm += word == RobotStateDesc.GRIPPER.value
    return names, units


def moving_dimensions(dimensions: Sequence[str], units: Sequence[str]) -> list[int]:
    """Positions in metres, or every dimension that is no gripper, or all."""
    metres = [index for index, unit in enumerate(units) if unit == "m"]
    others = [index for index, name in enumerate(dimensions) if not name.endswith("gripper")]
    return metres or others or list(range(len(dimensions)))


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


def error_table(errors: OpenLoopErrors) -> str:
    """Errors per dimension, aligned for a terminal."""
    lines = [f"{'dimension':<16}{TRAINED:>12}{UNTRAINED:>12}{HOLD:>18}  unit"]
    for row in errors.rows():
        unit, factor = display_unit(row.unit)
        trained, untrained, hold = (
            f"{factor * value:.3g}"
            for value in (row.trained, row.baselines[UNTRAINED], row.baselines[HOLD])
        )
        lines.append(f"{row.dimension:<16}{trained:>12}{untrained:>12}{hold:>18}  {unit}".rstrip())
    return "\n".join(lines)


def write_figures(
    errors: OpenLoopErrors, path: Path, dataset_name: str, stride: int, num_steps: int
) -> None:
    """The figures as strict JSON; null where a number is not finite."""
    policies = (TRAINED, UNTRAINED, HOLD)
    figures = {
        "dataset": dataset_name,
        "num_frames": errors.num_frames,
        "stride": stride,
        "num_steps": num_steps,
        "dimensions": errors.dimensions,
        "units": errors.units,
        "mean_absolute_error": {
            name: [_finite(value) for value in errors.by_policy[name]] for name in policies
        },
        "moving_dimensions": [errors.dimensions[index] for index in errors.moving],
        "moving_error": {name: _finite(errors.headline(name)) for name in policies},
        "ratio": _finite(errors.ratio),
        "limit": LIMIT,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
