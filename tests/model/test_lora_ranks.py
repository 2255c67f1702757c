"""Adapters on several ranks: a start without weights, and shards of every kind. About 20 s."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import lora_work
from ranks import fork_ranks

HALF = "bfloat16"


@pytest.fixture
def base(tmp_path):
    (tmp_path / "config.json").touch()
    return tmp_path


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process learns, by the dtype of the base."""
    base = tmp_path_factory.mktemp("base")
    (base / "config.json").touch()
    cases = {case.dtype: lora_work.Case("single", dtype=case.dtype)
             for case in lora_work.CASES.values()}  # fmt: skip
    return {dtype: lora_work.two_steps(case, base, 0, 1) for dtype, case in cases.items()}


def assert_as_one_process(outcomes, one):
    """Mean loss, norm and adapter agree, and the base is in the dtype that it was in."""
    record, weights, of_base = one
    is_half = of_base == {HALF}
    found = np.array([each[0] for each in outcomes])
    np.testing.assert_allclose(found.mean(0), record, rtol=2e-2 if is_half else 1e-5)
    assert (found[:, :, 1] == found[0, :, 1]).all(), "ranks clip by other norms"
    gathered = outcomes[0][1]
    assert weights.keys() == gathered.keys()
    assert not any(each[1] for each in outcomes[1:])
    for name, weight in weights.items():
        assert gathered[name].dtype == np.float32
        atol = 3e-3 if is_half else 1e-4
        np.testing.assert_allclose(gathered[name], weight, atol=atol, err_msg=name)
    assert all(each[2] == of_base for each in outcomes)
    assert record[0] != record[1], "nothing was learnt"


def as_bytes(outcome):
    return {name: weight.tobytes() for name, weight in outcome[1].items()}


def test_an_adapter_starts_from_rank_0s_weights_bit_for_bit_as_from_files(base, alone):
    ranks = fork_ranks(lora_work.read_by_all_and_by_one, base, tmp_path=base)
    for name, case in lora_work.CASES.items():
        for found in ranks:
            read_by_all, read_by_one = found[name]
            assert read_by_one[0] == read_by_all[0], name
            assert as_bytes(read_by_one) == as_bytes(read_by_all), name
        assert_as_one_process([found[name][1] for found in ranks], alone[case.dtype])


def test_shards_within_nodes_learn_what_one_process_does(base, alone):
    ranks = fork_ranks(lora_work.hybrid, base, tmp_path=base, world_size=4)
    for name, case in lora_work.HYBRID.items():
        assert_as_one_process([found[name] for found in ranks], alone[case.dtype])
