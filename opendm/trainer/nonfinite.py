"""Steps whose loss or gradient is not finite: nothing is changed, and a file says what was seen."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opendm.errors import NonFiniteError
from opendm.optimizer.placement import local
from opendm.trainer.engine import clean_name
from opendm.trainer.sampling import SampleKey

logger = logging.getLogger(__name__)

NONFINITE_FILE: Final = "nonfinite.json"


class NonFiniteGuard:
    """Counts bad steps, writes ``nonfinite.json``, and stops the run after too many in a row.

    Args:
        path: the file.
        stops_at_once: whether the first bad step ends the run.
        most_in_a_row: bad steps in a row that end it.
    """

    def __init__(self, path: Path, *, stops_at_once: bool, most_in_a_row: int) -> None:
        self.num_dropped = 0
        """Bad steps so far."""
        self.in_a_row = 0
        """Bad steps since the last good one."""
        self._path = path
        self._stops_at_once = stops_at_once
        self._most_in_a_row = most_in_a_row

    def passed(self) -> None:
        """A step was finite."""
        self.in_a_row = 0

    def dropped(
        self,
        step: int,
        reason: str,
        model: nn.Module,
        losses: Sequence[float],
        samples: Sequence[Sequence[SampleKey]],
    ) -> None:
        """A step was not finite; every rank must call this.

        Args:
            step: its number, from 1.
            reason: what was not finite.
            model: with the step's gradients.
            losses: this rank's, by micro-step.
            samples: this rank's, by micro-step.

        Raises:
            NonFiniteError: the run must end, on every rank.
        """
        self.num_dropped += 1
        self.in_a_row += 1
        records = _from_all_ranks(_offender(model, losses, samples))
        if records:
            self._append({"step": step, "reason": reason, "ranks": records})
        logger.warning(
            "step %d is dropped: %s (%d in a row, %d so far); %s says which samples",
            step, reason, self.in_a_row, self.num_dropped, self._path,
        )  # fmt: skip
        if self._stops_at_once:
            raise NonFiniteError(
                f"step {step}: {reason}, and --trainer-config.nonfinite is stop; nothing was "
                f"changed. {self._path} names the samples"
            )
        if self.in_a_row >= self._most_in_a_row:
            raise NonFiniteError(
                f"step {step}: {reason}; {self.in_a_row} steps in a row were not finite. Lower the "
                f"rate, look at the samples in {self._path}, or raise "
                "--trainer-config.max-nonfinite-steps"
            )

    def _append(self, record: Mapping[str, Any]) -> None:
        known = json.loads(self._path.read_text("utf-8")) if self._path.is_file() else []
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text(json.dumps([*known, record], allow_nan=False, indent=1) + "\n", "utf-8")
        os.replace(partial, self._path)  # noqa: PTH105 - Path.replace hides that it is atomic


def reason_of(loss: float, grad_norm: float) -> str | None:
    """What is not finite, in words; None if all is."""
    bad = [
        f"{name} is {value}"
        for name, value in (("loss", loss), ("grad_norm", grad_norm))
        if not math.isfinite(value)
    ]
    return ", ".join(bad) or None


def _offender(
    model: nn.Module, losses: Sequence[float], samples: Sequence[Sequence[SampleKey]]
) -> dict[str, Any]:
    """This rank's share: samples of its bad micro-steps, or of all if every loss is finite."""
    bad = [n for n, loss in enumerate(losses) if not math.isfinite(loss)]
    return {
        "losses": [loss if math.isfinite(loss) else str(loss) for loss in losses],
        "samples": [
            {"micro_step": n, "epoch": key.epoch, "row": key.row}
            for n in bad or range(len(samples))
            for key in samples[n]
        ],
        "first_tensor": first_nonfinite(model),
    }


def first_nonfinite(model: nn.Module) -> str | None:
    """Name of the first parameter whose local gradient is not finite."""
    for name, param in model.named_parameters():
        if param.grad is not None and not bool(local(param.grad).isfinite().all()):
            return clean_name(name)
    return None


def _from_all_ranks(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Records by rank on rank 0; nothing elsewhere."""
    if not dist.is_initialized():
        return [{"rank": 0, **record}]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, record)
    is_first = dist.get_rank() == 0
    return [{"rank": r, **rec} for r, rec in enumerate(gathered)] if is_first else []


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every element on every rank is finite; every rank must call this."""
    finite = all(bool(local(tensor).isfinite().all()) for tensor in tensors)
    if not dist.is_initialized():
        return finite
    device = tensors[0].device if tensors else torch.device("cpu")
    flag = torch.tensor(float(finite), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)
