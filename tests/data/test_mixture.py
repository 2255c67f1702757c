"""Mixtures: realised frequencies, passes without repetition, and draws that need no state."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from opendm.data.mixture import Mixture, draws_per_epoch
from opendm.errors import ConfigError
from opendm.trainer.sampling import SeededCollator, SeededDataset, StepSampler


def mixture(sizes, weights):
    ends = np.cumsum(sizes)
    groups = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    parts = [[f"{part}:{index}" for index in range(size)] for part, size in enumerate(sizes)]
    return Mixture(parts, groups, weights)


def draws(mixed, epochs, seed=3):
    found = [mixed.draw_order(seed, epoch) for epoch in range(epochs)]
    return [(int(p), int(r)) for passes, rows in found for p, r in zip(passes, rows, strict=True)]


@pytest.mark.parametrize("weights", [(1, 1, 1), (8, 1, 1), (0.05, 0.15, 0.8)])
@pytest.mark.parametrize("sizes", [(50, 500, 11_450), (4000, 4000, 4000)])
def test_ten_thousand_draws_have_the_weights_within_three_sigma(sizes, weights):
    mixed = mixture(sizes, weights)
    rows = mixed.draw_order(11, 0)[1][:10_000]
    counts = Counter(mixed.locate(int(row))[0] for row in rows)
    for part, share in enumerate(np.asarray(weights) / sum(weights)):
        sigma = np.sqrt(10_000 * share * (1 - share))
        assert abs(counts[part] - 10_000 * share) <= 3 * sigma, (part, counts)


def test_no_sample_is_drawn_again_before_all_others_of_its_group():
    mixed = mixture((7, 30, 63), (5, 3, 2))
    found = draws(mixed, epochs=9)
    assert len(set(found)) == len(found)  # a (pass, row) pair is a draw of its own
    for part, size in enumerate((7, 30, 63)):
        passes = Counter(number for number, row in found if mixed.locate(row)[0] == part)
        assert sorted(passes) == list(range(len(passes)))
        assert [passes[turn] for turn in range(len(passes) - 1)] == [size] * (len(passes) - 1)


def test_weights_by_size_draw_every_sample_once_per_epoch():
    mixed = mixture((1, 99, 400), (1, 99, 400))
    passes, rows = mixed.draw_order(0, 4)
    assert sorted(rows) == list(range(500))
    assert set(passes) == {4}


def test_a_small_set_never_starves():
    assert draws_per_epoch(1000, [1e-9, 1.0, 1.0]) == [1, 499, 500] or draws_per_epoch(
        1000, [1e-9, 1.0, 1.0]
    ) == [1, 500, 499]


@pytest.mark.parametrize("seed", range(20))
def test_draws_per_epoch_sum_up_and_stay_within_one_of_their_share(seed):
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.01, 1, rng.integers(1, 9)).tolist()
    counts = draws_per_epoch(1000, weights)
    assert sum(counts) == 1000
    np.testing.assert_allclose(counts, np.divide(weights, sum(weights)) * 1000, atol=1)


def test_order_differs_between_epochs_and_seeds_and_is_a_pure_function():
    mixed = mixture((20, 80), (1, 1))
    first = mixed.draw_order(3, 5)
    again = mixture((20, 80), (1, 1)).draw_order(3, 5)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[1], mixed.draw_order(3, 6)[1])
    assert not np.array_equal(first[1], mixed.draw_order(4, 5)[1])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_are_disjoint_and_a_resumed_run_continues_the_order(world_size):
    mixed = mixture((6, 34), (3, 1))
    options = {"num_samples": len(mixed), "seed": 1, "draw_order": mixed.draw_order}

    def rows_of(rank, **more):
        sampler = StepSampler(
            num_steps=12, batch_size=8 // world_size, rank=rank, world_size=world_size,
            **options, **more,
        )  # fmt: skip
        return [key for batch in sampler for key in batch]

    ranks = [rows_of(rank) for rank in range(world_size)]
    together = [key for keys in ranks for key in keys]
    assert len(set(together)) == len(together) == 12 * 8
    assert sorted(together) == sorted(
        key for batch in StepSampler(num_steps=12, batch_size=8, **options) for key in batch
    )
    rest = rows_of(0, first_step=7, first_sample=7 * 8)
    assert rest == ranks[0][7 * 8 // world_size :]


def test_samples_come_from_their_part():
    mixed = mixture((3, 5), (1, 1))
    assert [mixed[row] for row in range(8)] == [f"0:{i}" for i in range(3)] + [
        f"1:{i}" for i in range(5)
    ]
    with pytest.raises(IndexError, match="sample 8 of a mixture with 8"):
        mixed[8]


@pytest.mark.parametrize("weights", [(1, 0), (1, -2), (1, float("nan")), (1, float("inf"))])
def test_weights_that_are_not_positive_are_refused(weights):
    with pytest.raises(ConfigError, match="positive"):
        mixture((3, 5), weights)


def test_more_groups_than_draws_are_refused():
    with pytest.raises(ConfigError, match="2 samples in all for 3"):
        draws_per_epoch(2, [1, 1, 1])


class Noisy:
    """Samples that draw from the generators that transforms use."""

    def __init__(self, part, size):
        self.part, self.size = part, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"row": f"{self.part}:{index}", "noise": (torch.rand(1).item(), np.random.rand())}


def loaded(num_workers, *, persistent=False, first_step=0):
    """Batches of a run of three epochs, loaded as the trainer loads them."""
    parts = [Noisy(part, size) for part, size in enumerate((6, 18))]
    mixed = Mixture(parts, [np.arange(6), np.arange(6, 24)], [1, 1])
    sampler = StepSampler(
        len(mixed), 5, num_steps=18, batch_size=4, draw_order=mixed.draw_order,
        first_step=first_step, first_sample=4 * first_step,
    )  # fmt: skip
    loader = DataLoader(
        SeededDataset(mixed, 5),
        batch_sampler=sampler,
        collate_fn=SeededCollator(lambda samples: {"samples": samples}),
        num_workers=num_workers,
        persistent_workers=persistent,
        multiprocessing_context="fork" if num_workers else None,
    )
    passes = [list(loader) for _ in range(2 if persistent else 1)]
    assert all(str(batches) == str(passes[0]) for batches in passes)
    return [(batch["samples"], batch["sample_seed"].tolist()) for batch in passes[0]]


def test_draws_are_the_same_for_any_number_of_loader_workers():
    alone = loaded(0)
    assert len(alone) == 18
    assert len({str(sample["noise"]) for samples, _ in alone for sample in samples}) == 18 * 4
    for workers, persistent in ((2, False), (3, False), (2, True), (3, True)):
        assert loaded(workers, persistent=persistent) == alone
    assert loaded(2, first_step=7) == alone[7:]
