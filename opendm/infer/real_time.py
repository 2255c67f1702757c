"""Chunks that go on from actions which the robot is executing already."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from opendm.constants.robot import ActionMode
from opendm.data.collator import Batch
from opendm.data.dataset import Sample
from opendm.data.transforms.actions import ActionRelative
from opendm.data.transforms.normalization import Normalize
from opendm.errors import ConfigError, DataError
from opendm.infer.cuda_graphs import run_prefix
from opendm.infer.euler import integrate
from opendm.infer.observation import Observation
from opendm.infer.policy import Policy, Prepared
from opendm.shapes import ActionMask, Actions


def act_from(
    policy: Policy,
    observation: Observation,
    given: np.ndarray,
    *,
    num_steps: int = 10,
    generator: torch.Generator | None = None,
) -> np.ndarray:
    """The chunk ``[horizon, dim]`` whose first K actions are ``given``, in the robot's units.

    While a chunk is computed the robot executes actions of the one before. Given as the beginning
    of the new one, they make it go on smoothly; see :func:`opendm.infer.euler.integrate`.

    Args:
        policy: what acts.
        observation: the present, when the first given action starts.
        given: ``[K, dim]`` with K of 0 or more, below the horizon.
        num_steps: integration steps.
        generator: what the noise is drawn from; torch's global one when absent.

    Raises:
        ConfigError: the policy composes rotations, which has no way back here.
        DataError: the observation or the given actions do not fit the checkpoint.
        CheckpointError: the model's output is not finite.
    """
    prepared = policy.prepare(observation)
    is_relative = prepared.layout.action_mode == ActionMode.RELATIVE.value
    if policy.options.compose_eef_rot and is_relative:
        raise ConfigError(
            "act_from cannot go on from given actions with compose_eef_rot: the model would be "
            "given differences of rotation vectors, and its own are rotations; act with act()"
        )
    given = np.asarray(given, dtype=np.float32)
    given = given.reshape(-1, prepared.layout.action_dim) if given.size == 0 else given
    dim, horizon = prepared.layout.action_dim, prepared.layout.chunk_size
    if given.ndim != 2 or given.shape[1] != dim or len(given) >= horizon:
        raise DataError(
            f"given actions have shape {list(given.shape)}; expected [K, {dim}] with K below "
            f"{horizon}"
        )
    if not np.isfinite(given).all():
        raise DataError("given actions are not finite")
    normalised = normalised_actions(policy, prepared, given)

    def sample(inputs: Batch, noise: Actions, mask: ActionMask, steps: int) -> Actions:
        weight = policy.model.model.action_in_proj.weight
        noise = noise.to(weight.device, weight.dtype)
        start = normalised.to(weight.device, weight.dtype)
        return integrate(
            policy.model,
            run_prefix(policy.model, inputs),
            noise,
            mask,
            num_steps=steps,
            given=start,
        )

    noise = None if generator is None else policy.draw_noise([generator])
    (chunk,) = policy.act_prepared([prepared], num_steps=num_steps, noise=noise, sampler=sample)
    return np.concatenate([given, chunk[len(given) :]])


def normalised_actions(
    policy: Policy, prepared: Prepared, actions: np.ndarray
) -> Float[Tensor, "1 K A"]:
    """Actions in the robot's units as the model knows them: the way back of a policy's result."""
    sample: Sample = {"action": actions, "state": prepared.state, "meta_data": prepared.meta}
    if prepared.layout.action_mode == ActionMode.RELATIVE.value:
        sample = ActionRelative()(sample)
    normalize = Normalize(None, ["action"], norm_stats_file=policy.norm_stats, clip_to_bounds=False)
    action = np.asarray(normalize(sample)["action"], dtype=np.float32)
    missing = policy.model.config.action_dim - action.shape[-1]
    return torch.from_numpy(np.pad(action, [(0, 0), (0, missing)]))[None]
