"""Every malformed record of a corpus is named by file, line and field, and no valid one is."""

import numpy as np
import pytest
from bad_records import CAMERAS, CLASSES, STATE_SIZE, good_record, save, spoil_records, write_good

from opendm.check import records
from opendm.check.records import scan_records

SEED = 20261130
NUM_MALFORMED = 300


def scan(folder):
    return scan_records(folder, CAMERAS, state_size=STATE_SIZE)


def found(folder):
    return sorted((problem.where, problem.field) for problem in scan(folder).problems)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    rng = np.random.default_rng(SEED)
    folder = tmp_path_factory.mktemp("corpus")
    files = write_good(folder, rng)
    before = scan(folder)
    return folder, files, before, spoil_records(files, NUM_MALFORMED, rng)


def test_valid_records_in_every_way_of_writing_give_no_problem(corpus):
    _, _, before, _ = corpus
    assert before.problems == ()
    assert before.num_records == 800


def test_300_of_300_malformed_records_are_named_and_nothing_else_is(corpus):
    folder, _, _, expected = corpus
    assert len(CLASSES) >= 30
    assert {name for *_, name in expected} == set(CLASSES)
    assert len({where for where, *_ in expected}) == NUM_MALFORMED
    assert found(folder) == sorted((where, field) for where, field, _ in expected)


def test_two_processes_find_the_same(corpus, monkeypatch):
    folder, _, _, expected = corpus
    monkeypatch.setattr(records, "FORK_BYTES", 0)
    assert found(folder) == sorted((where, field) for where, field, _ in expected)


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_is_found_alone(name, tmp_path):
    """A class is named by itself and not because of its neighbours; mending it ends it."""
    rng = np.random.default_rng(SEED)
    files = write_good(tmp_path, rng, num_files=1, num_frames=5)
    [(path, lines)] = files.items()
    good = lines[0]
    lines[0], field = CLASSES[name](good_record(rng), rng)
    save(files)
    assert found(tmp_path) == [(f"{path}:1", field)]
    lines[0] = good
    save(files)
    assert found(tmp_path) == []


def test_several_problems_of_one_record_are_all_named(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text('{"state": [1, NaN], "prompt": "", "images_1": 5}\n')
    fields = {field for _, field in found(tmp_path)}
    assert fields == {"state[1]", "prompt", "images_1", "images_2"}


def test_a_cut_last_line_is_told_from_other_broken_lines(tmp_path):
    rng = np.random.default_rng(0)
    [(path, lines)] = write_good(tmp_path, rng, num_files=1, num_frames=3).items()
    path.write_bytes(b"\n".join(lines) + b'\n{"state":[0.1,0.2')
    [problem] = scan(tmp_path).problems
    assert (problem.where, problem.code) == (f"{path}:{len(lines) + 1}", "cut_line")


def test_a_line_over_the_cap_is_named_and_not_kept(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    [(path, lines)] = write_good(tmp_path, rng, num_files=1, num_frames=3).items()
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 2000)
    lines.insert(1, b'{"picture": "' + b"x" * 9000 + b'"}')
    save({path: lines})
    result = scan(tmp_path)
    assert [(p.where, p.code) for p in result.problems] == [(f"{path}:2", "line_long")]
    assert result.num_records == 4


def test_the_majority_says_which_length_is_wrong(tmp_path):
    rng = np.random.default_rng(0)
    [(path, lines)] = write_good(tmp_path, rng, num_files=1, num_frames=9).items()
    lines[0], _ = CLASSES["state short"](good_record(rng), rng)
    save({path: lines})
    result = scan_records(tmp_path, CAMERAS)
    assert [(p.where, p.field) for p in result.problems] == [(f"{path}:1", "state")]


def test_problems_of_one_kind_are_listed_up_to_a_limit_and_counted_beyond(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_OF_A_KIND", 3)
    rng = np.random.default_rng(0)
    [path] = write_good(tmp_path, rng, num_files=1, num_frames=10)
    save({path: [CLASSES["prompt empty"](good_record(rng), rng)[0] for _ in range(10)]})
    problems = scan(tmp_path).problems
    assert len(problems) == 4
    assert "7 more" in next(str(p) for p in problems if p.where == str(path))
