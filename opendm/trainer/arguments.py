"""Hugging Face's ``TrainingArguments`` from OpenDM's flags."""

from typing import TYPE_CHECKING

import torch
from transformers import TrainingArguments

from opendm.runtime import collective_timeout_s
from opendm.trainer.config import DM05TrainerConfig

if TYPE_CHECKING:
    from opendm.optimizer.config import DM05OptimizerConfig

MAX_GRAD_NORM = 1.0


def training_arguments(
    trainer: DM05TrainerConfig, optimizer: "DM05OptimizerConfig", *, world_size: int
) -> TrainingArguments:
    """Every option that the loop reads; engine, checkpoints and metrics are OpenDM's own."""
    on_gpu = torch.cuda.is_available()
    workers = trainer.dataloader_num_workers
    arguments = TrainingArguments(
        output_dir=trainer.output_dir,
        max_steps=trainer.num_train_steps,
        per_device_train_batch_size=trainer.per_device_train_batch_size,
        gradient_accumulation_steps=trainer.gradient_accumulation_steps,
        # FSDP1 under no_sync accumulates full, unsharded gradients
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
        save_strategy=trainer.save_strategy,
        save_steps=trainer.save_steps,
        save_total_limit=trainer.save_total_limit,
        save_only_model=trainer.save_only_model,
        logging_steps=trainer.logging_steps,
        logging_nan_inf_filter=False,
        dataloader_num_workers=workers,
        dataloader_persistent_workers=trainer.dataloader_persistent_workers and workers > 0,
        dataloader_prefetch_factor=trainer.dataloader_prefetch_factor if workers else None,
        dataloader_drop_last=True,
        dataloader_pin_memory=on_gpu,
        bf16=False,  # the engine's autocast computes in bfloat16; accelerate's would wrap forward
        tf32=trainer.tf32 if on_gpu else None,
        lr_scheduler_type=trainer.lr_scheduler_type,
        lr_scheduler_kwargs=dict(trainer.lr_scheduler_kwargs),
        run_name=trainer.run_name,
        remove_unused_columns=False,
        learning_rate=optimizer.base_lr,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_epsilon=optimizer.adam_epsilon,
        warmup_steps=optimizer.warmup_steps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=MAX_GRAD_NORM,
        seed=trainer.seed,
        data_seed=trainer.seed,
        report_to=["wandb"] if trainer.wandb_project else [],
        use_cpu=not on_gpu,
        ddp_timeout=collective_timeout_s(),
        ddp_backend="gloo" if world_size > 1 and not on_gpu else None,
        disable_tqdm=True,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # noqa: SLF001 - never torch's DataParallel
    return arguments
