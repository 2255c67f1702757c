"""What the numbers of single dimensions tell: constants, rare events, grippers, double deltas."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from opendm.check.problem import Problem
from opendm.constants.robot import MAX_ACTION_DIM, ActionMode, RobotStateDesc, desc_value
from opendm.data.index import FrameIndex

BLOCK_ROWS: Final = 1 << 14
MAX_ROWS: Final = 200_000
"""Rows that distributions are judged by, spread evenly over the dataset."""
RARE_SHARE: Final = 0.99
"""A dimension with the same value in more frames than this moves in rare events only."""
DELTA_RATIO: Final = 0.25
"""Actions below this share of their distance to the state are no targets near it: then the state
is at least three times as large as the action (T19, openpi issues 347 and 750)."""
FAR: Final = 2.0
"""Sizes of the actions that the mean state lies away from 0, where these lie around it."""
FOLLOWS: Final = 0.7
"""Correlation with the state of a target near it; differences have little."""
MIDDLE: Final = (0.25, 0.75)
MIDDLE_SHARE: Final = 0.5
"""A gripper whose targets lie in the middle of their range more often than this is told nothing
(T22, dexbotic issue 48)."""


def some_rows(index: FrameIndex, num_rows: int = MAX_ROWS) -> np.ndarray:
    """Numbers of at most ``num_rows`` rows, spread evenly; all where there are no more."""
    step = max(1, -(-index.num_frames // num_rows))
    return np.arange(0, index.num_frames, step)


def check_dims(
    index: FrameIndex,
    name: str,
    state_desc: Sequence["RobotStateDesc | str"] | None,
    action_mode: ActionMode,
) -> Iterator[Problem]:
    """All findings about single dimensions.

    Args:
        index: the dataset's numbers.
        name: of the dataset, for messages.
        state_desc: what each dimension is, where it is known.
        action_mode: of the run.
    """
    has_actions = bool(index.has_actions.any()) and index.action.shape[1] > 0
    yield from check_sizes(index, name, state_desc, action_mode)
    yield from _check_values(index.state, name, "state")
    if not has_actions:
        return
    rows = some_rows(index)
    state, action = index.state[rows], index.action[rows]
    recorded = ~np.isnan(action[:, 0])
    state, action = state[recorded], action[recorded]
    yield from _check_values(index.action, name, "action")
    if state_desc is None or not len(state_desc) == action.shape[1] == state.shape[1]:
        return
    is_gripper = np.array([desc_value(d) == RobotStateDesc.GRIPPER.value for d in state_desc])
    if action_mode is ActionMode.RELATIVE:
        yield from check_double_delta(state[:, ~is_gripper], action[:, ~is_gripper], name)
    for dim in np.flatnonzero(is_gripper).tolist():
        yield from check_gripper(action[:, dim], dim, name)


def check_sizes(
    index: FrameIndex,
    name: str,
    state_desc: Sequence["RobotStateDesc | str"] | None,
    action_mode: ActionMode,
) -> Iterator[Problem]:
    """Numbers of dimensions against the model, the registration and each other."""
    state_size = index.state.shape[1]
    action_size = index.action.shape[1] or state_size
    if action_size > MAX_ACTION_DIM:
        yield Problem(name, "action", f"has {action_size} dimensions; the model has "
                      f"{MAX_ACTION_DIM}, none is cut silently", code="action_wide")  # fmt: skip
    if state_desc is not None and len(state_desc) != state_size:
        yield Problem(name, "state_desc", f"has {len(state_desc)} entries for states of "
                      f"{state_size} values", code="state_desc")  # fmt: skip
    if action_mode is ActionMode.RELATIVE and action_size != state_size:
        yield Problem(name, "action", f"has {action_size} dimensions and state {state_size}; "
                      "relative actions need the same ones (or choose ABSOLUTE)",
                      code="relative_sizes")  # fmt: skip


def _check_values(table: np.ndarray, name: str, field: str) -> Iterator[Problem]:
    """NaN and infinities, constants and rare events of ``[N, D]`` values.

    Rows of episodes without actions are NaN from end to end and do not count.
    """
    if not len(table):
        return
    low, high = _extremes(table)
    sample = table[:: max(1, -(-len(table) // MAX_ROWS))]
    sample = sample[~np.isnan(sample).all(axis=1)]
    for dim in range(table.shape[1]):
        where = f"{field}[{dim}]"
        if not (np.isfinite(low[dim]) and np.isfinite(high[dim])):
            reason = f"reaches from {low[dim]} to {high[dim]}; expected finite numbers"
            yield Problem(name, where, reason, code="not_finite")
        elif low[dim] == high[dim]:
            yield Problem(name, where, f"is {low[dim]:g} in all frames", "warning", "constant_dim")
        else:
            yield from _check_rare(sample[:, dim], name, where)


def _extremes(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least and greatest of each column; NaN where a row has one among numbers."""
    lows, highs = [], []
    for start in range(0, len(table), BLOCK_ROWS):
        block = table[start : start + BLOCK_ROWS]
        low, high = block.min(axis=0), block.max(axis=0)
        if np.isnan(low).any():
            block = block[~np.isnan(block).all(axis=1)]
            low = block.min(axis=0, initial=np.inf)
            high = block.max(axis=0, initial=-np.inf)
        if len(block):
            lows.append(low)
            highs.append(high)
    return np.min(lows, axis=0), np.max(highs, axis=0)


def _check_rare(values: np.ndarray, name: str, where: str) -> Iterator[Problem]:
    middle = np.partition(values, len(values) // 2)[len(values) // 2]
    share = float((values == middle).mean())
    if share > RARE_SHARE:
        reason = f"is {middle:g} in {share:.2%} of the frames; what else it does is rarely seen"
        yield Problem(name, where, reason, "warning", "rare_dim")


def check_double_delta(state: np.ndarray, action: np.ndarray, name: str) -> Iterator[Problem]:
    """Whether the recorded actions look like differences already.

    Args:
        state: ``[n, D]`` of the dimensions that will be made relative.
        action: ``[n, D]``.
        name: of the dataset.
    """
    if not action.size:
        return
    size = np.sqrt(np.square(action).mean(axis=0))
    distance = np.sqrt(np.square(action - state).mean(axis=0))
    is_small = size < DELTA_RATIO * distance
    is_centred = np.abs(action.mean(axis=0)) < action.std(axis=0)
    is_elsewhere = is_centred & (np.abs(state.mean(axis=0)) > FAR * size)
    follows = _correlation(state, action) > FOLLOWS
    if 2 * is_small.sum() > len(is_small) or (is_elsewhere.any() and not follows.any()):
        yield Problem(
            name,
            "action",
            f"lies near 0 (typical size {np.median(size):.3g}) while the state does not (typical "
            f"distance {np.median(distance):.3g}): these look like differences, and RELATIVE would "
            "subtract the state again. Choose ABSOLUTE, or check the units",
            "warning",
            "double_delta",
        )


def _correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of the columns of two tables ``[n, D]``; 0 where one does not vary."""
    covariance = ((a - a.mean(axis=0)) * (b - b.mean(axis=0))).mean(axis=0)
    spread = a.std(axis=0) * b.std(axis=0)
    return np.divide(covariance, spread, out=np.zeros_like(spread), where=spread > 0)


def check_gripper(values: np.ndarray, dim: int, name: str) -> Iterator[Problem]:
    """Whether a gripper's targets say open and closed."""
    low, high = values.min(initial=np.inf), values.max(initial=-np.inf)
    if not low < high:
        return  # reported as a constant
    places = (values - low) / (high - low)
    share = float(((places > MIDDLE[0]) & (places < MIDDLE[1])).mean())
    if share > MIDDLE_SHARE:
        reason = (
            f"is a gripper whose target lies in the middle of {low:g} .. {high:g} in {share:.0%} "
            "of the frames; a command says open or closed. Is a measured width recorded instead?"
        )
        yield Problem(name, f"action[{dim}]", reason, "warning", "gripper")
