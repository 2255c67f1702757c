"""``RunPlan``: what the trainer is told of a run beside its model, its data and its arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from opendm.trainer.checkpointing import Checkpoints
from opendm.trainer.sampling import DrawOrder


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What of a run is neither model nor data nor Hugging Face's."""

    checkpoints: Checkpoints
    resume_from: Path | None = None
    """A healthy checkpoint with its state."""
    save_only_model: bool = False
    stops_at_nonfinite: bool = False
    max_nonfinite_steps: int = 10
    ema_decay: float = 0.0
    validate: Callable[[nn.Module], float] | None = None
    """Loss of a wrapped model on held-out episodes."""
    draw_order: DrawOrder | None = None
    """Of a mixture's samples; None draws every sample once per epoch."""
    eval_steps: int = 0
    keep_rates: bool = False
    """Continue with this run's rates and schedule instead of the checkpoint's."""
