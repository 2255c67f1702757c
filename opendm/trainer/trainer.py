"""``DMTrainer``: Hugging Face's loop with OpenDM's engine, order of samples, metrics and files."""

import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments

from opendm.errors import OpenDMError
from opendm.optimizer import MuonAdamW
from opendm.trainer.engine import Engine, autocast, clean_name, gather_weights
from opendm.trainer.metrics import MetricsFile, StepLosses
from opendm.trainer.protocols import TrainableModel
from opendm.trainer.sampling import SeededCollator, SeededDataset, StepSampler

logger = logging.getLogger(__name__)

METRICS_FILE: Final = "metrics.jsonl"
SaveArtifacts = Callable[[Path], None]


class DMTrainer(Trainer):
    """Trains a DM0.5 model.

    Args:
        model: the model, not wrapped.
        args: Hugging Face's arguments.
        engine: how the model is wrapped and in what it computes.
        train_dataset: map-style dataset of samples.
        data_collator: samples to a batch.
        make_optimizer: from the wrapped model to its optimizer.
        save_artifacts: writes into a folder what inference needs beside the weights.
        export_dtype: dtype of saved weights.
    """

    def __init__(
        self,
        *,
        model: TrainableModel,
        args: TrainingArguments,
        engine: Engine,
        train_dataset: Any,
        data_collator: Callable[..., dict[str, Any]],
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        save_artifacts: SaveArtifacts,
        export_dtype: torch.dtype,
    ) -> None:
        self.engine = engine
        self.trainable_model = model
        self.make_optimizer = make_optimizer
        self.save_artifacts = save_artifacts
        self.export_dtype = export_dtype
        self._losses = StepLosses()
        self._data_wait_s = 0.0
        self._num_dropped = 0
        self._step_started = time.perf_counter()
        self._metrics: MetricsFile | None = None
        self._progress: tqdm | None = None
        super().__init__(
            model=model,
            args=args,
            train_dataset=SeededDataset(train_dataset, args.seed),
            data_collator=SeededCollator(data_collator),
        )
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)

    optimizer: torch.optim.Optimizer | None

    # Engine

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The engine places the model, unit by unit where it is sharded."""

    def _wrap_model(self, model: nn.Module, *_args: Any, **_kwargs: Any) -> nn.Module:
        return model

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        units = self.trainable_model.fsdp_wrap_modules()
        self.model_wrapped = self.engine.wrap(self.model, units)
        self.engine.assert_got(self.model_wrapped)
        logger.info("engine: %s", self.engine.describe(self.model_wrapped))
        warmup = self.args.get_warmup_steps(max_steps)
        logger.info("schedule: %d optimizer steps, %d of them warm-up", max_steps, warmup)
        if self.is_world_process_zero():
            self._metrics = MetricsFile(Path(self.args.output_dir) / METRICS_FILE)
            self._progress = tqdm(total=max_steps, unit="step", disable=not sys.stderr.isatty())
        result = super()._prepare_for_training(max_steps, *args, **kwargs)
        self._step_started = time.perf_counter()
        return result

    def autocast_smart_context_manager(self, *_args: Any, **_kwargs: Any) -> AbstractContextManager:
        """Products in the engine's compute dtype."""
        return autocast(self.engine)()

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        norm = self.engine.clip_grad_norm(model, self.args.max_grad_norm)
        if not math.isfinite(norm):
            self._drop_step(model)
        return norm

    def _drop_step(self, model: nn.Module) -> None:
        """Leave weights and states as they are: the norm is the same on all ranks."""
        for param in model.parameters():
            param.grad = None
        self._num_dropped += 1
        logger.warning(
            "step %d: the gradient is not finite; the step is dropped (%d so far)",
            self.state.global_step + 1, self._num_dropped,
        )  # fmt: skip

    def create_optimizer(self, *_args: Any) -> torch.optim.Optimizer:
        """The run's optimizer, made from the wrapped model."""
        if self.optimizer is None:
            self.optimizer = self.make_optimizer(self.model_wrapped)
            if isinstance(self.optimizer, MuonAdamW):
                logger.info("optimizer: %s", self.optimizer.describe())
        return self.optimizer

    # Data

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this rank for the whole run."""
        args = self.args
        sampler = StepSampler(
            num_samples=len(self.train_dataset),
            seed=args.seed,
            num_steps=args.max_steps,
            batch_size=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            rank=args.process_index,
            world_size=args.world_size,
        )
        return DataLoader(
            self.train_dataset,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Fetch a step's batches, timed; a bad sample's error is raised here, as itself."""
        started = time.perf_counter()
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._data_wait_s += time.perf_counter() - started
        for batch in batches:
            if isinstance(batch, OpenDMError):
                raise batch
        return batches, count

    def _get_num_items_in_batch(self, *_args: Any, **_kwargs: Any) -> None:
        """A batch's loss is the mean over its samples; micro-batches are of equal size."""

    # Metrics

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002 - Hugging Face's signature
        num_items_in_batch: Any = None,
    ) -> Any:
        """The model's loss; kept for the step's metrics."""
        del num_items_in_batch
        outputs = model(**inputs)
        self._losses.add(outputs["loss"], outputs["fm_loss"])
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        if self.state.global_step > self._last_recorded:
            self._record_step(grad_norm, kwargs.get("learning_rate"))
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    _last_recorded = 0

    def _record_step(self, grad_norm: Any, learning_rate: float | None) -> None:
        loss, fm_loss = self._losses.take()
        now = time.perf_counter()
        step_s, self._step_started = now - self._step_started, now
        wait_s, self._data_wait_s = self._data_wait_s, 0.0
        self._last_recorded = self.state.global_step
        if self._metrics is None:
            return
        args = self.args
        samples = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        )
        norm = math.nan if grad_norm is None else float(grad_norm)
        self._metrics.write({
            "step": self.state.global_step,
            "loss": loss,
            "fm_loss": fm_loss,
            "grad_norm": norm,
            "lr": learning_rate,
            "samples_per_s": samples / step_s,
            "step_s": step_s,
            "data_wait_s": wait_s,
            "dropped_steps": self._num_dropped,
        })  # fmt: skip
        self._show_progress(loss, norm, samples / step_s)

    def _show_progress(self, loss: float, grad_norm: float, samples_per_s: float) -> None:
        step, total = self.state.global_step, self.state.max_steps
        if self._progress is not None and not self._progress.disable:
            self._progress.set_postfix_str(f"loss {loss:.4f}")
            self._progress.update(step - self._progress.n)
        elif step in (1, total) or step % max(self.args.logging_steps, total // 20) == 0:
            logger.info(
                "step %d/%d  loss %.4f  grad_norm %.3f  %.1f samples/s",
                step, total, loss, grad_norm, samples_per_s,
            )  # fmt: skip

    # Files

    def _save_checkpoint(self, model: nn.Module, *_args: Any, **_kwargs: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        self._export(model, folder)
        if self.is_world_process_zero():
            remove_old_checkpoints(Path(self.args.output_dir), self.args.save_total_limit)

    def save_model(self, output_dir: str | None = None, *_args: Any, **_kwargs: Any) -> None:
        """Write the weights and all that inference needs into ``output_dir``."""
        self._export(self.model_wrapped, Path(output_dir or self.args.output_dir))

    def _export(self, model: nn.Module, folder: Path) -> None:
        weights = gather_weights(model, keep=self.is_world_process_zero())
        if self.is_world_process_zero():
            is_new = not folder.exists()
            target = folder.with_name(f".{folder.name}.partial") if is_new else folder
            if is_new:
                shutil.rmtree(target, ignore_errors=True)
            self.trainable_model.save_pretrained(
                target,
                state_dict={clean_name(name): tensor for name, tensor in weights.items()},
                dtype=self.export_dtype,
            )
            self.save_artifacts(target)
            if is_new:
                os.replace(target, folder)  # noqa: PTH105 - Path.replace hides that it is atomic
            logger.info("saved %s", folder)
        if dist.is_initialized():
            dist.barrier()

    def close(self) -> None:
        """Close what the run holds open."""
        if self._metrics is not None:
            self._metrics.close()
        if self._progress is not None:
            self._progress.close()


def remove_old_checkpoints(output_dir: Path, limit: int | None) -> None:
    """Remove all but the newest ``limit`` folders ``checkpoint-N``; None keeps all."""
    if not limit:
        return
    numbered = [
        (int(match[1]), path)
        for path in output_dir.glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    ]
    for _, path in sorted(numbered)[:-limit]:
        shutil.rmtree(path)


def safe_save_model_for_hf_trainer(trainer: DMTrainer, output_dir: str) -> None:
    """Public helper: the final weights of a run, gathered once, on the CPU of rank 0."""
    trainer.save_model(output_dir)
