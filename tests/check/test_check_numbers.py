"""Findings about the numbers: each is there when its cause is, and not otherwise."""

from dataclasses import replace

import numpy as np
import pytest

from opendm.check.copies import SplitEpisodes, check_copies
from opendm.check.dims import check_dims, check_gripper
from opendm.check.episodes import check_episodes, check_samples
from opendm.constants.robot import ActionMode, RobotStateDesc
from opendm.data.index import FrameIndex

JOINTS = [RobotStateDesc.JOINT] * 3 + [RobotStateDesc.GRIPPER]


def make_index(*, lengths=(20, 30), has_actions=True, seed=0):
    """Joints that move around 1 .. 3, targets near them, and a gripper that opens and closes."""
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    state = rng.normal([1.0, 2.0, 3.0, 0.0], 0.3, (count, 4))
    state[:, 3] = rng.random(count)
    action = state + rng.normal(0, 0.02, (count, 4))
    action[:, 3] = rng.integers(0, 2, count)
    return FrameIndex(
        files=(), episodes=tuple(f"e{n}" for n in range(len(lengths))), tasks=("go",), dropped=(),
        episode_file=np.zeros(len(lengths), np.int32),
        has_actions=np.full(len(lengths), has_actions),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        state=state, action=action if has_actions else np.empty((count, 0)),
        task=np.zeros(count, np.int32), position=np.arange(count),
        num_bytes=np.zeros(count, np.int32),
    )  # fmt: skip


def codes(index, *, mode=ActionMode.RELATIVE, desc=JOINTS):
    problems = [*check_dims(index, "set", desc, mode)]
    problems += check_episodes(index, range(len(index.episodes)), "set", 4)
    return {(problem.field, problem.code) for problem in problems}


def test_good_numbers_have_no_problem():
    assert codes(make_index()) == set()
    assert codes(make_index(), mode=ActionMode.ABSOLUTE) == set()


def test_recorded_differences_are_suspected_in_relative_mode_only():
    index = make_index()
    joints = index.action[:, :3] - index.state[:, :3]
    deltas = replace(index, action=np.column_stack([joints, index.action[:, 3]]))
    assert codes(deltas) == {("action", "double_delta")}
    assert codes(deltas, mode=ActionMode.ABSOLUTE) == set()


def test_scaled_differences_are_suspected_where_few_states_lie_away_from_zero():
    """As in LIBERO: three positions and three angles, of which one or two are never near 0."""
    rng = np.random.default_rng(0)
    index = make_index()
    means, spreads = [-0.05, 0.03, 1.0, 0.5], [0.12, 0.15, 0.1, 0.3]
    state = rng.normal(means, spreads, index.state.shape)
    action = rng.normal(0, 0.3, index.state.shape)
    action[:, 3] = index.action[:, 3]
    assert codes(replace(index, state=state, action=action)) == {("action", "double_delta")}


@pytest.mark.parametrize(("factor", "is_suspected"), [(np.pi / 180, True), (0.4, False)])
def test_other_units_are_suspected_and_a_weak_gain_is_not(factor, is_suspected):
    index = make_index()
    scaled = np.column_stack([index.state[:, :3] * factor, index.action[:, 3]])
    found = codes(replace(index, action=scaled))
    assert (("action", "double_delta") in found) is is_suspected


def test_targets_of_a_robot_that_stands_near_zero_are_not_taken_for_differences():
    index = make_index()
    offset = np.array([1.0, 2.0, 3.0, 0.0])
    centred = replace(index, state=index.state - offset, action=index.action - offset)
    assert codes(centred) == set()


@pytest.mark.parametrize("value", [0.0, -3.5])
def test_a_constant_dimension_is_named(value):
    index = make_index()
    index.action[:, 1] = value
    assert ("action[1]", "constant_dim") in codes(index, mode=ActionMode.ABSOLUTE)


def test_a_rare_event_is_named_and_a_frequent_one_is_not():
    index = make_index(lengths=(1000, 1000))
    index.state[:, 2] = 0
    index.state[::50, 2] = 1
    assert codes(index, mode=ActionMode.ABSOLUTE) == set()
    index.state[:, 2] = 0
    index.state[::500, 2] = 1
    assert codes(index, mode=ActionMode.ABSOLUTE) == {("state[2]", "rare_dim")}


def test_nan_and_infinity_are_errors():
    index = make_index()
    index.state[7, 1] = np.nan
    index.action[9, 2] = np.inf
    found = codes(index, mode=ActionMode.ABSOLUTE)
    assert {("state[1]", "not_finite"), ("action[2]", "not_finite")} <= found


def test_a_gripper_that_stays_half_open_is_named():
    """Issue 48 of dexbotic: targets at 0.5, because they came from the state."""
    index = make_index()
    index.action[:, 3] = 0.5
    index.action[:2, 3] = 0, 1
    assert codes(index) == {("action[3]", "gripper")}
    assert not list(check_gripper(np.array([0, 1, 1, 0, 0.5]), 0, "set"))


def test_episodes_without_actions_are_said():
    assert codes(make_index(has_actions=False)) == {("action", "next_state")}


def test_sizes_that_do_not_fit_are_errors():
    index = make_index()
    assert ("state_desc", "state_desc") in codes(index, desc=JOINTS[1:])
    wide = replace(index, action=np.tile(index.action, 9))
    found = codes(wide, desc=None)
    assert {("action", "action_wide"), ("action", "relative_sizes")} <= found


def test_a_chunk_longer_than_episodes_is_said_with_the_share_of_repetitions():
    index = make_index(lengths=(3, 40))
    [problem] = check_episodes(index, [0, 1], "set", 10)
    assert (problem.code, problem.severity) == ("chunk_long", "warning")
    steps = [min(10, length - frame) for length in (3, 40) for frame in range(length)]
    assert f"{1 - sum(steps) / (43 * 10):.0%}" in problem.reason


def test_fewer_samples_than_one_global_batch_are_said():
    assert not list(check_samples(50, 50, "set"))
    [problem] = check_samples(50, 51, "set")
    assert (problem.code, problem.severity) == ("too_few_samples", "warning")


def test_doubles_are_found_by_their_numbers():
    index = make_index(lengths=(20, 20, 20))
    whole = [SplitEpisodes("set", index, range(3))]
    index.state[40:] = index.state[:20]
    assert not list(check_copies(whole))
    index.action[40:] = index.action[:20]
    [problem] = check_copies(whole)
    assert (problem.code, problem.severity) == ("duplicate_episode", "warning")
    assert "e2 = e0" in problem.reason
    index.action[45, 1] += 1e-9
    assert not list(check_copies(whole))


def test_a_copy_of_a_held_out_episode_in_training_is_an_error():
    index = make_index(lengths=(20, 20, 20))
    index.state[40:], index.action[40:] = index.state[:20], index.action[:20]
    [problem] = check_copies([SplitEpisodes("set", index, [0, 1], [2])])
    assert (problem.code, problem.severity) == ("held_out_copy", "error")
    assert "e0 = e2" in problem.reason
    assert not list(check_copies([SplitEpisodes("set", index, [1], [2])]))


def test_copies_are_found_between_datasets_by_the_words_of_their_tasks():
    index = make_index(lengths=(20, 20))
    other = replace(index, tasks=("never", "go"), task=np.ones(40, np.int32))
    parts = [SplitEpisodes("a", index, [0], [1]), SplitEpisodes("b", other, [1], [0])]
    [problem] = check_copies(parts)
    assert problem.code == "held_out_copy"
    assert "2 of training" in problem.reason
    assert "a/e0 = b/e0" in problem.reason
    renamed = replace(other, tasks=("go", "stop"))
    assert not list(check_copies([parts[0], replace(parts[1], index=renamed)]))
    [problem] = check_copies([SplitEpisodes("a", index, [0]), SplitEpisodes("b", other, [0])])
    assert (problem.where, problem.severity) == ("b", "warning")


def test_an_episode_without_samples_is_counted():
    index = make_index(lengths=(20, 1), has_actions=False)
    assert ("episodes", "unused_episode") in codes(index)
