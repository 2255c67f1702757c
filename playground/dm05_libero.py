"""Fine-tune DM0.5 on LIBERO, all four suites.

bash script/dm05_launcher.sh --exp playground/dm05_libero.py
"""

from dataclasses import dataclass, field

from opendm.constants.robot import ActionMode
from opendm.exp.dm05_exp import (
    DM05DataConfig,
    DM05Exp,
    DM05InferenceConfig,
    DM05ModelConfig,
    DM05TrainerConfig,
    main,
)


@dataclass
class LiberoModelConfig(DM05ModelConfig):
    """The model of LIBERO."""

    chunk_size: int = 10
    """Action steps of one chunk."""


@dataclass
class LiberoTrainerConfig(DM05TrainerConfig):
    """The run of LIBERO, with the published steps and batch."""

    output_dir: str = "user_checkpoints/dm05_libero"
    """Folder of checkpoints, metrics and the final weights."""
    num_train_steps: int = 80_000
    """Optimizer steps of the run."""
    per_device_train_batch_size: int = 8
    """Samples per process and micro-step."""
    save_steps: int = 10_000
    """Optimizer steps between two checkpoints."""


@dataclass
class LiberoDataConfig(DM05DataConfig):
    """The data of LIBERO."""

    dataset_name: str = "libero_pi0_all"
    """Name of the registered dataset."""
    augment: bool = False
    """Pictures as a policy sees them: the published run varies nothing."""
    action_mode: ActionMode = ActionMode.ABSOLUTE
    """Actions are learnt as they are recorded."""
    add_state: bool = False
    """The state is not part of the prompt."""


@dataclass
class LiberoInferenceConfig(DM05InferenceConfig):
    """The service of LIBERO."""

    output_action_dim: int = 7
    """Dimensions of the robot's action."""
    image_prompts: list[str] = field(default_factory=lambda: ["Front", "Wrist"])
    """Names of the cameras in the prompt, in the order of the uploaded images."""


@dataclass
class LiberoExp(DM05Exp):
    """Fine-tune DM0.5 on LIBERO, all four suites."""

    model_config: LiberoModelConfig = field(default_factory=LiberoModelConfig)
    """The model."""
    trainer_config: LiberoTrainerConfig = field(default_factory=LiberoTrainerConfig)
    """The run."""
    data_config: LiberoDataConfig = field(default_factory=LiberoDataConfig)
    """The data."""
    inference_config: LiberoInferenceConfig = field(default_factory=LiberoInferenceConfig)
    """The inference service."""


if __name__ == "__main__":
    main(LiberoExp)
