"""Statistics: their numbers, their file, and the name of the file."""

import json

import numpy as np
import pytest

from opendm.constants.robot import ActionMode
from opendm.data.norm_stats_job import compute_norm_stats, norm_stats_name
from opendm.data.normalize import NormStats, NormStatsFile, RunningStats
from opendm.data.transforms import BuildAction
from opendm.errors import ConfigError, DataError

ENTRY = {"mean": [0.0, 1.0], "std": [1.0, 2.0], "q01": [-1.0, 0.0], "q99": [1.0, 3.0]}


def stats(size=2):
    return NormStats(np.zeros(size), np.ones(size), -np.ones(size), np.ones(size))


def write(tmp_path, content):
    path = tmp_path / "stats.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("dataset", "horizon", "mode", "digest"),
    [
        ("demo", 50, ActionMode.RELATIVE, "1b0496770e852d94"),
        ("libero_pi0_all", 10, ActionMode.ABSOLUTE, "3577e2559f079b3e"),
        ("robotwin2_generalist", 50, ActionMode.ABSOLUTE, "44fe0880fc690a4b"),
        ("so101_pick_cube", 50, ActionMode.RELATIVE, "534e3b141e080296"),
        ("robodojo_sim_cover_blocks", 25, ActionMode.ABSOLUTE, "1a303328a52443e2"),
        ("demo_mem", 50, ActionMode.RELATIVE, "df3eb32369ec63f6"),
    ],
)
def test_file_name_is_the_public_frameworks(dataset, horizon, mode, digest):
    transform = repr(BuildAction(horizon, mode))
    assert norm_stats_name(dataset, transform) == f"{dataset}_{digest}.json"


def test_running_stats_are_numpys_in_any_order():
    rows = np.random.default_rng(0).normal(1e3, 1e-3, (500, 3)).astype(np.float32)
    shuffled = np.random.default_rng(1).permutation(rows)
    one, many = RunningStats(), RunningStats()
    one.update(rows)
    for part in np.array_split(shuffled, 7):
        many.update(part)
    wide = rows.astype(np.float64)
    for name in ("mean", "std", "q01", "q99", "min", "max"):
        np.testing.assert_array_equal(getattr(one.get(), name), getattr(many.get(), name))
    np.testing.assert_allclose(one.get().mean, wide.mean(0), rtol=1e-14)
    np.testing.assert_allclose(one.get().std, wide.astype(np.longdouble).std(0), rtol=1e-14)
    np.testing.assert_array_equal(one.get().q01, np.quantile(wide, 0.01, axis=0))
    np.testing.assert_array_equal(one.get().q99, np.quantile(wide, 0.99, axis=0))
    np.testing.assert_array_equal(one.get().min, wide.min(0))
    np.testing.assert_array_equal(one.get().max, wide.max(0))


def test_running_stats_refuse_one_row_and_other_lengths():
    running = RunningStats()
    running.update(np.zeros((1, 2)))
    with pytest.raises(DataError, match="at least 2"):
        running.get()
    with pytest.raises(DataError, match="one length"):
        running.update(np.zeros((1, 3)))


def test_files_round_trip_and_leave_nothing_else(tmp_path):
    file = NormStatsFile(
        {"A": {"action": stats()}, "B": {"action": stats(3)}}, "A", {"fingerprint": "x"}
    )
    path = tmp_path / "deep" / "stats.json"
    file.save(path)
    file.save(path)
    assert [p.name for p in path.parent.iterdir()] == ["stats.json"]
    assert path.read_text().startswith('{\n  "default_robot_type": "A",\n  "norm_stats": {')
    again = NormStatsFile.load(path)
    assert again.to_json() == file.to_json()
    assert again.opendm == {"fingerprint": "x"}


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "stats.json"
    NormStatsFile({None: {"action": stats()}}).save(path)
    before = path.read_bytes()
    monkeypatch.setattr("opendm.data.normalize.os.fsync", lambda fd: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        NormStatsFile({None: {"action": stats(5)}}).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_extremes_are_kept_where_a_file_has_both(tmp_path):
    entry = {**ENTRY, "min": [-2.0, -1.0], "max": [2.0, 4.0]}
    loaded = NormStatsFile.load(write(tmp_path, {"norm_stats": {"action": entry}}))
    assert loaded.to_json() == {"norm_stats": {"action": entry}}


def test_public_file_without_extremes_loads(tmp_path):
    entry = {**ENTRY, "min": [0, 0], "max": None}
    loaded = NormStatsFile.load(write(tmp_path, {"norm_stats": {"state": entry, "action": entry}}))
    assert loaded.select(None)["action"].q99.tolist() == [1.0, 3.0]
    assert loaded.to_json() == {"norm_stats": {"state": ENTRY, "action": ENTRY}}


BAD = {
    "no norm_stats": ({}, "norm_stats has"),
    "no action": ({"norm_stats": {"state": ENTRY}}, "'action'"),
    "missing key": ({"norm_stats": {"action": {**ENTRY, "q99": None}}}, "action.q99"),
    "empty": ({"norm_stats": {"action": {**ENTRY, "mean": []}}}, "action.mean"),
    "extremes": (
        {"norm_stats": {"action": {**ENTRY, "min": [0, 0], "max": [1, float("nan")]}}},
        r"max\[1\] is nan",
    ),
    "lengths": ({"norm_stats": {"action": {**ENTRY, "mean": [0.0]}}}, "lengths"),
    "text": ({"norm_stats": {"action": {**ENTRY, "mean": ["a", 0]}}}, r"mean\[0\] is 'a'"),
    "nan": ({"norm_stats": {"action": {**ENTRY, "std": [1, float("nan")]}}}, r"std\[1\] is nan"),
    "order": ({"norm_stats": {"action": {**ENTRY, "q01": [0, 9]}}}, "dimension 1"),
    "negative": ({"norm_stats": {"action": {**ENTRY, "std": [0, -1]}}}, "action.std"),
    "default": (
        {"norm_stats": {"action": ENTRY}, "norm_stats_by_robot": {"A": {"action": ENTRY}}},
        "default_robot_type is None",
    ),
    "by robot": ({"norm_stats": {"action": ENTRY}, "default_robot_type": "A"}, "by_robot"),
    "top": (
        {
            "default_robot_type": "A",
            "norm_stats": {"action": {**ENTRY, "mean": [5, 5]}},
            "norm_stats_by_robot": {"A": {"action": ENTRY}},
        },
        "must be equal",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_with_file_and_key(tmp_path, case):
    content, message = BAD[case]
    path = write(tmp_path, content)
    with pytest.raises(DataError, match=message) as caught:
        NormStatsFile.load(path)
    assert str(path) in str(caught.value)


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        NormStatsFile.load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"norm_stats": ')
    with pytest.raises(DataError, match=r"half\.json cannot be read"):
        NormStatsFile.load(tmp_path / "half.json")


def test_select(caplog):
    untyped = NormStatsFile({None: {"action": stats()}})
    untyped.select(None)
    assert not caplog.records
    for _ in range(3):
        untyped.select("A")
    assert len(caplog.records) == 1
    typed = NormStatsFile({"A": {"action": stats()}, "B": {"action": stats(3)}}, "B")
    assert typed.select(None) is typed.profiles["B"]
    assert typed.select("A") is typed.profiles["A"]
    with pytest.raises(DataError, match=r"'C'.*\['A', 'B'\]"):
        typed.select("C")


def sample(robot, value, real=2):
    action = np.full((1, 3, 2), value, np.float32)
    mask = np.zeros(action.shape, bool)
    mask[:, :real] = True
    action[:, real:] = 1e6
    meta = {} if robot is None else {"robot_type": robot}
    return {
        "state": np.full(2, value, np.float32),
        "action": action,
        "action_mask": mask,
        "meta_data": meta,
    }


def test_states_count_once_and_real_rows_count_once_per_chunk():
    file = compute_norm_stats([sample("A", 0.0, real=3), sample("A", 1.0, real=1)])
    assert file.default_robot_type == "A"
    assert file.profiles["A"]["state"].mean.tolist() == [0.5, 0.5]
    assert file.profiles["A"]["action"].mean.tolist() == [0.25, 0.25]


def test_robots_need_a_default_and_are_not_mixed_with_none():
    both = [sample(robot, value) for robot in "AB" for value in (0.0, 1.0)]
    with pytest.raises(ConfigError, match="default-robot-type"):
        compute_norm_stats(both)
    assert compute_norm_stats(both, "B").default_robot_type == "B"
    with pytest.raises(ConfigError, match="'C'"):
        compute_norm_stats(both, "C")
    with pytest.raises(ConfigError, match="some have none"):
        compute_norm_stats([*both, sample(None, 0.0)], "A")
    assert None in compute_norm_stats([sample(None, 0.0), sample(None, 1.0)]).profiles


def test_max_batches_caps_the_samples_reproducibly():
    class Counted:
        def __init__(self):
            self.seen = []

        def __len__(self):
            return 1000

        def __getitem__(self, index):
            self.seen.append(index)
            return sample("A", float(index))

    first, second = Counted(), Counted()
    compute_norm_stats(first, max_batches=2)
    compute_norm_stats(second, max_batches=2)
    assert len(set(first.seen)) == 256
    assert first.seen == second.seen
