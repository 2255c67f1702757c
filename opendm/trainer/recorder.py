"""``StepRecorder``: a line of ``metrics.jsonl`` per optimizer step, and what the console shows."""

import logging
import sys
import time
from pathlib import Path

from tqdm import tqdm

from opendm.trainer.metrics import MetricsFile

logger = logging.getLogger(__name__)


class StepRecorder:
    """Times steps on every rank; writes and shows them on the rank that has a file.

    Args:
        path: ``metrics.jsonl``, or None on ranks that do not write.
        num_steps: of the run.
        samples_per_step: over all ranks.
        logging_steps: steps between two lines on the console.
        first_step: steps that a resumed run has behind it; later lines of the file are removed.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        num_steps: int,
        samples_per_step: int,
        logging_steps: int,
        first_step: int = 0,
    ) -> None:
        self.last_step = first_step
        self._num_steps = num_steps
        self._samples_per_step = samples_per_step
        self._logging_steps = logging_steps
        self._metrics = None if path is None else MetricsFile(path, keep_steps=first_step)
        is_silent = path is None or not sys.stderr.isatty()
        self._progress = tqdm(total=num_steps, initial=first_step, unit="step", disable=is_silent)
        self._data_wait_s = 0.0
        self._started = time.perf_counter()

    def start(self) -> None:
        """The first step begins now."""
        self._started = time.perf_counter()

    def step_seconds(self) -> float:
        """Time since the step began."""
        return time.perf_counter() - self._started

    def waited(self, seconds: float) -> None:
        """Time of this step that went into waiting for data."""
        self._data_wait_s += seconds

    def record(
        self,
        step: int,
        *,
        loss: float,
        fm_loss: float,
        grad_norm: float,
        lr: float | None,
        nonfinite: str | None,
        dropped_steps: int,
        replaced_samples: int,
        val_loss: float | None,
        step_s: float,
    ) -> None:
        """Write a step; ``nonfinite`` is the reason why it was dropped, if it was."""
        wait_s, self._data_wait_s = self._data_wait_s, 0.0
        self.last_step = step
        if self._metrics is None:
            return
        self._metrics.write({
            "step": step,
            "loss": loss,
            "fm_loss": fm_loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "samples_per_s": self._samples_per_step / step_s,
            "step_s": step_s,
            "data_wait_s": wait_s,
            "dropped_steps": dropped_steps,
            "replaced_samples": replaced_samples,
            "nonfinite": nonfinite,
            "val_loss": val_loss,
        })  # fmt: skip
        self._show(step, loss, grad_norm, self._samples_per_step / step_s)
        if val_loss is not None:
            logger.info("step %d/%d  validation loss %.4f", step, self._num_steps, val_loss)

    def _show(self, step: int, loss: float, grad_norm: float, samples_per_s: float) -> None:
        every = max(self._logging_steps, self._num_steps // 20)
        if not self._progress.disable:
            self._progress.set_postfix_str(f"loss {loss:.4f}")
            self._progress.update(step - self._progress.n)
        elif step in (1, self._num_steps) or step % every == 0:
            logger.info(
                "step %d/%d  loss %.4f  grad_norm %.3f  %.1f samples/s",
                step, self._num_steps, loss, grad_norm, samples_per_s,
            )  # fmt: skip

    def close(self) -> None:
        """Close what is open."""
        if self._metrics is not None:
            self._metrics.close()
        self._progress.close()
