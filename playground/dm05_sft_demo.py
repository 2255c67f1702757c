"""Fine-tune DM0.5 on the shipped demonstrations; the template for your own data.

    python playground/dm05_sft_demo.py --model-config.model-name-or-path checkpoints/tiny

Copy this file, register your dataset, and change what differs.
"""

from dataclasses import dataclass, field

from opendm.exp.dm05_exp import (
    DM05DataConfig,
    DM05Exp,
    DM05InferenceConfig,
    DM05ModelConfig,
    DM05TrainerConfig,
    main,
)


@dataclass
class DemoModelConfig(DM05ModelConfig):
    """The model of the demo."""

    chunk_size: int = 32
    """Action steps of one chunk: 0.4 s at the demonstrations' 80 Hz."""


@dataclass
class DemoTrainerConfig(DM05TrainerConfig):
    """The run of the demo, with the published steps and batch."""

    output_dir: str = "user_checkpoints/dm05_sft_demo"
    """Folder of checkpoints, metrics and the final weights."""
    num_train_steps: int = 50_000
    """Optimizer steps of the run."""
    per_device_train_batch_size: int = 8
    """Samples per process and micro-step."""
    save_steps: int = 10_000
    """Optimizer steps between two checkpoints."""


@dataclass
class DemoDataConfig(DM05DataConfig):
    """The data of the demo: actions relative to the state, but for the gripper."""

    dataset_name: str = "demo"
    """Name of the registered dataset."""


@dataclass
class DemoInferenceConfig(DM05InferenceConfig):
    """The service of the demo."""

    output_action_dim: int = 4
    """Dimensions of the robot's action."""
    image_prompts: list[str] = field(default_factory=lambda: ["Corner", "Gripper"])
    """Names of the cameras in the prompt, in the order of the uploaded images."""


@dataclass
class DemoExp(DM05Exp):
    """Fine-tune DM0.5 on the shipped demonstrations."""

    model_config: DemoModelConfig = field(default_factory=DemoModelConfig)
    """The model."""
    trainer_config: DemoTrainerConfig = field(default_factory=DemoTrainerConfig)
    """The run."""
    data_config: DemoDataConfig = field(default_factory=DemoDataConfig)
    """The data."""
    inference_config: DemoInferenceConfig = field(default_factory=DemoInferenceConfig)
    """The inference service."""


if __name__ == "__main__":
    main(DemoExp)
