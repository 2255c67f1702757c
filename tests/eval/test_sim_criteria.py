"""What a closed loop must reach is held against what was measured, and against what was not."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/training/sim_criteria.py"
CONTROLS = {
    "untrained": 0, "blind mean demonstration": 20, "blank images": 5,
    "frozen images of another start": 5,
}  # fmt: skip
ALIKE = ("alike-reach-v3", "alike-push-v3", "alike-pick-place-v3")


@pytest.fixture(scope="module")
def judge():
    return runpy.run_path(str(SCRIPT))["main"]


def rate(successes):
    return {"successes": successes, "episodes": 100}


def result(tmp_path, tasks):
    path = tmp_path / "metaworld.json"
    tasks = {
        name: {"judged": rate(solved), "controls": {word: rate(n) for word, n in controls.items()}}
        for name, (solved, controls) in tasks.items()
    }
    path.write_text(json.dumps({"tasks": tasks}))
    return [str(path)]


@pytest.mark.parametrize("worse", [None, *CONTROLS])
def test_one_task_needs_its_rate_and_every_control(worse, judge, tmp_path, capsys):
    controls = {name: count + (name == worse) for name, count in CONTROLS.items()}
    assert judge(result(tmp_path, {"door-open-v3": (95, controls)})) == int(worse is not None)
    assert capsys.readouterr().out.count("FAILED") == int(worse is not None)


def test_one_task_fails_below_its_rate_and_without_a_control(judge, tmp_path, capsys):
    assert judge(result(tmp_path, {"door-open-v3": (94, CONTROLS)})) == 1
    assert judge(result(tmp_path, {"door-open-v3": (95, {})})) == 1
    assert capsys.readouterr().out.count("not measured") == len(CONTROLS)


@pytest.mark.parametrize(
    ("solved", "told", "failures"),
    [
        ((70, 90, 95), 20, 0),
        ((69, 95, 95), 20, 1),
        ((80, 85, 85), 20, 1),
        ((90, 90, 90), 21, 3),
        ((90, 90, 90), None, 3),
    ],
)
def test_several_tasks(solved, told, failures, judge, tmp_path, capsys):
    controls = {} if told is None else {"told “another”": told}
    tasks = {name: (count, controls) for name, count in zip(ALIKE, solved, strict=True)}
    assert judge(result(tmp_path, tasks)) == int(failures > 0)
    assert capsys.readouterr().out.count("FAILED") == failures
