"""``metrics.jsonl``: one line of strict JSON per optimizer step."""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def mean_over_ranks(values: Tensor) -> Tensor:
    """The mean of a tensor over all ranks; itself in a world of one."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN: what is not finite is written as null."""
    return value if math.isfinite(value) else None


class MetricsFile:
    """Appends records; rank 0 alone holds one.

    Args:
        path: the file.
        keep_steps: lines up to this step stay, so that a resumed run has each step once.
    """

    def __init__(self, path: Path, keep_steps: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(path, keep_steps) if keep_steps and path.is_file() else []
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(partial, path)  # noqa: PTH105 - Path.replace hides that it is atomic
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append one line and hand it to the operating system."""
        clean = {k: finite_or_none(v) if isinstance(v, float) else v for k, v in record.items()}
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines_until(path: Path, step: int) -> list[str]:
    """Whole lines of steps up to ``step``; a line that a crash cut off is none."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["step"] <= step:
            kept.append(line)
    return kept


class StepLosses:
    """Losses of the micro-steps of one optimizer step, kept on the device until they are read."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []

    def add(self, loss: Tensor, fm_loss: Tensor) -> None:
        """Add a micro-step's mean losses."""
        self._values.append(torch.stack([loss.detach().float(), fm_loss.detach().float()]))

    def mean(self, count: int = 0) -> tuple[float, float, int]:
        """Mean loss and flow-matching loss over micro-steps and ranks, and ``count`` of all ranks.

        One collective for all three; the sum is exact while it is small.
        """
        losses = torch.stack(self._values).mean(dim=0)
        values = torch.cat([losses, losses.new_tensor([float(count)])])
        loss, fm_loss, mean_count = mean_over_ranks(values).tolist()
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        return loss, fm_loss, round(mean_count * world_size)

    def of_this_rank(self) -> list[float]:
        """Losses by micro-step."""
        return [float(loss) for loss, _ in self._values]

    def clear(self) -> None:
        """Begin another step."""
        self._values = []
