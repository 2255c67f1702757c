"""Train a small DM0.5 from random weights for Meta-World, on a CPU; `make demo-sim` runs it.

    python playground/collect_metaworld.py --output data/metaworld --image-size 96 \
        --tasks button-press-topdown-v3 --episodes-per-task 100 --heldout-per-task 0
    opendm tiny-checkpoint --size sim --dataset-name metaworld --output checkpoints/sim
    python playground/dm05_metaworld.py

In full float32: CPUs of today gain nothing from bfloat16 at this size.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from opendm.data.augmentations import TransformPipeline


@dataclass
class MetaWorldModelConfig(DM05ModelConfig):
    """The small model."""

    model_name_or_path: str | None = "checkpoints/sim"
    """Folder of the random weights to start from."""
    chunk_size: int = 16
    """Action steps of one chunk: 0.2 s at the simulator's 80 Hz."""
    bf16: bool = False
    """Keep weights in float32."""
    llm_attn_implementation: str = "sdpa"
    """Attention of the text layers."""
    vision_attn_implementation: str = "sdpa"
    """Attention of the vision tower."""
    liger_kernel: bool = False
    """Use Liger kernels on CUDA."""
    freeze_vlm_embedding: bool = False
    """Train the token embedding too: it starts at random."""
    vlm_gradient_checkpointing: bool = False
    """Activations of this model fit into memory."""
    ae_gradient_checkpointing: bool = False
    """Activations of this model fit into memory."""
    num_noise_samples: int = 4
    """Draws of noise and time per observation."""


@dataclass
class MetaWorldOptimizerConfig(DM05OptimizerConfig):
    """Rates for random weights."""

    base_lr: float = 1e-3
    """Learning rate after warm-up."""
    weight_decay: float = 0.01
    """Decoupled weight decay of every trainable parameter."""
    warmup_steps: int = 100
    """Optimizer steps over which the rate rises linearly from zero."""


@dataclass
class MetaWorldTrainerConfig(DM05TrainerConfig):
    """A run of some minutes."""

    output_dir: str = "user_checkpoints/dm05_metaworld"
    """Folder of checkpoints, metrics and the final weights."""
    num_train_steps: int = 1800
    """Optimizer steps of the run."""
    per_device_train_batch_size: int = 16
    """Samples per process and micro-step."""
    save_steps: int = 450
    """Optimizer steps between two checkpoints."""
    logging_steps: int = 50
    """Optimizer steps between two lines on the console."""
    dataloader_num_workers: int = 1
    """Processes that prepare samples; the other core trains."""
    model_max_length: int = 80
    """Tokens of the longest prefix: the sentence, the state and two pictures of 9."""
    bf16: bool = False
    """Compute in float32."""
    lr_scheduler_kwargs: dict[str, float] = field(default_factory=lambda: {"min_lr_rate": 0.02})
    """The cosine ends at this share of the rate."""
    ema_decay: float = 0.997
    """Decay of the moving average of the weights that is evaluated and exported."""


@dataclass
class MetaWorldDataConfig(DM05DataConfig):
    """Demonstrations of `collect_metaworld.py`."""

    dataset_name: str = "metaworld"
    """Name of the registered dataset."""
    action_mode: ActionMode = ActionMode.ABSOLUTE
    """Targets in the room: relative ones carry even a blind policy towards the goal."""

    def image_pipeline(self, image_size: int) -> "TransformPipeline":
        """Colours alone vary: a crop or a turn would move the goal by centimetres."""
        from opendm.data.augmentations import ColourTransformPipeline

        return ColourTransformPipeline(image_size)


@dataclass
class MetaWorldInferenceConfig(DM05InferenceConfig):
    """The service of this policy."""

    output_action_dim: int = 4
    """Dimensions of the robot's action."""
    image_prompts: list[str] = field(default_factory=lambda: ["Corner", "Gripper"])
    """Names of the cameras in the prompt, in the order of the uploaded images."""


@dataclass
class MetaWorldExp(DM05Exp):
    """Train a small DM0.5 from random weights for Meta-World."""

    model_config: MetaWorldModelConfig = field(default_factory=MetaWorldModelConfig)
    """The model."""
    optimizer_config: MetaWorldOptimizerConfig = field(default_factory=MetaWorldOptimizerConfig)
    """The optimizer."""
    trainer_config: MetaWorldTrainerConfig = field(default_factory=MetaWorldTrainerConfig)
    """The run."""
    data_config: MetaWorldDataConfig = field(default_factory=MetaWorldDataConfig)
    """The data."""
    inference_config: MetaWorldInferenceConfig = field(default_factory=MetaWorldInferenceConfig)
    """The inference service."""


if __name__ == "__main__":
    main(MetaWorldExp)
