"""Fine-tune low-rank adapters of DM0.5 on LIBERO.

bash script/dm05_launcher.sh --exp playground/dm05_libero_lora.py
"""

from dataclasses import dataclass, field

from opendm.constants.robot import ActionMode
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
class LiberoLoraModelConfig(DM05ModelConfig):
    """The model of LIBERO with adapters."""

    chunk_size: int = 10
    """Action steps of one chunk."""
    llm_attn_implementation: str = "eager"
    """Attention of the Gemma text layers."""
    vision_attn_implementation: str = "sdpa"
    """Attention of the vision tower."""
    action_attn_implementation: str = "sdpa"
    """Attention of the Action Expert."""
    vlm_gradient_checkpointing: bool = False
    """Keep activations of text model and vision tower."""
    ae_gradient_checkpointing: bool = False
    """Keep activations of the Action Expert."""


@dataclass
class LiberoLoraOptimizerConfig(DM05OptimizerConfig):
    """The rates of LIBERO with adapters."""

    base_lr: float = 5e-4
    """Peak of the learning rate."""
    warmup_steps: int = 500
    """Optimizer steps until the peak."""


@dataclass
class LiberoLoraTrainerConfig(DM05TrainerConfig):
    """The run of LIBERO with adapters, with the published steps and batch."""

    output_dir: str = "user_checkpoints/dm05_libero_lora"
    """Folder of checkpoints, metrics and the final weights."""
    num_train_steps: int = 50_000
    """Optimizer steps of the run."""
    per_device_train_batch_size: int = 4
    """Samples per process and micro-step."""
    save_steps: int = 10_000
    """Optimizer steps between two checkpoints."""
    fsdp1: bool = False
    """Every process keeps the whole model; the adapters are small."""
    save_only_model: bool = True
    """Keep the adapter and nothing to continue from."""


@dataclass
class LiberoLoraDataConfig(DM05DataConfig):
    """The data of LIBERO with adapters."""

    dataset_name: str = "libero_pi0_all"
    """Name of the registered dataset."""
    augment: bool = False
    """Pictures as a policy sees them: the published run varies nothing."""
    action_mode: ActionMode = ActionMode.ABSOLUTE
    """Actions are learnt as they are recorded."""
    add_state: bool = False
    """The state is not part of the prompt."""


@dataclass
class LiberoLoraInferenceConfig(DM05InferenceConfig):
    """The service of LIBERO with adapters."""

    output_action_dim: int = 7
    """Dimensions of the robot's action."""
    image_prompts: list[str] = field(default_factory=lambda: ["Front", "Wrist"])
    """Names of the cameras in the prompt, in the order of the uploaded images."""


@dataclass
class LiberoLoraExp(DM05Exp):
    """Fine-tune low-rank adapters of DM0.5 on LIBERO."""

    use_lora: bool | None = True
    """Train low-rank adapters instead of the full model."""
    model_config: LiberoLoraModelConfig = field(default_factory=LiberoLoraModelConfig)
    """The model."""
    optimizer_config: LiberoLoraOptimizerConfig = field(default_factory=LiberoLoraOptimizerConfig)
    """The optimizer."""
    trainer_config: LiberoLoraTrainerConfig = field(default_factory=LiberoLoraTrainerConfig)
    """The run."""
    data_config: LiberoLoraDataConfig = field(default_factory=LiberoLoraDataConfig)
    """The data."""
    inference_config: LiberoLoraInferenceConfig = field(default_factory=LiberoLoraInferenceConfig)
    """The inference service."""


if __name__ == "__main__":
    main(LiberoLoraExp)
