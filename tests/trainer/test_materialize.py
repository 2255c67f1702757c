"""Ranks that hold no weights start as ranks that have read them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import workers
from ranks import fork_ranks
from workers import Case

TWO = [
    Case("ddp", "", policy="fp32_mixed"),
    Case("fsdp1", policy="fp32_mixed"),
    Case("fsdp1", "full_shard", policy="bf16_mixed"),
    Case("fsdp2", policy="bf16_mixed"),
]
FOUR = [Case("fsdp1", "hybrid_shard", optim="muon_adamw"), Case("fsdp2", "hybrid_shard")]


@pytest.mark.parametrize(("world_size", "cases"), [(2, TWO), (4, FOUR)])
def test_a_start_from_rank_0s_weights_is_bit_for_bit_one_from_files(world_size, cases, tmp_path):
    by_rank = fork_ranks(
        workers.train_with_and_without_weights, world_size, cases,
        tmp_path=tmp_path, world_size=world_size,
    )  # fmt: skip
    for found in by_rank:
        for case, (read_by_all, read_by_one) in found.items():
            assert read_by_one == read_by_all, case
    assert all(weights for _, (_, weights, _) in by_rank[0].values())


def test_values_dtypes_buffers_marks_and_ties_arrive(tmp_path):
    ranks = fork_ranks(workers.all_placed, tmp_path=tmp_path)
    assert ranks[0] == ranks[1]
    (trained, names, mark), (all_wide, _, _), is_tied = ranks[1]
    three_tenths = [0.30078125] * 3  # in bfloat16
    assert trained["weight"] == ("torch.float32", three_tenths, True)
    assert trained["bias"] == ("torch.bfloat16", [0.0] * 3, False)
    assert all_wide["bias"] == ("torch.float32", [0.0] * 3, False)
    assert trained["running_var"] == ("torch.bfloat16", [1.0] * 3, False)
    assert trained["num_batches_tracked"] == ("torch.int64", 0, False)
    assert trained["passing"] == ("torch.float32", [7.0] * 2, False)
    assert "passing" not in names
    assert (mark, is_tied) == ("muon", True)
