"""Mean absolute errors of actions: per dimension, per step of the chunk, and in one line."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from opendm.constants.robot import RobotStateDesc
from opendm.eval.horizon import HorizonErrors, as_figures
from opendm.eval.numbers import display_unit
from opendm.eval.report import ErrorRow
from opendm.infer.layout import PolicyLayout

LIMIT: Final = 0.7
"""A trained policy's error shall be at most this share of the better baseline's."""
TRAINED, UNTRAINED, HOLD = "trained", "untrained", "hold last state"
EEF_NAMES: Final = ("x", "y", "z", "rx", "ry", "rz")


@dataclass(eq=False)
class MeanError:
    """Mean absolute error per step and dimension, over steps that were recorded."""

    total: np.ndarray
    """Sum of errors ``[T, D]``."""
    count: np.ndarray
    """Steps in it ``[T, D]``."""
    num_frames: int = 0

    @classmethod
    def zeros(cls, size: int) -> "MeanError":
        """Nothing measured yet."""
        return cls(np.zeros((0, size)), np.zeros((0, size)))

    def add(self, predicted: np.ndarray, true: np.ndarray, mask: np.ndarray) -> None:
        """Count chunks ``[B, T, D]`` where ``mask`` is true."""
        difference = np.abs(predicted.astype(np.float64) - true)
        more = ((0, max(0, true.shape[1] - len(self.total))), (0, 0))
        self.total = np.pad(self.total, more) + np.where(mask, difference, 0.0).sum(axis=0)
        self.count = np.pad(self.count, more) + mask.sum(axis=0)
        self.num_frames += len(true)

    def mean(self) -> np.ndarray:
        """Per dimension, over all steps."""
        return self.total.sum(axis=0) / self.count.sum(axis=0)

    def by_step(self) -> np.ndarray:
        """Per step and dimension ``[T, D]``; NaN where no frame has the step."""
        blank = np.full_like(self.total, np.nan)
        return np.divide(self.total, self.count, out=blank, where=self.count > 0)


@dataclass(frozen=True, slots=True)
class OpenLoopErrors:
    """Errors per policy, and their mean over the dimensions that move the arm."""

    dimensions: list[str]
    units: list[str]
    by_policy: dict[str, list[float]]
    """Per dimension; checkpoints in the order given, then the untrained one and holding still."""
    moving: list[int]
    """The dimensions that the headline averages: positions where there are any."""
    num_frames: int
    by_step: dict[str, np.ndarray] = field(default_factory=dict)
    """Per step and dimension ``[T, D]``."""
    judged: str = TRAINED
    """The checkpoint that the page is about: the last one."""

    @property
    def checkpoints(self) -> list[str]:
        """Names of the checkpoints that are compared."""
        return [name for name in self.by_policy if name not in (UNTRAINED, HOLD)]

    def headline(self, policy: str) -> float:
        """Mean error of the moving dimensions."""
        return float(np.mean([self.by_policy[policy][index] for index in self.moving]))

    @property
    def ratio(self) -> float:
        """Error over that of the better baseline; NaN where neither says anything."""
        return self.ratio_of(self.judged)

    def ratio_of(self, checkpoint: str) -> float:
        """:attr:`ratio` of any of the checkpoints."""
        known = [e for e in map(self.headline, (UNTRAINED, HOLD)) if math.isfinite(e) and e > 0]
        return self.headline(checkpoint) / min(known) if known else math.nan

    def summary(self) -> list[str]:
        """The result in one line per checkpoint, the judged one last."""
        if len(self.checkpoints) == 1:
            return [self.sentence()]
        return [f"{name}: {self.sentence(name)}" for name in self.checkpoints]

    def sentence(self, checkpoint: str | None = None) -> str:
        """The result of one checkpoint, the judged one if none is named."""
        checkpoint = checkpoint or self.judged
        unit, factor = display_unit(self.units[self.moving[0]])
        name, suffix = ("xyz", f" {unit}") if unit == "mm" else ("arm", "")
        trained, untrained, hold = (
            f"{factor * self.headline(policy):.3g}{suffix}"
            for policy in (checkpoint, UNTRAINED, HOLD)
        )
        return (
            f"{name} error {trained}; untrained {untrained}; hold last state {hold}; "
            f"ratio {self.ratio_of(checkpoint):.3f} (limit {LIMIT})"
        )

    def rows(self) -> list[ErrorRow]:
        """One row per dimension for the report."""
        return [
            ErrorRow(
                dimension,
                unit,
                self.by_policy[self.judged][index],
                {name: self.by_policy[name][index] for name in (UNTRAINED, HOLD)},
            )
            for index, (dimension, unit) in enumerate(zip(self.dimensions, self.units, strict=True))
        ]

    def horizon(self) -> list[HorizonErrors]:
        """Errors by step, averaged over the dimensions of each kind."""
        members: dict[tuple[str, str], list[int]] = {}
        for index, (name, unit) in enumerate(zip(self.dimensions, self.units, strict=True)):
            members.setdefault((kind_of(name, unit), unit), []).append(index)
        return [
            HorizonErrors(
                kind,
                unit,
                {name: float(np.mean(np.take(e, places))) for name, e in self.by_policy.items()},
                {name: e[:, places].mean(axis=1) for name, e in self.by_step.items()},
            )
            for (kind, unit), places in members.items()
        ]


def kind_of(dimension: str, unit: str) -> str:
    """The kind of a dimension that :func:`name_dimensions` named."""
    if unit:
        return "position" if unit == "m" else "rotation"
    return next((word for word in ("gripper", "joint") if word in dimension), "action")


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
    figures = {
        "dataset": dataset_name,
        "num_frames": errors.num_frames,
        "stride": stride,
        "num_steps": num_steps,
        "dimensions": errors.dimensions,
        "units": errors.units,
        "mean_absolute_error": errors.by_policy,
        "moving_dimensions": [errors.dimensions[index] for index in errors.moving],
        "moving_error": {name: errors.headline(name) for name in errors.by_policy},
        "judged": errors.judged,
        "ratio": errors.ratio,
        "ratios": {name: errors.ratio_of(name) for name in errors.checkpoints},
        "limit": LIMIT,
        "horizon": as_figures(errors.horizon()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_finite(figures), indent=2, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
