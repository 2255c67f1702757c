"""Who acts: a checkpoint under some sentence, or one blind motion; and what it is shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from opendm.errors import CheckpointError, ConfigError
from opendm.eval.metaworld.environment import CAMERAS, STATE_SIZE, Vector
from opendm.eval.metaworld.rollout import Pictures, View
from opendm.infer.layout import PolicyLayout
from opendm.infer.policy import Observation, Policy

IMAGE_KEYS = ("images_1", "images_2")
"""Keys under which the collector records `CAMERAS`."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyActor:
    """A checkpoint that is told ``sentence``; noise follows from the seed and the step."""

    policy: Policy
    sentence: str
    num_flow_steps: int = 10

    def act(self, views: Sequence[View]) -> Sequence[NDArray[np.floating]]:
        """Absolute actions in the simulator's units."""
        observations = [
            Observation(
                state=view.state,
                images=dict(zip(IMAGE_KEYS, map(view.images.__getitem__, CAMERAS), strict=True)),
                prompt=self.sentence,
            )
            for view in views
        ]
        noise = self.policy.noise_for([view.seed * 1000 + view.step for view in views])
        return list(self.policy.act_batch(observations, num_steps=self.num_flow_steps, noise=noise))


@dataclass(frozen=True, slots=True, eq=False)
class BlindActor:
    """One motion ``[T, 4]``, whatever happens; its last action is held."""

    motion: Vector

    def act(self, views: Sequence[View]) -> Sequence[NDArray[np.floating]]:
        """The part of the motion that begins at each view's step."""
        last = len(self.motion) - 1
        return [self.motion[min(view.step, last) :] for view in views]


@dataclass(frozen=True, slots=True)
class Condition:
    """Who acts in a task, what it is told and what it is shown."""

    name: str
    checkpoint: Path | None = None
    """None is the blind mean demonstration."""
    sentence: str = ""
    pictures: Pictures = Pictures.LIVE
    layout_from: Path | None = None
    """A checkpoint whose layout and statistics count, where ``checkpoint`` has none yet."""


def check_fits(layout: PolicyLayout, source: str, actions_per_query: int = 1) -> None:
    """Check that a policy was trained on what the collector records.

    Raises:
        CheckpointError: its cameras or dimensions are others, or it wants earlier pictures.
        ConfigError: more actions are to be executed than it gives.
    """
    if actions_per_query > layout.chunk_size:
        raise ConfigError(
            f"--actions-per-query {actions_per_query} is more than the chunk of {source} has; "
            f"allowed: 1 to {layout.chunk_size}"
        )
    advice = "train it on demonstrations of playground/collect_metaworld.py"
    if tuple(layout.image_keys) != IMAGE_KEYS:
        raise CheckpointError(
            f"{source} sees cameras {layout.image_keys}; the simulator shows {list(IMAGE_KEYS)} "
            f"({', '.join(CAMERAS)}); {advice}"
        )
    if layout.is_history:
        raise CheckpointError(
            f"{source} reads earlier pictures; the simulator shows none; {advice}"
        )
    if layout.action_dim != STATE_SIZE:
        raise CheckpointError(
            f"{source} has {layout.action_dim} action dimensions; the simulator takes {STATE_SIZE} "
            f"(x, y, z, gripper); {advice}"
        )
    if layout.state_desc is not None and len(layout.state_desc) != STATE_SIZE:
        raise CheckpointError(
            f"{source} reads {len(layout.state_desc)} state dimensions; the simulator has "
            f"{STATE_SIZE} (x, y, z, gripper); {advice}"
        )
