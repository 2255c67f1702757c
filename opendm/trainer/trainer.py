"""``DMTrainer``: Hugging Face's loop with OpenDM's engine, order of samples, metrics and files."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments

from opendm.errors import CheckpointError, NonFiniteError, OpenDMError
from opendm.failure import phase
from opendm.optimizer import MuonAdamW
from opendm.optimizer.selection import canonical_name
from opendm.runtime import environment
from opendm.trainer.bad_pictures import BadPictures
from opendm.trainer.checkpointing import estimated_bytes, is_rank_0, together
from opendm.trainer.ema import Ema
from opendm.trainer.engine import (
    Engine,
    autocast,
    clean_name,
    gather_weights,
    inner,
    keep_as_wrapped,
    mark_skipped,
)
from opendm.trainer.interrupt import StopRequest, outlive_signals
from opendm.trainer.metrics import StepLosses
from opendm.trainer.nonfinite import NONFINITE_FILE, NonFiniteGuard, all_finite, reason_of
from opendm.trainer.plan import RunPlan
from opendm.trainer.protocols import TrainableModel
from opendm.trainer.recorder import StepRecorder
from opendm.trainer.sampling import SeededCollator, SeededDataset, StepSampler
from opendm.trainer.train_state import load_train_state, read_counters, save_train_state

logger = logging.getLogger(__name__)

METRICS_FILE: Final = "metrics.jsonl"
SaveArtifacts = Callable[[Path], None]


class DMTrainer(Trainer):
    """Trains a DM0.5 model.

    Args:
        model: the model, not wrapped.
        args: Hugging Face's arguments.
        engine: how the model is wrapped and in what it computes.
        plan: checkpoints, resuming, evaluation, and what to do about bad steps.
        stop: asks for an early end.
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
        plan: RunPlan,
        stop: StopRequest,
        train_dataset: Any,
        data_collator: Callable[..., dict[str, Any]],
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        save_artifacts: SaveArtifacts,
        export_dtype: torch.dtype,
    ) -> None:
        self.engine = engine
        self.plan = plan
        self.stop = stop
        self.trainable_model = model
        self.make_optimizer = make_optimizer
        self.save_artifacts = save_artifacts
        self.export_dtype = export_dtype
        self.guard = NonFiniteGuard(
            Path(args.output_dir) / NONFINITE_FILE,
            stops_at_once=plan.stops_at_nonfinite,
            most_in_a_row=plan.max_nonfinite_steps,
        )
        resume_from = plan.resume_from
        self._counters = {} if resume_from is None else read_counters(resume_from)
        num_states = 0 if plan.save_only_model else 3 + (plan.ema_decay > 0)
        self._checkpoint_bytes = estimated_bytes(model, export_dtype, num_states)
        self._sampler: StepSampler | None = None
        self._ema: Ema | None = None
        self._recorder: StepRecorder | None = None
        self._losses = StepLosses()
        self._bad_pictures = BadPictures()
        self._step_loss = (math.nan, math.nan)
        self._nonfinite: str | None = None
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
        units = self.trainable_model.fsdp_wrap_modules(self.engine.wrap_preset)
        self.model_wrapped = self.engine.wrap(self.model, units)
        self.engine.assert_got(self.model_wrapped)
        keep_as_wrapped(self.accelerator, self.model_wrapped)
        logger.info("engine: %s", self.engine.describe(self.model_wrapped))
        warmup = self.args.get_warmup_steps(max_steps)
        logger.info("schedule: %d optimizer steps, %d of them warm-up", max_steps, warmup)
        result = super()._prepare_for_training(max_steps, *args, **kwargs)
        self._start_ema()
        if self.plan.resume_from is not None:
            self._restore(self.plan.resume_from)
        self.stop.finish_steps(self.args.device)
        assert self._sampler is not None  # noqa: S101 - the loader is made before
        self._recorder = StepRecorder(
            Path(self.args.output_dir) / METRICS_FILE if is_rank_0() else None,
            num_steps=max_steps,
            samples_per_step=self._sampler.rows,
            logging_steps=self.args.logging_steps,
            first_step=self.state.global_step,
        )
        return result

    def autocast_smart_context_manager(self, *_args: Any, **_kwargs: Any) -> AbstractContextManager:
        """Products in the engine's compute dtype."""
        return autocast(self.engine)()

    def create_optimizer(self, *_args: Any) -> torch.optim.Optimizer:
        """The run's optimizer, made from the wrapped model."""
        if self.optimizer is None:
            self.optimizer = self.make_optimizer(self.model_wrapped)
            if isinstance(self.optimizer, MuonAdamW):
                logger.info("optimizer: %s", self.optimizer.describe())
        return self.optimizer

    # Data

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this rank for the rest of the run."""
        args = self.args
        self._sampler = StepSampler(
            num_samples=len(self.train_dataset),
            seed=args.seed,
            num_steps=args.max_steps,
            batch_size=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            rank=args.process_index,
            world_size=args.world_size,
            first_step=self._counters.get("step", 0),
            first_sample=self._counters.get("samples", 0),
            draw_order=self.plan.draw_order,
        )
        return DataLoader(
            self.train_dataset,
            batch_sampler=self._sampler,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory,
            worker_init_fn=outlive_signals,
            # its iterator draws a number; from torch's own state a resumed run would be one ahead
            generator=torch.Generator(),
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Fetch a step's batches, timed; a bad sample's error is raised here, as itself."""
        started = time.perf_counter()
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._recorder is not None:
            self._recorder.waited(time.perf_counter() - started)
        for batch in batches:
            if isinstance(batch, OpenDMError):
                raise batch
            self._bad_pictures.take_from(batch)
        return batches, count

    def _get_num_items_in_batch(self, *_args: Any, **_kwargs: Any) -> None:
        """A batch's loss is the mean over its samples; micro-batches are of equal size."""

    # Step

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

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip, and decide on all ranks alike whether the step is taken."""
        norm = self.engine.clip_grad_norm(model, self.args.max_grad_norm)
        loss, fm_loss, num_replaced = self._losses.mean(self._bad_pictures.take_new())
        self._step_loss = (loss, fm_loss)
        self._bad_pictures.num_replaced += num_replaced
        self._nonfinite = reason_of(self._step_loss[0], float(norm))
        mark_skipped(self.optimizer, skipped=self._nonfinite is not None)
        if self._nonfinite is None:
            self.guard.passed()
        else:
            self._drop_step(model, self._nonfinite)
        self._losses.clear()
        return norm

    def _drop_step(self, model: nn.Module, reason: str) -> None:
        assert self._sampler is not None  # noqa: S101 - the loader is made before
        step = self.state.global_step
        samples = self._sampler.step_keys(step)
        try:
            self.guard.dropped(step + 1, reason, model, self._losses.of_this_rank(), samples)
        finally:
            for param in model.parameters():
                param.grad = None

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, model: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        step = self.state.global_step
        if self._recorder is not None and step > self._recorder.last_step:
            self._end_step(step, grad_norm, model, kwargs.get("learning_rate"))
            # not when called again after the last step: its checkpoint is there already
            if self.stop.agreed(self.args.device):
                self._interrupted = True
                self.control.should_save = self.control.should_training_stop = True
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)

    _interrupted = False

    def _end_step(self, step: int, grad_norm: Any, model: nn.Module, lr: float | None) -> None:
        assert self._recorder is not None  # noqa: S101 - the caller looked
        if self._ema is not None and self._nonfinite is None:
            self._ema.update()
        step_s = self._recorder.step_seconds()
        val_loss = None
        if self.plan.eval_steps and step % self.plan.eval_steps == 0:
            val_loss = self._validation_loss(model)
        self._recorder.record(
            step,
            loss=self._step_loss[0],
            fm_loss=self._step_loss[1],
            grad_norm=math.nan if grad_norm is None else float(grad_norm),
            lr=lr,
            nonfinite=self._nonfinite,
            dropped_steps=self.guard.num_dropped,
            replaced_samples=self._bad_pictures.num_replaced,
            val_loss=val_loss,
            step_s=step_s,
        )
        self._recorder.start()

    def _validation_loss(self, model: nn.Module) -> float:
        assert self.plan.validate is not None  # noqa: S101 - the experiment gives both
        with self._averaged_weights():
            return self.plan.validate(model)

    # Average

    def _start_ema(self) -> None:
        if self.plan.ema_decay:
            named = self.model_wrapped.named_parameters()
            trainable = {canonical_name(name): p for name, p in named if p.requires_grad}
            self._ema = Ema(trainable, self.plan.ema_decay)

    def _averages(self) -> dict[str, Tensor] | None:
        return None if self._ema is None else self._ema.tensors

    def _averaged_weights(self) -> AbstractContextManager:
        return nullcontext() if self._ema is None else self._ema.swapped()

    # Files

    def _save_checkpoint(self, model: nn.Module, *_args: Any, **_kwargs: Any) -> None:
        step = self.state.global_step
        if not all_finite([param.detach() for param in model.parameters() if param.requires_grad]):
            raise NonFiniteError(
                f"step {step}: the weights are not finite, so no checkpoint is written; the last "
                "one is healthy. Lower --optimizer-config.base-lr"
            )
        parts: list[SaveArtifacts] = [partial(self._write_inference_files, model)]
        if not self.plan.save_only_model:
            parts.append(partial(self._write_state, model))
        try:
            with phase("saving", environment()):
                folder = self.plan.checkpoints.save(step, *parts, needed=self._checkpoint_bytes)
        except CheckpointError as error:
            # healthy checkpoints are still there, and the next save may find room
            logger.error("checkpoint of step %d was not written: %s", step, error)  # noqa: TRY400
            if self._interrupted:
                raise
        else:
            logger.info("saved %s", folder)

    def _write_inference_files(self, model: nn.Module, folder: Path) -> None:
        # written while the averages are in place: on a CPU what is gathered may be the weights
        with self._averaged_weights():
            names = self.trainable_model.exported_names
            weights = gather_weights(model, keep=is_rank_0(), names=names)
            if is_rank_0():
                self.trainable_model.save_pretrained(
                    folder,
                    state_dict={clean_name(name): tensor for name, tensor in weights.items()},
                    dtype=self.export_dtype,
                )
                self.save_artifacts(folder)

    def _write_state(self, model: nn.Module, folder: Path) -> None:
        assert self._sampler is not None  # noqa: S101 - the loader is made before
        step = self.state.global_step
        counters = {
            "step": step,
            "samples": self._sampler.samples_before(step),
            "num_dropped": self.guard.num_dropped,
            "in_a_row": self.guard.in_a_row,
            "num_replaced": self._bad_pictures.num_replaced,
        }
        save_train_state(
            folder, model, inner(self.optimizer), self.lr_scheduler, counters, ema=self._averages()
        )

    def _restore(self, folder: Path) -> None:
        load_train_state(
            folder,
            self.model_wrapped,
            inner(self.optimizer),
            self.lr_scheduler,
            ema=self._averages(),
            keep_rates=self.plan.keep_rates,
        )
        self.state.global_step = self._counters["step"]
        self.guard.num_dropped = self._counters["num_dropped"]
        self.guard.in_a_row = self._counters["in_a_row"]
        # checkpoints of earlier versions do not have it
        self._bad_pictures.num_replaced = self._counters.get("num_replaced", 0)
        logger.info("resumed %s at step %d", folder, self.state.global_step)

    def save_model(self, output_dir: str | None = None, *_args: Any, **_kwargs: Any) -> None:
        """Write the weights and all that inference needs into ``output_dir``."""
        folder = Path(output_dir or self.args.output_dir)
        together(partial(self._write_inference_files, self.model_wrapped, folder))
        logger.info("saved %s", folder)

    def run(self) -> None:
        """Train, and write the final weights.

        Raises:
            Interrupted: the run was asked to stop, and its state is saved.
        """
        try:
            self.train()
            self._bad_pictures.report()
            if self._interrupted:
                self.stop.stop(f"checkpoint-{self.state.global_step}")
            self.save_model()
        finally:
            if self._recorder is not None:
                self._recorder.close()


def safe_save_model_for_hf_trainer(trainer: DMTrainer, output_dir: str) -> None:
    """Public helper: the final weights of a run, gathered once, on the CPU of rank 0."""
    trainer.save_model(output_dir)
