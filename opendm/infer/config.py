"""``--inference-config.*``."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class DM05InferenceConfig:
    """How a trained policy is served."""

    port: int = 7891
    """Port of the HTTP service."""
    diffusion_steps: int = 10
    """Integration steps from noise to action, fixed for the life of the service."""
    max_history_images: int = 5
    """Most history images of a request, and the history slots of the prompt."""
    output_action_dim: int = 14
    """Dimensions of the returned action; must equal those of the statistics."""
    image_prompts: list[str] = field(default_factory=lambda: ["Head", "Left wrist", "Right wrist"])
    """Labels of the images of a request, in order."""
    backend: Literal["default", "fast"] = "default"
    """Which implementation runs the model."""
    vision_trt_engine_path: str | None = None
    """Vision engine of the fast backend; none means checkpoints/trt_engines/dm05_vision.engine."""
    force_rebuild: bool = False
    """Build the vision engine even where one exists."""
    prefix_seq_len_buckets: list[int] | None = None
    """Prefix lengths that the fast backend captures; none means 576 704 768 896 1024."""
    clip_to_bounds: bool = True
    """Clip the state to its 1 % and 99 % quantiles before scaling."""
    compose_eef_rot: bool = False
    """End effector: roll, pitch, yaw in, and rotations composed instead of added."""
    full_action_mask: bool = False
    """Sample all dimensions of the model instead of the robot's only."""
    use_transformed_state: bool = False
    """Add relative actions to the normalised state instead of the state as received."""
    state_layout: str = "identity"
    """Order of the state's dimensions."""
    denorm_state: bool = False
    """Denormalise the state, too, before relative actions are added to it."""
    fast_prefix_len: int | None = None
    """Prefix capacity of the fast backend; none means 1024."""
