"""Exact statistics: those of the real transform over every sample, in any order; floors; origin."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from opendm.constants.robot import ActionMode, RobotStateDesc
from opendm.data.index import FrameIndex
from opendm.data.norm_stats_job import compute_norm_stats
from opendm.data.normalize import NormStats, NormStatsFile
from opendm.data.source import Source
from opendm.data.stat_columns import ActionPlan, SampledPart, StatisticsPart, standard_plan
from opendm.data.stat_floors import EPSILON, RELATIVE_FLOOR, apply_floors, floors
from opendm.data.stat_maths import (
    ReproducibleSum,
    interpolate,
    ordered_keys,
    quantile_ranks,
    summarize,
    values_of_keys,
)
from opendm.data.stat_origin import check_given, differences, statistics_origin
from opendm.data.statistics import compute_statistics
from opendm.data.transforms import BuildAction, BuildActionChunk
from opendm.data.transforms.normalization import EPSILON as NORMALIZATION_EPSILON
from opendm.data.transforms.normalization import denormalize, normalize
from opendm.errors import ConfigError, DataError

FIELDS = ("mean", "std", "q01", "q99", "min", "max")
DESC = [RobotStateDesc.JOINT] * 2 + [RobotStateDesc.GRIPPER]


def make_index(lengths, has_actions, num_dims=3, seed=0, action_dims=None):
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    state = rng.normal(1.0, 3.0, (starts[-1], num_dims))
    action = rng.normal(-1.0, 2.0, (starts[-1], action_dims or num_dims))
    has_actions = np.asarray(has_actions, bool)
    action[~np.repeat(has_actions, lengths)] = np.nan
    if not has_actions.any():
        action = action[:, :0]
    zeros = np.zeros(starts[-1], np.int64)
    return FrameIndex(
        files=(),
        episodes=tuple(f"{number:03}" for number in range(len(lengths))),
        tasks=("go",),
        dropped=(),
        episode_file=np.zeros(len(lengths), np.int32),
        has_actions=has_actions,
        starts=starts,
        state=state,
        action=action,
        task=zeros,
        position=zeros,
        num_bytes=zeros,
    )


class Recorded(Source):
    """A source whose records are made from an index."""

    def record(self, episode, frame):
        row = self.index.episode_rows(episode)[frame]
        record = {"state": self.index.state[row]}
        return record | (
            {"action": self.index.action[row]} if self.index.has_actions[episode] else {}
        )

    def line(self, episode, frame):
        return json.dumps({key: list(v) for key, v in self.record(episode, frame).items()})

    def location(self, episode, frame):
        return f"{episode}:{frame}"


class Samples:
    """Every sample of an index through the real transform."""

    def __init__(self, index, episodes, transform, robot="A", desc=None):
        self.places = [(e, f) for e in episodes for f in range(index.num_samples(e))]
        self.source, self.transform = Recorded(Path("none"), index), transform
        self.meta = {"robot_type": robot, "state_desc": desc}

    def __len__(self):
        return len(self.places)

    def __getitem__(self, number):
        episode, frame = self.places[number]
        record, lines = self.source.record(episode, frame), self.source.frames(episode)
        meta = {**self.meta, "frame_index": frame}
        return self.transform({**record, "raw_lines": lines, "meta_data": meta})


def part_of(index, episodes, horizon=4, mode=ActionMode.ABSOLUTE, robot="A", desc=None):
    return StatisticsPart(index, episodes, robot, BuildAction(horizon, mode), desc)


def plain(rows):
    """The reference: numpy over all rows at once, with sums in extended precision."""
    wide = np.concatenate(rows).astype(np.float64)
    exact = wide.astype(np.longdouble)
    deviation = np.sqrt(((exact - exact.mean(0)) ** 2).mean(0))
    q01, q99 = np.quantile(wide, (0.01, 0.99), axis=0)
    values = exact.mean(0), deviation, q01, q99, wide.min(0), wide.max(0)
    return dict(zip(FIELDS, values, strict=True))


LENGTHS = (7, 1, 12, 3, 40)
ACTIONS = {
    "recorded": (True,) * 5,
    "next states": (False,) * 5,
    "both": (True, False, False, True, False),
}


@pytest.mark.parametrize("horizon", [1, 5, 50])
@pytest.mark.parametrize("mode", list(ActionMode))
@pytest.mark.parametrize("kind", ACTIONS)
def test_statistics_are_those_of_the_real_transform_over_every_sample(kind, mode, horizon):
    index = make_index(LENGTHS, ACTIONS[kind])
    part = part_of(index, range(5), horizon, mode, desc=DESC)
    samples = Samples(index, range(5), part.action_transform, desc=DESC)
    counted = [samples[number] for number in range(len(samples))]
    profile = compute_statistics([part]).profiles["A"]
    rows = {
        "state": [sample["state"][None] for sample in counted],
        "action": [sample["action"][sample["action_mask"].any(-1)] for sample in counted],
    }
    other = compute_norm_stats(samples).profiles["A"]
    for key, entry in rows.items():
        expected = plain(entry)
        for field in ("q01", "q99", "min", "max"):
            np.testing.assert_array_equal(getattr(profile[key], field), expected[field])
        for field in ("mean", "std"):
            found = getattr(profile[key], field)
            np.testing.assert_allclose(found, expected[field].astype(float), rtol=4e-16, atol=1e-16)
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(profile[key], field), getattr(other[key], field))


def test_one_other_dimension_and_a_chosen_non_delta_kind():
    index = make_index((20,), (True,), num_dims=1)
    transform = BuildAction(3, ActionMode.RELATIVE, (RobotStateDesc.JOINT,))
    desc = [RobotStateDesc.JOINT]
    found = compute_statistics([StatisticsPart(index, [0], None, transform, desc)])
    samples = Samples(index, [0], BuildAction(3, ActionMode.ABSOLUTE), robot=None)
    expected = compute_norm_stats(samples)
    assert found.to_json() == expected.to_json()


def text(file):
    return repr(file.to_json())


def test_order_threads_and_cut_into_datasets_change_no_byte():
    lengths = (30, 5, 17, 8)
    index = make_index(lengths, (True, False, True, False))
    make = lambda episodes: part_of(index, episodes, 6, ActionMode.RELATIVE, desc=DESC)  # noqa: E731
    first = text(compute_statistics([make(range(4))]))
    assert text(compute_statistics([make([2, 0, 3, 1])], num_threads=1)) == first
    assert text(compute_statistics([make([1]), make([3, 0]), make([2])], num_threads=3)) == first
    shuffled = make_index([5, 30], (False, True))
    a, b = index.episode_rows(0), index.episode_rows(1)
    for mine, theirs in ((shuffled.state, index.state), (shuffled.action, index.action)):
        mine[:5], mine[5:] = theirs[b], theirs[a]
    other = part_of(shuffled, [0, 1], 6, ActionMode.RELATIVE, desc=DESC)
    assert text(compute_statistics([other, make([3, 2])])) == first


def test_robots_are_kept_apart_and_pooled_by_name():
    index, other = make_index((9, 9), (True, True)), make_index((9,), (True,), 2, seed=1)
    parts = [part_of(index, [0]), part_of(other, [0], robot="B"), part_of(index, [1])]
    file = compute_statistics(parts, default_robot_type="B")
    assert file.default_robot_type == "B"
    alone = compute_statistics([part_of(index, [0, 1])])
    for field in FIELDS:
        found = getattr(file.profiles["A"]["action"], field)
        np.testing.assert_array_equal(found, getattr(alone.profiles["A"]["action"], field))
    assert len(file.profiles["B"]["action"].mean) == 2
    with pytest.raises(ConfigError, match="default-robot-type"):
        compute_statistics(parts)
    with pytest.raises(DataError, match=r"vectors of \[2, 3\] values"):
        compute_statistics([part_of(index, [0]), part_of(other, [0])])
    with pytest.raises(ConfigError, match="different state_desc"):
        compute_statistics([part_of(index, [0], desc=DESC), part_of(index, [1])])


def test_a_transform_of_ones_own_is_run_on_every_sample_and_pooled():
    class Doubled(BuildAction):
        def __call__(self, sample):
            sample = super().__call__(sample)
            sample["action"] = sample["action"] * 2
            return sample

    index, wide = make_index((9, 6), (True, True)), make_index((9, 6), (True, True))
    wide.action[:] *= 2
    transform = Doubled(4, ActionMode.ABSOLUTE)
    samples = Samples(index, [0], transform)
    own = SampledPart(samples)
    found = compute_statistics([own, part_of(wide, [1])]).profiles["A"]["action"]
    expected = compute_statistics([part_of(wide, [0, 1])]).profiles["A"]["action"]
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(found, field), getattr(expected, field))
    with pytest.raises(ConfigError, match="not the standard one"):
        compute_statistics([StatisticsPart(index, [0], "A", transform)])


def test_a_cap_counts_the_samples_that_the_loader_counted():
    index = make_index((150, 90), (True, False))
    part = part_of(index, [0, 1], 5, ActionMode.RELATIVE, desc=DESC)
    samples = Samples(index, [0, 1], part.action_transform, desc=DESC)
    capped = compute_statistics([part], max_batches=1)
    assert text(capped) == text(compute_norm_stats(samples, max_batches=1))
    assert text(capped) != text(compute_statistics([part]))
    halves = [part_of(index, [e], 5, ActionMode.RELATIVE, desc=DESC) for e in (0, 1)]
    assert text(compute_statistics(halves, max_batches=1)) == text(capped)
    assert text(compute_statistics([part], max_batches=2)) == text(compute_statistics([part]))


def test_too_little_and_too_much_is_refused():
    with pytest.raises(DataError, match="at least 2"):
        compute_statistics([part_of(make_index((1,), (True,)), [0])])
    index = make_index((9,), (True,))
    index.action[3, 1] = 1e300
    with pytest.raises(DataError, match="action dimension 1 goes beyond float32"):
        compute_statistics([part_of(index, [0])])
    mixed = make_index((9, 9), (True, False), action_dims=2)
    with pytest.raises(DataError, match="actions have 2 values and states 3"):
        compute_statistics([part_of(mixed, [0, 1])])


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("count", [2, 3, 101, 30011])
def test_summary_is_numpys_and_fsums(count, scale):
    rng = np.random.default_rng(count)
    values = (rng.normal(0.5, 1.0, count) * 10.0 ** rng.uniform(-6, 6, count) * scale).astype("f4")
    wide = values.astype(np.float64)
    found = summarize(lambda: iter(np.array_split(values, 2)), count)
    q01, q99 = np.quantile(wide, (0.01, 0.99))
    assert (found.q01, found.q99) == (q01, q99)
    assert (found.min, found.max) == (wide.min(), wide.max())
    mean = math.fsum(wide) / count
    assert found.mean == mean
    assert found.std == pytest.approx(math.sqrt(math.fsum((wide - mean) ** 2) / count), rel=3e-16)


def test_quantiles_round_as_numpys_between_any_two_ranks():
    rng = np.random.default_rng(0)
    for count in range(2, 150):
        values = np.sort(rng.normal(size=count).astype(np.float32).astype(np.float64))
        for quantile in (0.01, 0.99):
            lower, upper, way = quantile_ranks(count, quantile)
            assert interpolate(values[lower], values[upper], way) == np.quantile(values, quantile)


def test_only_the_standard_transform_has_a_plan():
    transform = BuildAction(7, ActionMode.RELATIVE)
    assert standard_plan(transform) == ActionPlan(7, (RobotStateDesc.GRIPPER,))
    assert standard_plan(BuildAction(7, ActionMode.ABSOLUTE)) == ActionPlan(7, None)
    assert standard_plan(type("Own", (BuildAction,), {})(7)) is None
    assert standard_plan(transform.pipeline) is None
    transform.pipeline.transforms[0] = BuildActionChunk(7)  # in single precision
    assert standard_plan(transform) is None
    transform.pipeline.transforms.pop(0)
    assert standard_plan(transform) is None


def test_small_deviation_around_a_large_mean_keeps_its_digits():
    values = np.random.default_rng(0).uniform(1e4 - 0.01, 1e4 + 0.01, 10_000).astype(np.float32)
    found = summarize(lambda: iter([values]), len(values))
    exact = values.astype(np.longdouble)
    assert found.std == pytest.approx(float(exact.std()), rel=1e-12)
    single = np.mean(values**2, dtype=np.float32) - np.mean(values, dtype=np.float32) ** 2
    assert abs(float(single) - found.std**2) > found.std**2  # the formula that is not used


def test_sums_do_not_depend_on_order_where_plain_ones_do():
    rng = np.random.default_rng(0)
    values = rng.normal(size=10_000) * 10.0 ** rng.uniform(-8, 8, 10_000)

    def total(numbers, cuts):
        running = ReproducibleSum(len(numbers), float(np.abs(numbers).max()))
        for part in np.array_split(numbers, cuts):
            running.add(part)
        return running.total()

    found = {total(rng.permutation(values), cuts) for cuts in (1, 2, 7, 100)}
    assert len(found) == 1
    assert found.pop() == math.fsum(values)
    assert len({sum(rng.permutation(values)) for _ in range(4)}) > 1


def test_keys_have_the_order_of_their_values():
    values = np.array([-np.inf, -3e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 2.0, np.inf], np.float32)
    keys = ordered_keys(values)
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    np.testing.assert_array_equal(values_of_keys(keys), values)


def test_negative_zero_is_zero_in_every_order():
    values = np.array([0.0, -0.0, -0.0, 0.0], np.float32)
    for order in ([0, 1, 2, 3], [1, 2, 0, 3]):
        found = summarize(lambda order=order: iter([values[order]]), 4)
        assert "-0.0" not in repr(found)


def stats_of(rows):
    index = make_index((len(rows),), (True,), num_dims=rows.shape[1])
    index.action[:] = rows
    return index


def floored(columns, desc=None):
    index = stats_of(np.stack(columns, 1))
    return compute_statistics([part_of(index, [0], 1, desc=desc)])


NOISE = np.random.default_rng(3).uniform(-1, 1, 2000)
RARE = (np.arange(2000) % 250 == 0).astype(float)


def test_the_almost_constant_joint_of_t01_stays_small_and_is_named(caplog):
    joint = 1.56864 + 0.00098 * (NOISE + 1) / 2
    file = floored([NOISE, NOISE * 2, joint], [RobotStateDesc.JOINT] * 3)
    stats = file.profiles["A"]["action"]
    warned = [record.message for record in caplog.records]
    assert len(warned) == 1
    assert "A action: dimension 2 (joint) is almost constant" in warned[0]
    limit = RELATIVE_FLOOR * np.median((stats.q99 - stats.q01)[:2])
    assert stats.q99[2] - stats.q01[2] == pytest.approx(limit)
    near = np.array([0.0, 0.0, 1.5])
    assert abs(normalize(near, stats, clip_to_bounds=False)[2]) < 20
    jitter = np.stack([NOISE * 0, NOISE * 0, joint], 1)
    assert np.abs(normalize(jitter, stats)[:, 2]).max() < 0.1
    raw = file.opendm["floored"]["A"]["action"]
    assert [entry["dim"] for entry in raw] == [2]
    assert raw[0]["q01"] == np.quantile(joint.astype(np.float32).astype(float), 0.01)


@pytest.mark.parametrize("value", [0.0, 1.0, -7.25])
def test_constants_become_zero_and_come_back(value):
    stats = floored([NOISE, np.full(2000, value)]).profiles["A"]["action"]
    there = normalize(np.array([0.5, value]), stats)
    assert abs(there[1]) < 1e-6
    assert denormalize(there, stats)[1] == pytest.approx(value, abs=1e-6)
    assert stats.std[1] == 0


def test_rare_events_keep_both_of_their_values():
    file = floored([NOISE, RARE, RARE * 0.8 + NOISE * 1e-4])
    stats = file.profiles["A"]["action"]
    assert {entry["kind"] for entry in file.opendm["floored"]["A"]["action"]} == {"rare"}
    assert (stats.q01[1], stats.q99[1]) == (0.0, 1.0)
    for event in (0.0, 1.0):
        there = normalize(np.array([0.0, event, event * 0.8]), stats)
        np.testing.assert_allclose(there[1:], 2 * event - 1, atol=1e-3)
        back = denormalize(there, stats)
        np.testing.assert_allclose(back[1:], [event, event * 0.8], atol=1e-4)


def test_round_trip_is_exact_inside_the_widened_range_for_every_kind():
    columns = [NOISE, NOISE * 1e-5 + 3, RARE, np.full(2000, 5.0), RARE * 1e-3, NOISE * 0.5]
    rows = np.stack(columns, 1)
    stats = floored(columns).profiles["A"]["action"]
    kept = [1, 2, 3, 4]  # the others lose 1 % at both ends
    back = denormalize(normalize(rows, stats), stats)
    np.testing.assert_allclose(back[:, kept], rows[:, kept], atol=2e-7, rtol=1e-6)
    assert np.abs(normalize(rows, stats)).max() <= 1
    middle = (stats.q01 + stats.q99) / 2
    beyond = middle + (stats.q99 - stats.q01)
    assert np.abs(normalize(beyond, stats, clip_to_bounds=False)).max() <= 2.0001


def test_floors_follow_the_group_and_scale_with_it():
    ranges = np.array([1.0, 2.0, 0.001, 0.03])
    together = floors(ranges, ["all"] * 4)
    apart = floors(ranges, ["joint", "joint", "joint", "gripper"])
    assert (ranges < together).tolist() == [False, False, True, False]
    np.testing.assert_allclose(apart[:3], 0.015)
    assert apart[3] == pytest.approx(3e-4)
    np.testing.assert_allclose(floors(ranges * 1e3, ["all"] * 4), together * 1e3)
    np.testing.assert_allclose(floors(np.zeros(2), ["all"] * 2), 1e-2)
    idle = np.array([1.0] * 2 + [1e-4] * 12)
    assert floors(idle, ["joint"] * 14)[0] == pytest.approx(1e-2)


def test_ordinary_dimensions_keep_their_quantiles_and_nothing_is_said(caplog):
    stats = NormStats(*(np.array([v, v]) for v in (0.0, 1.0, -1.0, 1.0, -2.0, 2.0)))
    file = apply_floors(NormStatsFile({"A": {"action": stats}}, "A"), {"A": None})
    assert file.to_json() == NormStatsFile({"A": {"action": stats}}, "A").to_json()
    assert not caplog.records


def test_the_middle_is_moved_by_what_normalisation_adds():
    assert EPSILON == NORMALIZATION_EPSILON


def origin(**changes):
    fields = {
        "fingerprint": "abc",
        "action_transform": BuildAction(8, ActionMode.RELATIVE),
        "state_desc": DESC,
        "robot_types": ["A"],
    }
    return statistics_origin(**{**fields, **changes})


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"fingerprint": "abd"}, {"fingerprint"}),
        ({"action_transform": BuildAction(9, ActionMode.RELATIVE)}, {"action_horizon"}),
        (
            {"action_transform": BuildAction(8, ActionMode.ABSOLUTE)},
            {"action_mode", "non_delta_ids"},
        ),
        ({"action_transform": BuildAction(8, ActionMode.RELATIVE, ())}, {"non_delta_ids"}),
        ({"state_desc": ["joint"] * 3}, {"state_desc"}),
        ({"robot_types": ["A", "B"]}, {"robot_types"}),
        ({"max_batches": 1}, {"max_batches"}),
        ({"choices": {"val_episodes": 2, "columns": None}}, {"val_episodes"}),
        ({"default_robot_type": "A"}, {"default_robot_type"}),
    ],
)
def test_every_setting_is_part_of_the_origin(change, keys):
    assert set(differences(origin(**change), origin())) == keys
    assert not differences({**origin(), "floored": {"A": {}}}, origin())


def test_a_file_given_by_hand_must_fit_and_the_error_names_both_modes():
    check_given("f.json", origin(), origin())
    absolute = origin(action_transform=BuildAction(8, ActionMode.ABSOLUTE))
    message = "action_mode is 'absolute' in the file and 'relative' in this run"
    with pytest.raises(ConfigError, match=message):
        check_given("f.json", absolute, origin())
