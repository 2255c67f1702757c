"""The loss on held-out samples, and that measuring it leaves training as it was."""

import math

import averaging_work as work
import numpy as np
import pytest
import torch
from ranks import fork_ranks
from workers import small_model

from opendm.errors import DataError
from opendm.trainer.engine import Engine
from opendm.trainer.sampling import SampleKey, SeededDataset, sample_seed
from opendm.trainer.validation import held_out, rank_batches, validation_loss

SINGLE = Engine("single", torch.device("cpu"), None)
TWO_RANKS = ("ddp", "fsdp1", "fsdp2")


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def single():
    return work.several_engines(0, 1, ["single"])["single"]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Runs of each engine on two ranks; weights are rank 0's."""
    return fork_ranks(work.several_engines, 2, TWO_RANKS, tmp_path=tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("num_samples", [1, 2, 7, 16])
def test_every_row_counts_once_and_ranks_have_equally_many_batches(
    num_samples, batch_size, world_size
):
    counted, numbers = [], set()
    for rank in range(world_size):
        batches = rank_batches(
            num_samples, batch_size=batch_size, rank=rank, world_size=world_size
        )  # fmt: skip
        num_counted = len(range(rank, num_samples, world_size))
        rows = [row for batch in batches for row in batch]
        counted += rows[:num_counted]
        numbers.add(len(batches))
        assert all(0 < len(batch) <= batch_size for batch in batches)
        assert all(0 <= row < num_samples for row in rows)
    assert sorted(counted) == list(range(num_samples))
    assert len(numbers) == 1


def test_it_is_the_mean_of_the_samples_measured_one_by_one(model):
    rows = SeededDataset(work.Rows(), work.SEED)
    losses = []
    for row in range(work.NUM_HELD_OUT):
        key = SampleKey(-1, row)
        sample, _ = rows[key]
        seed = torch.tensor([sample_seed(work.SEED, key)])
        with torch.no_grad():
            losses.append(model.eval()(**work.stack([sample]), sample_seed=seed).loss.item())
    assert np.std(losses) > 0.01
    assert work.measure(model, SINGLE) == pytest.approx(np.mean(losses), rel=1e-6)


def test_the_batch_size_changes_it_by_rounding_alone(model):
    wanted = work.measure(model, SINGLE, batch_size=1)
    for batch_size in (2, 3, 8):
        assert work.measure(model, SINGLE, batch_size=batch_size) == pytest.approx(wanted, rel=1e-5)


def test_repeated_it_is_the_same_number_and_training_draws_what_it_would_have(model):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = work.measure(model.train(), SINGLE)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.rand(5)
    assert work.measure(model, SINGLE) == first


def test_another_seed_draws_other_noise(model):
    samples = held_out(work.Rows(), work.stack, seed=work.SEED + 1, batch_size=2)
    difference = validation_loss(model, samples, SINGLE) - work.measure(model, SINGLE)
    assert abs(difference) > 1e-3


def test_a_bad_sample_ends_it_with_its_own_error_and_the_model_as_it_was(model):
    class Bad(work.Rows):
        def __getitem__(self, index):
            if index == 3:
                raise DataError("episode.jsonl:4: no action")
            return super().__getitem__(index)

    samples = held_out(Bad(), work.stack, seed=work.SEED, batch_size=2)
    with pytest.raises(DataError, match=r"episode\.jsonl:4"):
        validation_loss(model.train(), samples, SINGLE)
    assert model.training


def test_a_loss_that_is_not_finite_is_reported_as_it_is(model):
    class Infinite(work.Rows):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            return {**sample, "action": sample["action"] * float("inf" if index == 4 else 1)}

    samples = held_out(Infinite(), work.stack, seed=work.SEED, batch_size=2)
    assert not math.isfinite(validation_loss(model, samples, SINGLE))


@pytest.mark.parametrize("name", TWO_RANKS)
def test_losses_agree_between_engines_and_ranks_with_and_without_averages(name, single, engines):
    wanted = np.array(single["evaluated"]["losses"])
    assert np.ptp(wanted[:, 0]) > 1e-3
    assert abs(wanted[1, 0] - wanted[1, 1]) > 1e-4
    for rank in engines:
        losses = np.array(rank[name]["evaluated"]["losses"])
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert engines[0][name]["evaluated"]["losses"] == engines[1][name]["evaluated"]["losses"]


@pytest.mark.parametrize("name", ["single", *TWO_RANKS])
@pytest.mark.parametrize("kind", ["weights", "averages"])
def test_evaluating_changes_no_bit_of_training(name, kind, single, engines):
    runs = single if name == "single" else engines[0][name]
    evaluated, plain = runs["evaluated"][kind], runs["plain"][kind]
    assert evaluated.keys() == plain.keys() == single["plain"][kind].keys()
    for key, value in evaluated.items():
        np.testing.assert_array_equal(value, plain[key], err_msg=key)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_averages_of_sharded_weights_are_those_of_one_process(name, single, engines):
    weights, averages = single["plain"]["weights"], single["plain"]["averages"]
    assert np.abs(weights["model.action_in_proj.weight"]
                  - averages["model.action_in_proj.weight"]).max() > 1e-3  # fmt: skip
    for key, value in engines[0][name]["plain"]["averages"].items():
        np.testing.assert_allclose(value, averages[key], rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
def test_averages_are_cut_as_the_weights_are(name, single, engines):
    whole = single["plain"]["elements"]
    pieces = [rank[name]["plain"]["elements"] for rank in engines]
    assert sum(pieces) == whole
    assert max(pieces) < 0.6 * whole


@pytest.mark.parametrize("name", TWO_RANKS)
def test_a_rank_without_samples_takes_part_and_counts_none(name, single, engines):
    for rank in engines:
        assert rank[name]["one_sample"] == pytest.approx(single["one_sample"], rel=1e-5)
