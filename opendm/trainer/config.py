"""``DM05TrainerConfig``: the flags of the run."""

from dataclasses import dataclass, field
from pathlib import Path

from opendm.errors import ConfigError


@dataclass
class DM05TrainerConfig:
    """Steps, batches, workers, files and engine of a run."""

    fsdp1: bool = True
    """Shard with FSDP when there are several processes; off means DDP."""
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
        ):
            if value < least:
                raise ConfigError(f"--trainer-config.{flag} {value} is too small; give {least} "
                                  "or more")  # fmt: skip
        if self.save_strategy not in ("steps", "no"):
            raise ConfigError(
                f"--trainer-config.save-strategy {self.save_strategy!r} is unknown; allowed: "
                "steps, no"
            )
        finished = sorted(Path(self.output_dir).glob("checkpoint-*"))
        if finished:
            raise ConfigError(
                f"--trainer-config.output-dir {self.output_dir} holds {finished[0].name} of an "
                "earlier run, and resuming is not available yet; name another folder or remove it"
            )
