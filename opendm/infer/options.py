"""``PolicyOptions``: what a policy does to states and actions beyond what its checkpoint says."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Deviations from the training pipeline; the defaults are none."""

    clip_to_bounds: bool = True
    """Clip the state to its 1 % and 99 % quantiles before scaling, as training does."""
    clip_actions: bool = False
    """Clip actions to their 1 % and 99 % quantiles, in relative mode before the state is added."""
    compose_eef_rot: bool = False
    """End effector: roll, pitch, yaw in, and rotations composed instead of added."""
    full_action_mask: bool = False
    """Sample all dimensions of the model instead of the robot's only."""
    use_transformed_state: bool = False
    """Add relative actions to the normalised state instead of the state as received."""
    denorm_state: bool = False
    """Denormalise that state before relative actions are added to it."""
