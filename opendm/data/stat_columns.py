"""What is counted of one part of the data: states and action chunks, one dimension at a time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from opendm.constants.robot import RobotStateDesc
from opendm.data.angles import wrap_angle
from opendm.data.index import FrameIndex
from opendm.data.norm_stats_job import ActionDataset
from opendm.errors import DataError

BLOCK_SIZE: Final = 1 << 18
"""Values handled at a time: a few arrays of this size stay in the processor's cache."""

Desc = Sequence["RobotStateDesc | str"]


@dataclass(frozen=True, slots=True, eq=False)
class StatisticsPart:
    """Episodes of one dataset whose actions are learnt through the standard action transform."""

    index: FrameIndex
    episodes: Sequence[int]
    robot_type: str | None
    action_transform: Callable[[dict[str, Any]], dict[str, Any]]
    state_desc: Desc | None = None
    angle_dims: Sequence[int] = ()
    """Dimensions whose differences to the state go the short way round the circle."""

    @property
    def num_samples(self) -> int:
        """Frames with a target."""
        return sum(self.index.num_samples(episode) for episode in self.episodes)


@dataclass(frozen=True, slots=True, eq=False)
class SampledPart:
    """Samples of a transform or a dataset of one's own: every one is made, and counted.

    Robot types stand in their ``meta_data``.
    """

    samples: ActionDataset
    state_desc: Desc | None = None

    @property
    def num_samples(self) -> int:
        """How many there are."""
        return len(self.samples)


Part = StatisticsPart | SampledPart


@dataclass(frozen=True, slots=True)
class ActionPlan:
    """What the standard action transform does, in numbers."""

    horizon: int
    non_delta_ids: tuple["RobotStateDesc | str", ...] | None
    """None: actions are absolute."""


def standard_plan(transform: object) -> ActionPlan | None:
    """The plan of a ``BuildAction`` with its own steps; None of anything else."""
    from opendm.data.transforms.actions import ActionRelative, BuildAction, BuildActionChunk
    from opendm.data.transforms.pipeline import Pipeline

    if type(transform) is not BuildAction or type(transform.pipeline) is not Pipeline:
        return None
    steps: list[Any] = transform.pipeline.transforms
    kinds = [type(step) for step in steps]
    if kinds not in ([BuildActionChunk], [BuildActionChunk, ActionRelative]):
        return None
    if steps[0].dtype != np.float64:
        return None
    return ActionPlan(steps[0].action_horizon, steps[1].non_delta_ids if steps[1:] else None)


class Columns(ABC):
    """Rows of vectors, given dimension by dimension."""

    num_rows: int
    num_dims: int

    @abstractmethod
    def blocks(self, dim: int) -> Callable[[], Iterator[np.ndarray]]:
        """Returns what gives all float32 values of a dimension, again at each call."""


class RowColumns(Columns):
    """Rows in memory, ``[n, D]``."""

    def __init__(self, rows: np.ndarray) -> None:
        self.num_rows, self.num_dims = rows.shape
        self._rows = rows

    def blocks(self, dim: int) -> Callable[[], Iterator[np.ndarray]]:
        column = np.ascontiguousarray(self._rows[:, dim], np.float32)
        return lambda: iter([column])


@dataclass(frozen=True, slots=True, eq=False)
class UsedFrames:
    """The frames that training uses, those with long chunks first."""

    rows: np.ndarray
    """int64 ``[n]``: rows of the index."""
    num_with: np.ndarray
    """int64 ``[H]``: how many of them, from the first, have a real action k."""


def used_frames(part: StatisticsPart, horizon: int, chosen: np.ndarray | None) -> UsedFrames:
    """The frames of a part.

    Args:
        part: the data.
        horizon: actions of a chunk.
        chosen: int64 numbers of the samples that count, None for all.
    """
    index = part.index
    episodes = np.asarray(part.episodes, np.int64)
    starts, ends = index.starts[episodes], index.starts[episodes + 1]
    # without recorded actions the next state is the target, and the last frame has none
    num_samples = np.maximum(ends - starts - ~index.has_actions[episodes], 0)
    before = np.cumsum(num_samples) - num_samples
    rows = np.arange(num_samples.sum()) + np.repeat(starts - before, num_samples)
    left = np.repeat(starts + num_samples, num_samples) - rows
    if chosen is not None:
        rows, left = rows[chosen], left[chosen]
    left = np.minimum(left, horizon)
    order = np.argsort(-left, kind="stable")
    num_with = np.array([np.count_nonzero(left > k) for k in range(horizon)])
    return UsedFrames(rows[order], num_with)


class StateColumns(Columns):
    """The state of every used frame."""

    def __init__(self, index: FrameIndex, used: UsedFrames) -> None:
        self.num_rows, self.num_dims = len(used.rows), index.state.shape[1]
        self._index, self._rows = index, used.rows

    def blocks(self, dim: int) -> Callable[[], Iterator[np.ndarray]]:
        column = _as_float32(self._index.state[:, dim][self._rows])
        return lambda: iter([column])


class ChunkColumns(Columns):
    """Every real action of the chunk of every used frame.

    Args:
        part: the data.
        used: its frames.
        is_relative: bool ``[D]``: dimensions from which the frame's state is subtracted.
    """

    def __init__(self, part: StatisticsPart, used: UsedFrames, is_relative: np.ndarray) -> None:
        self.num_rows, self.num_dims = int(used.num_with.sum()), len(is_relative)
        self._index, self._used, self._is_relative = part.index, used, is_relative
        self._angle_dims = frozenset(part.angle_dims)
        recorded = part.index.has_actions[np.asarray(part.episodes, np.int64)]
        self._has_all, self._has_any = bool(recorded.all()), bool(recorded.any())

    def blocks(self, dim: int) -> Callable[[], Iterator[np.ndarray]]:
        target = self._target(dim)
        state = self._index.state[:, dim][self._used.rows] if self._is_relative[dim] else None
        return lambda: self._values(target, state, is_angle=dim in self._angle_dims)

    def _target(self, dim: int) -> np.ndarray:
        """The first action of the chunk of every row of the index, float64 ``[N]``."""
        if self._has_all:
            return np.ascontiguousarray(self._index.action[:, dim])
        state = self._index.state[:, dim]
        following = np.concatenate([state[1:], state[-1:]])
        if not self._has_any:
            return following
        is_recorded = np.repeat(self._index.has_actions, np.diff(self._index.starts))
        return np.where(is_recorded, self._index.action[:, dim], following)

    def _values(
        self, target: np.ndarray, state: np.ndarray | None, *, is_angle: bool
    ) -> Iterator[np.ndarray]:
        for k, count in enumerate(self._used.num_with.tolist()):
            for start in range(0, count, BLOCK_SIZE):
                part = slice(start, min(start + BLOCK_SIZE, count))
                values = target[k:].take(self._used.rows[part])
                if state is not None:
                    values -= state[part]
                    values = wrap_angle(values) if is_angle else values
                yield _as_float32(values)


def _as_float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # what becomes infinite is refused with its dimension
        return values.astype(np.float32)


def part_columns(
    part: StatisticsPart, plan: ActionPlan, chosen: np.ndarray | None
) -> dict[str, Columns]:
    """``state`` and ``action`` of a part with a standard action transform.

    Raises:
        DataError: episodes with and without actions differ in size, or ``state_desc`` does not fit.
    """
    from opendm.data.transforms.actions import relative_dimensions

    index = part.index
    recorded = {bool(index.has_actions[episode]) for episode in part.episodes}
    tables = [index.action if has_actions else index.state for has_actions in sorted(recorded)]
    sizes = {table.shape[1] for table in tables}
    if len(sizes) != 1:
        raise DataError(
            f"recorded actions have {index.action.shape[1]} values and states "
            f"{index.state.shape[1]}; where some episodes record no actions, the next states stand "
            "for them, and both need one length"
        )
    is_relative = np.zeros(sizes.pop(), bool)
    if plan.non_delta_ids is not None:
        is_relative = relative_dimensions(
            part.state_desc, plan.non_delta_ids, index.state[:1], tables[0][:1]
        )
    used = used_frames(part, plan.horizon, chosen)
    return {
        "state": StateColumns(index, used),
        "action": ChunkColumns(part, used, is_relative),
    }
