"""Ranks that disagree stop at once with the same line, which names the first difference."""

from importlib.metadata import version

import interrupt_work
import pytest
import torch
from ranks import fork_ranks

from opendm.trainer.rank_agreement import (
    code_facts,
    compare,
    file_fact,
    first_difference,
    flat_facts,
    parameter_facts,
)

SAME = {"flags.seed": "1", "dataset": "a" * 64}


def test_equal_facts_agree_and_a_difference_has_the_same_line_on_every_rank(tmp_path):
    other = SAME | {"dataset": "b" * 64}
    calls = [[SAME, SAME, SAME], [SAME, SAME, other], [SAME, SAME, SAME]]
    outcomes = fork_ranks(
        interrupt_work.compare_facts, calls, 10.0, tmp_path=tmp_path, world_size=3
    )
    lines = [[line for line, _ in calls] for calls in outcomes]
    assert lines[0] == lines[1] == lines[2]
    assert [bool(line) for line in lines[0]] == [False, True, False]
    assert lines[0][1].startswith("rank 2 differs from rank 0 in dataset: bbb")
    assert max(seconds for calls in outcomes for _, seconds in calls) < 10


def test_a_rank_that_does_not_come_is_named(tmp_path):
    ((line, seconds),) = fork_ranks(interrupt_work.compare_without_rank_1, 0.5, tmp_path=tmp_path)[
        0
    ]
    assert line.startswith("rank 1 did not come")
    assert 0.4 < seconds < 10


def test_one_process_agrees_with_itself():
    compare(SAME, timeout_s=1.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{}, {}, {}], ""),
        ([{}, {"flags.seed": "2"}, {}], "rank 1 differs from rank 0 in flags.seed: 2 instead of 1"),
        ([{}, {"dataset": "c"}, {"flags.seed": "3", "dataset": "c"}], "rank 2 differs"),
        ([{"flags.seed": "4"}, {}, {}], "ranks 1, 2 differ from rank 0 in flags.seed: 1"),
        ([{}, {"new": "5"}, {}], "rank 1 differs from rank 0 in new: 5 instead of nothing"),
        ([{"old": "5"}, {}, {}], "ranks 1, 2 differ from rank 0 in old: nothing instead of 5"),
    ],
)
def test_the_first_difference_is_named_with_its_ranks(changes, expected):
    line = first_difference([SAME | change for change in changes])
    assert line.startswith(expected)
    assert bool(line) == bool(expected)


def test_nested_settings_differ_by_their_path():
    facts = flat_facts("flags", {"a": {"b": 1, "c": None}, "d": {}, "e": [1, 2]})
    assert facts == {"flags.a.b": "1", "flags.a.c": "None", "flags.d": "{}", "flags.e": "[1, 2]"}


def test_parameters_differ_by_name_order_shape_and_training():
    def model(*names, size=2, frozen=()):
        module = torch.nn.Module()
        for name in names:
            module.register_parameter(
                name, torch.nn.Parameter(torch.zeros(size), requires_grad=name not in frozen)
            )
        return module

    base = parameter_facts(model("a", "b"))
    assert parameter_facts(model("a", "b")) == base
    others = [
        model("b", "a"),
        model("a", "c"),
        model("a", "b", size=3),
        model("a", "b", frozen="b"),
    ]
    for other in others:
        changed = parameter_facts(other)
        assert changed["number of parameters"] == "2"
        assert changed != base
    assert parameter_facts(model("a"))["number of parameters"] == "1"


def test_code_differs_by_content_and_name_of_its_files_alone(tmp_path):
    def facts(name, files):
        package = tmp_path / name / "package"
        for file, text in files.items():
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            (package / file).write_text(text)
        return code_facts(package, ["torch"])

    base = facts("1", {"a.py": "x", "b/c.py": "y"})
    assert base["version of torch"] == version("torch")
    assert facts("2", {"a.py": "x", "b/c.py": "y", "cache.pyc": "z"}) == base
    assert facts("3", {"a.py": "x", "b/c.py": "z"}) != base
    assert facts("4", {"a.py": "x", "b/d.py": "y"}) != base
    assert file_fact(tmp_path / "1/package/a.py") == file_fact(tmp_path / "3/package/a.py")
