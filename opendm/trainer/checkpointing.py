"""``Checkpoints``: one commit for all ranks, and what a run continues from.

A rank that fails tells the others, so that nobody waits for it in a collective.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from opendm.errors import CheckpointError, OpenDMError
from opendm.trainer.checkpoint_folder import begin, commit, discard, rotate, writing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one run."""

    output_dir: Path
    keep: int
    """Healthy checkpoints that are kept."""
    hashes: Mapping[str, str]
    """Of configuration, dataset and statistics, for the manifest."""

    def save(self, step: int, *parts: Callable[[Path], None], needed: int = 0) -> Path:
        """Write ``checkpoint-<step>`` or nothing; every rank must call this.

        Args:
            step: optimizer steps done.
            parts: each writes this rank's share into a folder. One that holds collectives must
                have them behind it before it writes.
            needed: estimated bytes; refused at once if less is free. 0: not known.

        Raises:
            CheckpointError: some rank could not write; on every rank.
        """
        partial = Path(
            together(lambda: str(begin(self.output_dir, step, needed=needed)), on_rank_0=True)
        )

        def write(part: Callable[[Path], None]) -> None:
            with writing(partial, f"the checkpoint of step {step}", needed=needed):
                part(partial)

        try:
            for part in parts:
                together(functools.partial(write, part))
            folder = Path(together(lambda: str(commit(partial, step, self.hashes)), on_rank_0=True))
        except OpenDMError:
            if is_rank_0():
                discard(partial)
            raise
        together(lambda: rotate(self.output_dir, self.keep, folder), on_rank_0=True)
        return folder


def estimated_bytes(model: Any, export_dtype: torch.dtype, num_states: int) -> int:
    """Size of a checkpoint.

    Args:
        model: not wrapped; an adapter is exported alone, in float32.
        export_dtype: dtype of a full model's exported weights.
        num_states: float32 tensors by trainable weight: itself, two moments, an average.
    """
    names = model.exported_names
    exported = sum(p.numel() for n, p in model.named_parameters() if names is None or n in names)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    itemsize = export_dtype.itemsize if names is None else torch.float32.itemsize
    return exported * itemsize + 4 * num_states * trainable


def together(action: Callable[[], Any], *, on_rank_0: bool = False) -> Any:
    """Do something on all ranks, or on rank 0 alone, and fail on all if it fails on one.

    Returns:
        What ``action`` returned, on this rank or on rank 0.

    Raises:
        CheckpointError: the first rank's error.
    """
    outcome: Any = None
    error: str | None = None
    if is_rank_0() or not on_rank_0:
        try:
            outcome = action()
        except (OSError, OpenDMError) as failure:
            error = str(failure)
    everyone: list[Any] = [(outcome, error)]
    if dist.is_initialized():
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, (outcome if on_rank_0 else None, error))
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            raise CheckpointError(message if len(everyone) == 1 else f"rank {rank}: {message}")
    return everyone[0][0] if on_rank_0 else outcome


def is_rank_0() -> bool:
    """Whether this process writes for all."""
    return not dist.is_initialized() or dist.get_rank() == 0
