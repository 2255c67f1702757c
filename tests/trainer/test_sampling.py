import random

import numpy as np
import pytest
import torch

from opendm.errors import DataError
from opendm.trainer.sampling import (
    SampleKey,
    SeededCollator,
    SeededDataset,
    StepSampler,
    sample_seed,
)


def steps(world_size, accumulation, *, num_samples=10, rows=8, num_steps=5):
    """Rows of each step as the whole job sees them, in the global order."""
    per_rank = [
        list(
            StepSampler(
                num_samples=num_samples,
                seed=7,
                num_steps=num_steps,
                batch_size=rows // world_size // accumulation,
                accumulation=accumulation,
                rank=rank,
                world_size=world_size,
            )
        )
        for rank in range(world_size)
    ]
    result = []
    for step in range(num_steps):
        mine = [
            sum(batches[step * accumulation : (step + 1) * accumulation], [])
            for batches in per_rank
        ]
        result.append([key for row in zip(*mine, strict=True) for key in row])
    return result


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 2), (2, 1), (2, 4), (4, 1), (8, 1)])
def test_a_step_has_the_same_rows_in_the_same_order_on_every_engine(world_size, accumulation):
    assert steps(world_size, accumulation) == steps(1, 1)


def test_each_pass_holds_every_sample_once():
    keys = sum(steps(2, 1, num_samples=10, rows=4, num_steps=5), [])
    for epoch in (0, 1):
        assert sorted(key.row for key in keys if key.epoch == epoch) == list(range(10))
    assert [k.row for k in keys[:10]] != [k.row for k in keys[10:]]


def test_length_is_the_whole_run():
    assert len(StepSampler(10, 0, num_steps=5, batch_size=2, accumulation=3)) == 15


class Noisy:
    """Draws from every global generator that a transform may use."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index, torch.rand(1).item(), np.random.rand(), random.random()


def test_a_samples_randomness_depends_on_its_key_alone():
    first, second = SeededDataset(Noisy(), 1), SeededDataset(Noisy(), 1)
    wanted = first[SampleKey(0, 2)]
    second[SampleKey(0, 1)]
    torch.rand(3)
    assert second[SampleKey(0, 2)] == wanted
    assert second[SampleKey(1, 2)] != wanted
    assert SeededDataset(Noisy(), 2)[SampleKey(0, 2)] != wanted


def test_drawing_a_sample_leaves_torchs_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    SeededDataset(Noisy(), 1)[SampleKey(0, 0)]
    assert torch.equal(torch.rand(1), expected)


def test_the_collator_adds_the_seeds_and_passes_errors_on():
    collate = SeededCollator(lambda samples: {"n": len(samples)})
    batch = collate([("a", 3), ("b", 5)])
    assert batch["n"] == 2
    assert batch["sample_seed"].tolist() == [3, 5]
    error = DataError("bad frame")
    assert collate([("a", 3), (error, 5)]) is error


def test_seeds_are_distinct_and_fit_into_int64():
    seeds = {sample_seed(42, SampleKey(e, i)) for e in range(3) for i in range(1000)}
    assert len(seeds) == 3000
    assert max(seeds) < 2**63


@pytest.mark.parametrize("done", [0, 1, 3, 5])
def test_a_resumed_sampler_continues_where_the_other_stopped(done):
    options = {"num_samples": 10, "seed": 7, "num_steps": 5, "accumulation": 2}
    whole = StepSampler(**options, batch_size=2)
    rest = StepSampler(
        **options, batch_size=2, first_step=done, first_sample=whole.samples_before(done)
    )
    assert list(rest) == list(whole)[2 * done :]
    assert len(rest) == len(whole)


@pytest.mark.parametrize("step", [0, 2, 4])
def test_the_samples_of_any_step_can_be_named(step):
    sampler = StepSampler(10, 7, 5, batch_size=3, accumulation=2, rank=1, world_size=2)
    assert sampler.step_keys(step) == list(sampler)[2 * step : 2 * step + 2]
