"""Fine-tune DM0.5 on RoboTwin 2.0 with Muon.

bash script/dm05_launcher.sh --exp playground/dm05_robotwin2.py
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
class RoboTwin2ModelConfig(DM05ModelConfig):
    """The model of RoboTwin 2.0."""

    chunk_size: int = 50
    """Action steps of one chunk."""


@dataclass
class RoboTwin2OptimizerConfig(DM05OptimizerConfig):
    """The rates of RoboTwin 2.0."""

    optim: str = "muon_adamw"
    """The Action Expert's matrices are orthogonalised."""
    base_lr: float = 4e-5
    """Peak of the learning rate."""


@dataclass
class RoboTwin2TrainerConfig(DM05TrainerConfig):
    """The run of RoboTwin 2.0, with the published steps and batch."""

    output_dir: str = "user_checkpoints/dm05_robotwin2"
    """Folder of checkpoints, metrics and the final weights."""
    num_train_steps: int = 100_000
    """Optimizer steps of the run."""
    per_device_train_batch_size: int = 32
    """Samples per process and micro-step."""
    save_steps: int = 10_000
    """Optimizer steps between two checkpoints."""


@dataclass
class RoboTwin2DataConfig(DM05DataConfig):
    """The data of RoboTwin 2.0."""

    dataset_name: str = "robotwin2_generalist"
    """Name of the registered dataset."""
    augment: bool = False
    """Pictures as a policy sees them: the published run varies nothing."""
    action_mode: ActionMode = ActionMode.ABSOLUTE
    """Actions are learnt as they are recorded."""


@dataclass
class RoboTwin2InferenceConfig(DM05InferenceConfig):
    """The service of RoboTwin 2.0."""

    output_action_dim: int = 14
    """Dimensions of the robot's action."""
    image_prompts: list[str] = field(default_factory=lambda: ["Head", "Left wrist", "Right wrist"])
    """Names of the cameras in the prompt, in the order of the uploaded images."""


@dataclass
class RoboTwin2Exp(DM05Exp):
    """Fine-tune DM0.5 on RoboTwin 2.0 with Muon."""

    model_config: RoboTwin2ModelConfig = field(default_factory=RoboTwin2ModelConfig)
    """The model."""
    optimizer_config: RoboTwin2OptimizerConfig = field(default_factory=RoboTwin2OptimizerConfig)
    """The optimizer."""
    trainer_config: RoboTwin2TrainerConfig = field(default_factory=RoboTwin2TrainerConfig)
    """The run."""
    data_config: RoboTwin2DataConfig = field(default_factory=RoboTwin2DataConfig)
    """The data."""
    inference_config: RoboTwin2InferenceConfig = field(default_factory=RoboTwin2InferenceConfig)
    """The inference service."""


if __name__ == "__main__":
    main(RoboTwin2Exp)
