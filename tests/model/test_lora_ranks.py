"""Ranks that hold no weights start adapters as ranks that have read them. About 12 s."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import lora_work
from ranks import fork_ranks


def test_an_adapter_starts_from_rank_0s_weights_bit_for_bit_as_from_files(tmp_path):
    (tmp_path / "config.json").touch()
    ranks = fork_ranks(lora_work.read_by_all_and_by_one, tmp_path, tmp_path=tmp_path)
    for found in ranks:
        assert found.keys() == lora_work.CASES.keys()
        for case, (read_by_all, read_by_one) in found.items():
            assert read_by_one == read_by_all, case
            assert read_by_all[0][0] != read_by_all[0][1], "nothing was learnt"
    assert all(weights for _, (_, weights) in ranks[0].values())
