"""Times, noisy actions and the masked loss."""

import math

import pytest
import torch

from opendm.model.dm05.flow_matching import (
    draw_noise_and_time,
    fused_linear_euler_update,
    masked_flow_matching_loss,
    noisy_actions,
    posemb_sincos,
    real_dimensions,
    sampling_times,
    training_time,
    velocity_target,
)


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        (0.5, [0, 0, 1, 0.707107, 1, -1, 0, 0.707107]),
        (0.001, [1, 0.156434, 0.015707, 0.001571, 0, 0.987688, 0.999877, 0.999999]),
    ],
)
def test_time_embedding_has_the_stated_values(time, expected):
    embedding = posemb_sincos(torch.tensor([time], dtype=torch.float64), 8, 4e-3, 4.0)
    torch.testing.assert_close(embedding, torch.tensor([expected]), rtol=0, atol=1e-6)


def test_time_embedding_is_float32_computed_in_float64():
    time = torch.rand(16, generator=torch.Generator().manual_seed(0))
    embedding = posemb_sincos(time, 64, 4e-3, 4.0)
    period = [4e-3 * 1000 ** (i / 31) for i in range(32)]
    exact = [[math.sin(2 * math.pi * t / p) for p in period] for t in time.tolist()]
    assert embedding.dtype == torch.float32
    torch.testing.assert_close(embedding[:, :32], torch.tensor(exact), rtol=0, atol=1e-7)


def test_training_times_have_the_quantiles_of_the_law():
    """P(Beta(1.5, 1) < t) = t**1.5, stretched onto [0.001, 1]."""
    _, time = draw_noise_and_time(torch.arange(20_000), 1, 1)
    time = time.double()
    assert time.min() >= 0.001
    assert time.max() <= 1.0
    for probability in (0.05, 0.25, 0.5, 0.75, 0.95):
        quantile = probability ** (1 / 1.5) * 0.999 + 0.001
        share = (time < quantile).double().mean().item()
        assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / 20_000)


def test_training_time_maps_the_ends_of_the_unit_interval():
    ends = training_time(torch.tensor([0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(ends, torch.tensor([0.001, 1.0], dtype=torch.float64))


def test_noise_is_standard_normal():
    noise, _ = draw_noise_and_time(torch.arange(200), 50, 32)
    assert abs(noise.mean().item()) < 0.01
    assert abs(noise.std().item() - 1) < 0.01


def test_draws_depend_on_the_seed_alone():
    seeds = torch.tensor([5, 2**32 - 1, 0, 7])
    order = torch.tensor([2, 0, 3, 1])
    noise, time = draw_noise_and_time(seeds, 3, 4)
    torch.manual_seed(99)
    turned_noise, turned_time = draw_noise_and_time(seeds[order], 3, 4)
    assert torch.equal(turned_noise, noise[order])
    assert torch.equal(turned_time, time[order])
    assert noise.flatten(1).unique(dim=0).shape[0] == time.unique().numel() == 4


def test_path_runs_from_data_to_noise_along_the_target():
    action, noise = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(noisy_actions(action, noise, torch.zeros(2)), action)
    assert torch.equal(noisy_actions(action, noise, torch.ones(2)), noise)
    step = noisy_actions(action, noise, torch.full((2,), 0.75))
    step = step - noisy_actions(action, noise, torch.full((2,), 0.25))
    torch.testing.assert_close(2 * step, velocity_target(action, noise))


def test_loss_is_the_mean_over_valid_elements_of_each_sample():
    prediction = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[1.0, 1.0], [1.0, 1.0]]])
    mask = torch.tensor([[[True, False], [True, False]], [[True, True], [True, True]]])
    loss = masked_flow_matching_loss(prediction, torch.zeros(2, 2, 2), mask)
    assert loss.tolist() == [5.0, 1.0]


def test_loss_without_mask_counts_everything():
    prediction = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    assert masked_flow_matching_loss(prediction, torch.zeros(1, 2, 2), None).tolist() == [7.5]


@pytest.mark.parametrize("value", [1e4, float("inf"), float("nan")])
def test_masked_targets_change_neither_loss_nor_gradient(value):
    generator = torch.Generator().manual_seed(2)
    prediction, target = torch.randn(2, 3, 4, 5, generator=generator)
    mask = torch.rand(3, 4, 5, generator=generator) < 0.5
    mask[1] = False
    results = []
    for targets in (target, target.masked_fill(~mask, value)):
        leaf = prediction.clone().requires_grad_()
        loss = masked_flow_matching_loss(leaf, targets, mask)
        loss.sum().backward()
        results.append((loss.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][0][1] == 0
    assert not results[0][1][1].any()


def test_dimension_is_real_when_any_row_has_it():
    mask = torch.tensor([[[True, True, False], [True, False, False]]])
    assert real_dimensions(mask).tolist() == [[[True, True, False]]]


def test_sampling_starts_at_noise_and_takes_equal_steps():
    assert sampling_times(4) == [1.0, 0.75, 0.5, 0.25]


def test_euler_update_adds_a_step_of_the_linear_layer():
    linear = torch.nn.Linear(2, 2)
    hidden, current = torch.ones(1, 1, 2), torch.zeros(1, 1, 2)
    updated = fused_linear_euler_update(
        hidden_states=hidden, current=current, linear=linear, dt=-0.5
    )
    torch.testing.assert_close(updated, -0.5 * linear(hidden))
