"""Fine-tune DM0.5 on VLA-Arena with Muon.

bash script/dm05_launcher.sh --exp playground/dm05_vla_arena.py
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
class VlaArenaModelConfig(DM05ModelConfig):
    """The model of VLA-Arena."""

    chunk_size: int = 20
    """Action steps of one chunk."""


@dataclass
class VlaArenaOptimizerConfig(DM05OptimizerConfig):
    """The rates of VLA-Arena."""

    optim: str = "muon_adamw"
    """The Action Expert's matrices are orthogonalised."""
    base_lr: float = 2e-5
    """Peak of the learning rate."""


@dataclass
class VlaArenaTrainerConfig(DM05TrainerConfig):
    """The run of VLA-Arena, with the published steps and batch."""

    output_dir: str = "user_checkpoints/dm05_vla_arena"
    """Folder of checkpoints, metrics and the final weights."""
    num_train_steps: int = 60_000
    """Optimizer steps of the run."""
    per_device_train_batch_size: int = 8
    """Samples per process and micro-step."""
    save_steps: int = 5000
    """Optimizer steps between two checkpoints."""


@dataclass
class VlaArenaDataConfig(DM05DataConfig):
    """The data of VLA-Arena."""

    dataset_name: str = "vla_arena_eef_L0_L"
    """Name of the registered dataset."""
    augment: bool = False
    """Pictures as a policy sees them: the published run varies nothing."""
    action_mode: ActionMode = ActionMode.ABSOLUTE
    """Actions are learnt as they are recorded."""
    add_state: bool = False
    """The state is not part of the prompt."""


@dataclass
class VlaArenaInferenceConfig(DM05InferenceConfig):
    """The service of VLA-Arena."""

    output_action_dim: int = 7
    """Dimensions of the robot's action."""
    image_prompts: list[str] = field(default_factory=lambda: ["Front", "Wrist"])
    """Names of the cameras in the prompt, in the order of the uploaded images."""


@dataclass
class VlaArenaExp(DM05Exp):
    """Fine-tune DM0.5 on VLA-Arena with Muon."""

    model_config: VlaArenaModelConfig = field(default_factory=VlaArenaModelConfig)
    """The model."""
    optimizer_config: VlaArenaOptimizerConfig = field(default_factory=VlaArenaOptimizerConfig)
    """The optimizer."""
    trainer_config: VlaArenaTrainerConfig = field(default_factory=VlaArenaTrainerConfig)
    """The run."""
    data_config: VlaArenaDataConfig = field(default_factory=VlaArenaDataConfig)
    """The data."""
    inference_config: VlaArenaInferenceConfig = field(default_factory=VlaArenaInferenceConfig)
    """The inference service."""


if __name__ == "__main__":
    main(VlaArenaExp)
