"""Fine-tune low-rank adapters of DM0.5 on an SO101 arm.

bash script/dm05_launcher.sh --exp playground/dm05_so101_lora.py
"""

from dataclasses import dataclass, field

from opendm.exp.dm05_exp import (
    DM05DataConfig,
    DM05Exp,
    DM05InferenceConfig,
    DM05ModelConfig,
    DM05OptimizerConfig,
    DM05TrainerConfig,
    main,
)


@dataclass
class So101LoraModelConfig(DM05ModelConfig):
    """The model of SO101 with adapters."""

    chunk_size: int = 50
    """Action steps of one chunk."""


@dataclass
class So101LoraOptimizerConfig(DM05OptimizerConfig):
    """The rates of SO101 with adapters."""

    base_lr: float = 1e-4
    """Peak of the learning rate."""


@dataclass
class So101LoraTrainerConfig(DM05TrainerConfig):
    """The run of SO101 with adapters, with the published steps and batch."""

    output_dir: str = "user_checkpoints/dm05_so101_lora"
    """Folder of checkpoints, metrics and the final weights."""
    num_train_steps: int = 10_000
    """Optimizer steps of the run."""
    per_device_train_batch_size: int = 8
    """Samples per process and micro-step."""
    save_steps: int = 1000
    """Optimizer steps between two checkpoints."""
    fsdp1: bool = False
    """Every process keeps the whole model; the adapters are small."""
    save_only_model: bool = True
    """Keep the adapter and nothing to continue from."""


@dataclass
class So101LoraDataConfig(DM05DataConfig):
    """The data of SO101 with adapters."""

    dataset_name: str = "so101_pick_cube"
    """Name of the registered dataset."""
    augment: bool = False
    """Pictures as a policy sees them: the published run varies nothing."""


@dataclass
class So101LoraInferenceConfig(DM05InferenceConfig):
    """The service of SO101 with adapters."""

    output_action_dim: int = 6
    """Dimensions of the robot's action."""
    image_prompts: list[str] = field(default_factory=lambda: ["Front", "Wrist"])
    """Names of the cameras in the prompt, in the order of the uploaded images."""


@dataclass
class So101LoraExp(DM05Exp):
    """Fine-tune low-rank adapters of DM0.5 on an SO101 arm."""

    use_lora: bool | None = True
    """Train low-rank adapters instead of the full model."""
    model_config: So101LoraModelConfig = field(default_factory=So101LoraModelConfig)
    """The model."""
    optimizer_config: So101LoraOptimizerConfig = field(default_factory=So101LoraOptimizerConfig)
    """The optimizer."""
    trainer_config: So101LoraTrainerConfig = field(default_factory=So101LoraTrainerConfig)
    """The run."""
    data_config: So101LoraDataConfig = field(default_factory=So101LoraDataConfig)
    """The data."""
    inference_config: So101LoraInferenceConfig = field(default_factory=So101LoraInferenceConfig)
    """The inference service."""


if __name__ == "__main__":
    main(So101LoraExp)
