"""From recorded frames to the action chunk that is learnt, and back to the robot's actions."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from opendm.constants.robot import MAX_ACTION_DIM, ActionMode, RobotStateDesc, desc_value
from opendm.data.angles import wrap_angle
from opendm.data.dataset import Sample
from opendm.data.episodes import check_vector, location, parse_frame
from opendm.data.source import EpisodeFrames, Field
from opendm.data.transforms.pipeline import Pipeline
from opendm.data.transforms.rotation import compose_rotation_vectors, rpy_to_rotation_vector
from opendm.errors import DataError

GRIPPER_ONLY: Final = (RobotStateDesc.GRIPPER,)
EEF_MODES: Final = ("eef", "ee", "end effector")


class BuildActionChunk:
    """The next ``action_horizon`` targets of a frame.

    With recorded actions these are the actions of frames t .. t+h-1, otherwise the states of frames
    t+1 .. t+h. Past the end the last one is repeated, and ``action_mask`` is false on repetitions.
    Writes ``state`` [D], ``action`` [1, h, D] and ``action_mask`` [1, h, D].
    """

    def __init__(self, action_horizon: int, *, dtype: "np.dtype | type" = np.float32) -> None:
        self.action_horizon = action_horizon
        self.dtype = dtype

    def __call__(self, sample: Sample) -> Sample:
        frames: Sequence[Any] = sample["raw_lines"]
        is_indexed = isinstance(frames, EpisodeFrames)
        state = sample["state"] if is_indexed else check_vector(sample, "state", None, "this frame")
        first: int = sample["meta_data"]["frame_index"]
        field: Field = "action" if "action" in sample else "state"
        first += field == "state"
        real = range(first, min(first + self.action_horizon, len(frames)))
        if not real:
            raise DataError(
                "the last frame of an episode has no target where no action is recorded"
            )
        if isinstance(frames, EpisodeFrames):
            rows = frames.vectors(field, real.start, real.stop)
        else:
            rows = _read_vectors(sample, real, field)
        action = np.empty((1, self.action_horizon, rows.shape[-1]), self.dtype)
        action[:, : len(real)] = rows
        action[:, len(real) :] = rows[-1]
        mask = np.zeros(action.shape, dtype=bool)
        mask[:, : len(real)] = True
        sample["state"] = np.asarray(state, dtype=self.dtype)
        sample["action"] = action
        sample["action_mask"] = mask
        return sample

    def __repr__(self) -> str:
        return f"BuildActionChunk(action_horizon={self.action_horizon})"


def _read_vectors(sample: Sample, indices: range, field: Field) -> np.ndarray:
    """Vectors of frames that are given as plain lines, float64 ``[T, D]``.

    Raises:
        DataError: a line is bad; the message names it.
    """
    path = sample["meta_data"].get("episode_path", "episode")
    rows: list[list[float]] = []
    for index in indices:
        line, size = sample["raw_lines"][index], len(rows[0]) if rows else None
        try:
            rows.append(check_vector(parse_frame(line, ""), field, size, ""))
        except DataError:  # finding the line's number reads the file
            where = location(path, index)
            check_vector(parse_frame(line, where), field, size, f"{where}: this frame")
    return np.asarray(rows, dtype=np.float64)


def relative_dimensions(
    state_desc: "Sequence[RobotStateDesc | str] | None",
    non_delta_ids: Sequence["RobotStateDesc | str"],
    state: np.ndarray,
    action: np.ndarray,
) -> np.ndarray:
    """Which dimensions are differences to the state, bool ``[D]``.

    Raises:
        DataError: no state_desc, or sizes that do not agree.
    """
    if state_desc is None:
        raise DataError(
            "relative actions need state_desc in the dataset's registration (one of joint, eef, "
            "gripper per dimension), or --data-config.action-mode absolute"
        )
    sizes = {len(state_desc), state.shape[-1], action.shape[-1]}
    if len(sizes) != 1:
        raise DataError(
            f"state has {state.shape[-1]} values, action {action.shape[-1]} and state_desc "
            f"{len(state_desc)}; relative actions need the same number of each"
        )
    kept = {desc_value(desc) for desc in non_delta_ids}
    return np.array([desc_value(desc) not in kept for desc in state_desc])


def wrap_angles(values: np.ndarray, meta: Mapping[str, Any], is_relative: np.ndarray) -> np.ndarray:
    """``values`` ``[..., D]`` with relative ``angle_dims`` of the registration in [-pi, pi)."""
    dims = [dim for dim in meta.get("angle_dims") or () if is_relative[dim]]
    if dims:
        values[..., dims] = wrap_angle(values[..., dims])
    return values


class ActionRelative:
    """Action minus state, but for the dimensions in ``non_delta_ids``.

    Differences of the registration's ``angle_dims`` go the short way round the circle.
    """

    def __init__(self, non_delta_ids: Sequence["RobotStateDesc | str"] = GRIPPER_ONLY) -> None:
        self.non_delta_ids = tuple(non_delta_ids)

    def __call__(self, sample: Sample) -> Sample:
        state, action = sample["state"], sample["action"]
        desc = sample["meta_data"].get("state_desc")
        is_relative = relative_dimensions(desc, self.non_delta_ids, state, action)
        difference = action - np.where(is_relative, state, 0).astype(action.dtype)
        sample["action"] = wrap_angles(difference, sample["meta_data"], is_relative)
        return sample

    def __repr__(self) -> str:
        return f"ActionRelative(non_delta_ids={[desc_value(d) for d in self.non_delta_ids]})"


class ActionAbsolute:
    """State plus action, the inverse of :class:`ActionRelative`.

    With ``compose_eef_rot`` the rotation triple of each run of six end-effector dimensions is
    composed as a rotation (delta after current, both rotation vectors) instead of added.
    """

    def __init__(
        self,
        non_delta_ids: Sequence["RobotStateDesc | str"] = GRIPPER_ONLY,
        compose_eef_rot: bool = False,  # noqa: FBT001, FBT002 - public signature
    ) -> None:
        self.non_delta_ids = tuple(non_delta_ids)
        self.compose_eef_rot = compose_eef_rot

    def __call__(self, sample: Sample) -> Sample:
        state, action = sample["state"], sample["action"]
        desc = sample["meta_data"].get("state_desc")
        is_relative = relative_dimensions(desc, self.non_delta_ids, state, action)
        absolute = action + np.where(is_relative, state, 0).astype(action.dtype)
        absolute = wrap_angles(absolute, sample["meta_data"], is_relative)
        if self.compose_eef_rot:
            for start in _rotation_starts(desc):
                part = slice(start, start + 3)
                absolute[..., part] = compose_rotation_vectors(action[..., part], state[part])
        sample["action"] = absolute
        return sample


def _rotation_starts(state_desc: "Sequence[RobotStateDesc | str]") -> list[int]:
    starts, run = [], 0
    for index, desc in enumerate(state_desc):
        run = run + 1 if desc_value(desc) == RobotStateDesc.EEF.value else 0
        if run and run % 6 == 0:
            starts.append(index - 2)
    return starts


class BuildAction:
    """Chunk and, in relative mode, the difference to the state, taken in float64."""

    def __init__(
        self,
        action_horizon: int,
        action_mode: ActionMode = ActionMode.RELATIVE,
        non_delta_ids: Sequence["RobotStateDesc | str"] = GRIPPER_ONLY,
    ) -> None:
        steps: list[Any] = [BuildActionChunk(action_horizon, dtype=np.float64)]
        if action_mode is ActionMode.RELATIVE:
            steps.append(ActionRelative(non_delta_ids))
        self.pipeline = Pipeline(steps)

    def __call__(self, sample: Sample) -> Sample:
        sample = self.pipeline(sample)
        sample["state"] = sample["state"].astype(np.float32)
        sample["action"] = sample["action"].astype(np.float32)
        return sample

    def __repr__(self) -> str:
        return f"BuildAction({self.pipeline!r})"


class ArrangeState:
    """End-effector states with roll, pitch and yaw, as rotation vectors (inference only)."""

    def __call__(self, sample: Sample) -> Sample:
        mode = str(sample["meta_data"].get("control_mode") or "").lower()
        if mode not in EEF_MODES:
            return sample
        state = np.asarray(sample["state"], dtype=np.float64)
        if state.size not in (7, 14):
            raise DataError(
                f"state has {state.size} values; end-effector control expects 7 per arm "
                "(x, y, z, roll, pitch, yaw, gripper), so 7 or 14"
            )
        arms = state.reshape(-1, 7).copy()
        arms[:, 3:6] = [rpy_to_rotation_vector(rpy) for rpy in arms[:, 3:6]]
        desc = [RobotStateDesc.EEF] * 6 + [RobotStateDesc.GRIPPER]
        sample["state"] = arms.reshape(-1).astype(np.float32)
        sample["meta_data"] = {**sample["meta_data"], "state_desc": desc * len(arms)}
        return sample


class PadAction:
    """Pad action and mask with zeros and false to ``shared_dim`` dimensions."""

    def __init__(self, shared_dim: int = MAX_ACTION_DIM) -> None:
        self.shared_dim = shared_dim

    def __call__(self, sample: Sample) -> Sample:
        if sample.get("action") is None:
            return sample
        size = sample["action"].shape[-1]
        if size > self.shared_dim:
            raise DataError(
                f"action has {size} dimensions, the model has {self.shared_dim}; drop dimensions "
                "in the dataset (they are never cut silently)"
            )
        for key in ("action", "action_mask"):
            values = np.asarray(sample[key])
            padded = np.zeros((*values.shape[:-1], self.shared_dim), values.dtype)
            padded[..., :size] = values
            sample[key] = padded
        return sample


def unpad_action(action: np.ndarray, size: int) -> np.ndarray:
    """The first ``size`` dimensions, the inverse of :class:`PadAction`."""
    return action[..., :size]
