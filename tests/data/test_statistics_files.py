"""Statistics files of a run and on the command line; the scale of a batch."""

import dataclasses
import json

import numpy as np
import pytest

from opendm import cli
from opendm.constants.robot import ActionMode, RobotStateDesc
from opendm.data.config import DM05DataConfig
from opendm.data.norm_stats_job import compute_norm_stats
from opendm.data.normalize import NormStatsFile
from opendm.data.sanity import find_scale_problems
from opendm.data.transforms import BuildAction
from opendm.dataset.register import CONVERSATION_DATA
from opendm.errors import ConfigError


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Three dimensions, the second constant and the third in motion in one frame of 300."""
    episodes = tmp_path / "episodes"
    episodes.mkdir()
    rng = np.random.default_rng(0)
    lines = [
        json.dumps(
            {"state": [x, 2.0, 0.0], "action": [x + 0.1, 2.5, float(t == 7)], "prompt": "go"}
        )
        for t, x in enumerate(rng.normal(0, 1, 300))
    ]
    (episodes / "a.jsonl").write_text("\n".join(lines))
    fields = {
        "jsonl_dir": str(episodes),
        "image_dir": str(tmp_path),
        "image_keys": [],
        "image_prompts": [],
        "state_desc": [RobotStateDesc.JOINT, RobotStateDesc.JOINT, RobotStateDesc.GRIPPER],
        "robot_type": "Aloha",
    }
    monkeypatch.setitem(CONVERSATION_DATA, "odd", fields)
    root, index = str(tmp_path / "stats"), str(tmp_path / "index")
    return DM05DataConfig(dataset_name="odd", norm_stats_root=root, index_root=index)


def test_a_runs_statistics_need_no_samples_and_are_those_of_all_samples(config, monkeypatch):
    dataset = config.build_norm_stats_dataset(4)
    expected = compute_norm_stats(dataset).profiles["Aloha"]
    monkeypatch.setattr(type(dataset), "__getitem__", lambda *_: pytest.fail("a sample was made"))
    found = NormStatsFile.load(config.compute_norm_stats(4)).profiles["Aloha"]
    for key in ("state", "action"):
        for field in ("mean", "std", "min", "max"):
            np.testing.assert_array_equal(getattr(found[key], field), getattr(expected[key], field))
    assert found["action"].q01[0] == expected["action"].q01[0]


def test_a_transform_of_ones_own_reaches_the_statistics(config):
    class Halved(BuildAction):
        def __call__(self, sample):
            sample = super().__call__(sample)
            return {**sample, "action": sample["action"] / 2}

    class OwnConfig(DM05DataConfig):
        def action_transform(self, chunk_size):
            return Halved(chunk_size, self.action_mode)

    own = OwnConfig(**dataclasses.asdict(config))
    plain = NormStatsFile.load(config.compute_norm_stats(4)).select("Aloha")["action"]
    path = own.compute_norm_stats(4)
    halved = NormStatsFile.load(path)
    np.testing.assert_array_equal(halved.select("Aloha")["action"].min, plain.min / 2)
    assert "action_transform" in halved.opendm


def test_a_capped_file_is_computed_again_by_a_full_run(config):
    capped = dataclasses.replace(config, compute_norm_stats_max_batches=1)
    before = NormStatsFile.load(capped.compute_norm_stats(4)).profiles["Aloha"]
    after = NormStatsFile.load(config.compute_norm_stats(4)).profiles["Aloha"]
    assert before["state"].mean[0] != after["state"].mean[0]


def test_other_floors_compute_again(config):
    path = config.compute_norm_stats(4)
    content = json.loads(path.read_text())
    first = path.read_bytes()
    content["opendm"]["floors_version"] = 0
    path.write_text(json.dumps(content))
    config.compute_norm_stats(4)
    assert path.read_bytes() == first


def test_a_given_file_is_used_refused_or_used_with_a_word(config, tmp_path, caplog):
    path = config.compute_norm_stats(4)
    elsewhere = tmp_path / "given.json"
    elsewhere.write_bytes(path.read_bytes())
    given = dataclasses.replace(config, norm_stats_file=str(elsewhere))
    assert given.compute_norm_stats(4) == given.norm_stats_path(4) == elsewhere
    absolute = dataclasses.replace(given, action_mode=ActionMode.ABSOLUTE)
    with pytest.raises(ConfigError, match="'relative' in the file and 'absolute' in this run"):
        absolute.compute_norm_stats(4)
    with pytest.raises(ConfigError, match="action_horizon is 4 in the file and 5 in this run"):
        given.compute_norm_stats(5)
    content = json.loads(elsewhere.read_text())
    del content["opendm"]
    elsewhere.write_text(json.dumps(content))
    caplog.clear()
    with caplog.at_level("INFO", "opendm"):
        assert absolute.compute_norm_stats(5) == elsewhere
    assert len(caplog.records) == 1
    assert json.loads(elsewhere.read_text()) == content


def table_of(text, title):
    lines = text.split(title)[1].splitlines()[1:]
    return [line.split() for line in lines[: lines.index("") if "" in lines else len(lines)]]


def test_compute_and_show_print_a_row_per_dimension_with_its_flags(config, capsys):
    root = ["--norm-stats-root", config.norm_stats_root]
    words = ["stats", "compute", "--dataset-name", "odd", "--chunk-size", "4", *root]
    assert cli.main([*words, "--action-mode", "absolute"]) == 0
    printed = capsys.readouterr().out
    action = table_of(printed, "Aloha (default): action")
    assert action[0] == ["dim", "kind", "min", "q01", "mean", "std", "q99", "max", "flags"]
    assert action[2][:3] == ["1", "joint", "2.5"]
    assert action[2][8:] == ["constant", "floored"]
    assert action[3][8:] == ["rare", "floored"]
    assert table_of(printed, "Aloha (default): state")[3][8:] == ["constant", "floored"]
    assert "action_mode: absolute" in printed
    assert cli.main(["stats", "show", "odd", *root]) == 0
    assert printed.endswith(capsys.readouterr().out)  # after the one warning
    assert cli.main(["stats", "show", "nothing", *root]) == 3
    assert "opendm stats compute --dataset-name nothing" in capsys.readouterr().err


def test_show_flags_what_is_odd_in_a_public_file(tmp_path, capsys):
    entry = {
        "mean": [0, 2, 0.01, 0, 0],
        "std": [1, 0, 0.1, 1e-6, 1],
        "q01": [-2, 2, 0, -1e-6, -2],
        "q99": [2, 2, 0, 1e-6, 2],
        "min": [-3, 2, 0, -1e-6, -3],
        "max": [3, 2, 1, 1e-6, 30],
    }
    path = tmp_path / "norm_stats.json"
    path.write_text(json.dumps({"norm_stats": {"action": entry}}))
    assert cli.main(["stats", "show", str(tmp_path)]) == 0
    rows = table_of(capsys.readouterr().out, "any robot: action")[1:]
    assert [row[8:] for row in rows] == [
        [],
        ["constant"],
        ["rare"],
        ["near-constant"],
        ["outliers"],
    ]


def test_diff_names_settings_and_the_largest_difference_of_each_dimension(config, tmp_path, capsys):
    path = config.compute_norm_stats(4)
    content = json.loads(path.read_text())
    assert cli.main(["stats", "diff", str(path), str(path)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    content["opendm"]["action_horizon"] = 9
    for profile in (content["norm_stats"], content["norm_stats_by_robot"]["Aloha"]):
        profile["action"]["max"][0] += 1.0
        profile["action"]["mean"][0] += 0.25
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    assert cli.main(["stats", "diff", str(path), str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "action_horizon: 4 -> 9"
    assert lines[1] == "Aloha: action"
    assert lines[3].split()[:3] == ["0", "joint", "max"]
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ([0.0, 1.0, -1.0, 5.0], None),
        ([0.0, 0.0, 0.0, -51.0], "reaches 51"),
        ([5.0, -5.5, 6.0, -4.0], "mean magnitude of 5.125"),
        ([0.0, np.nan, 0.0, 0.0], "not finite"),
    ],
)
def test_wild_scales_are_named_by_dimension(column, says):
    batch = np.zeros((2, 2, 3), np.float32)
    batch[..., 1] = np.array(column).reshape(2, 2)
    problems = find_scale_problems(batch)
    assert len(problems) == (says is not None)
    assert all("dimension 1" in line and says in line for line in problems)
    mask = np.ones(batch.shape, bool)
    mask[..., 1] = False
    assert find_scale_problems(batch, mask) == []
