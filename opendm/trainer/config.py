"""``DM05TrainerConfig``: the flags of the run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from opendm.errors import ConfigError
from opendm.flags import choice_flag

SHARDING_STRATEGIES: Final = ("shard_grad_op", "full_shard", "hybrid_shard")
WRAP_PRESETS: Final = ("published", "per_layer")
NONFINITE_CHOICES: Final = ("skip", "stop")


@dataclass
class DM05TrainerConfig:
    """Steps, batches, workers, files and engine of a run."""

    fsdp1: bool = True
    """Shard with FSDP when there are several processes; off means DDP."""
    fsdp_version: int = 1
    """1, or 2 for FSDP2 (fully_shard); the numbers are the same."""
    fsdp_sharding_strategy: Annotated[str, choice_flag(*SHARDING_STRATEGIES)] = "shard_grad_op"
    """shard_grad_op keeps gathered weights from forward to backward, full_shard frees them between,
    hybrid_shard shards within a node and copies across nodes."""
    fsdp_wrap: Annotated[str, choice_flag(*WRAP_PRESETS)] = "published"
    """FSDP units: the whole Action Expert and the last VLM layers, or every layer by itself."""
    output_dir: str = "user_checkpoints/dm05_exp"
    """Folder of checkpoints, metrics and the final weights."""
    num_train_steps: int = 100_000
    """Optimizer steps of the run."""
    per_device_train_batch_size: int = 4
    """Samples per process and micro-step."""
    gradient_accumulation_steps: int = 1
    """Micro-steps of one optimizer step."""
    save_strategy: str = "steps"
    """steps, or no: only the final weights."""
    save_steps: int = 5000
    """Optimizer steps between two checkpoints."""
    save_total_limit: int = 50
    """Checkpoints kept; older ones are removed."""
    save_only_model: bool = False
    """Leave out what only a resume needs."""
    logging_steps: int = 1
    """Optimizer steps between two lines on the console."""
    dataloader_num_workers: int = 4
    """Processes that prepare samples, per rank; 0 prepares them in the training process."""
    dataloader_persistent_workers: bool = True
    """Keep workers for the whole run."""
    dataloader_prefetch_factor: int = 2
    """Batches that a worker prepares ahead."""
    model_max_length: int = 1024
    """Tokens of the longest prefix; a longer task text is shortened."""
    bf16: bool = True
    """Compute in bfloat16."""
    tf32: bool = True
    """Allow TF32 matrix products on CUDA."""
    lr_scheduler_type: str = "cosine_with_min_lr"
    """Schedule by Hugging Face's name."""
    lr_scheduler_kwargs: dict[str, float] = field(default_factory=lambda: {"min_lr_rate": 0.1})
    """Arguments of the schedule."""
    wandb_project: str = ""
    """Weights & Biases project; empty reports nothing."""
    seed: int = 42
    """Seed of sample order, noise, times and augmentation."""
    resume: str = "auto"
    """auto continues the newest healthy checkpoint of the output folder; never; or a checkpoint."""
    overwrite: bool = False
    """Remove checkpoints and metrics of an earlier run in the output folder."""
    accept_changes: bool = False
    """Continue a checkpoint although rates or schedules have changed; the changes are printed."""
    nonfinite: Annotated[str, choice_flag(*NONFINITE_CHOICES)] = "skip"
    """What a loss or gradient that is not finite does: the step is skipped, or the run stops."""
    max_nonfinite_steps: int = 10
    """Skipped steps in a row after which the run stops."""
    eval_steps: int = 0
    """Optimizer steps between two losses on held-out episodes; 0: none."""
    ema_decay: float = 0.0
    """Decay of a moving average of the weights that is evaluated and exported; 0: none."""

    @property
    def run_name(self) -> str:
        """Name of the run: the last part of the output folder."""
        return Path(self.output_dir).name

    def validate(self) -> None:
        """Check every value.

        Raises:
            ConfigError: names the flag, what was given and what is allowed.
        """
        for flag, value, least in (
            ("num-train-steps", self.num_train_steps, 1),
            ("per-device-train-batch-size", self.per_device_train_batch_size, 1),
            ("gradient-accumulation-steps", self.gradient_accumulation_steps, 1),
            ("save-steps", self.save_steps, 1),
            ("save-total-limit", self.save_total_limit, 1),
            ("logging-steps", self.logging_steps, 1),
            ("dataloader-num-workers", self.dataloader_num_workers, 0),
            ("model-max-length", self.model_max_length, 1),
            ("seed", self.seed, 0),
            ("max-nonfinite-steps", self.max_nonfinite_steps, 1),
            ("eval-steps", self.eval_steps, 0),
        ):
            if value < least:
                raise ConfigError(f"--trainer-config.{flag} {value} is too small; give {least} "
                                  "or more")  # fmt: skip
        if self.save_strategy not in ("steps", "no"):
            raise ConfigError(
                f"--trainer-config.save-strategy {self.save_strategy!r} is unknown; allowed: "
                "steps, no"
            )
        for flag, chosen, choices in (
            ("fsdp-sharding-strategy", self.fsdp_sharding_strategy, SHARDING_STRATEGIES),
            ("fsdp-wrap", self.fsdp_wrap, WRAP_PRESETS),
            ("nonfinite", self.nonfinite, NONFINITE_CHOICES),
        ):
            if chosen not in choices:
                raise ConfigError(
                    f"--trainer-config.{flag} {chosen!r} is unknown; allowed: {', '.join(choices)}"
                )
        if self.fsdp_version not in (1, 2):
            raise ConfigError(
                f"--trainer-config.fsdp-version {self.fsdp_version} is unknown; allowed: 1, 2"
            )
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(
                f"--trainer-config.ema-decay {self.ema_decay} is out of range; give 0 (off) or "
                "more, below 1"
            )
        if self.resume not in ("auto", "never") and not Path(self.resume).is_dir():
            raise ConfigError(
                f"--trainer-config.resume {self.resume} is no folder; allowed: auto, never, or a "
                "checkpoint"
            )
