"""Several draws of noise and time per observation: the same loss in expectation, one prefix."""

import numpy as np
import pytest
import torch

from opendm.model.dm05.flow_matching import draw_noise_and_time

SEEDS = torch.tensor([11, 12])
DRAWS = 3


def test_draw_m_depends_on_seed_and_m_alone():
    noise, time = draw_noise_and_time(SEEDS, 5, 32, DRAWS)
    more_noise, more_time = draw_noise_and_time(SEEDS.flip(0), 5, 32, DRAWS + 2)
    for draw in range(DRAWS):
        first, second = (number * DRAWS + draw for number in range(2))
        again = (DRAWS + 2) + draw, draw
        assert noise[[first, second]].equal(more_noise[list(again)])
        assert time[[first, second]].equal(more_time[list(again)])
    assert len(set(time.tolist())) == 2 * DRAWS


def test_the_first_draw_is_that_of_a_single_one():
    generator = torch.Generator().manual_seed(11)
    noise = torch.randn(5, 32, generator=generator)
    uniform = torch.rand(1, generator=generator, dtype=torch.float64)
    drawn, time = draw_noise_and_time(SEEDS, 5, 32, DRAWS)
    assert drawn[0].equal(noise)
    np.testing.assert_allclose(time[0], 0.999 * uniform.item() ** (2 / 3) + 0.001, rtol=1e-6)


def losses_and_gradients(model, inputs):
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output.per_sample_loss, gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-6)])
def test_the_loss_is_the_mean_over_single_draws(model, batch, dtype, tolerance, checkpointing):
    """Float64 weights still meet float32 norms and times, hence its tolerance."""
    model.to(dtype).train()
    model.set_attention_implementation(
        llm_attn_implementation="sdpa",
        vision_attn_implementation="sdpa",
        action_attn_implementation="sdpa",
        bf16=False,
    )
    model.enable_gradient_checkpointing(
        vlm_gradient_checkpointing=checkpointing, ae_gradient_checkpointing=checkpointing
    )
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    noise, time = draw_noise_and_time(SEEDS, 5, 32, DRAWS)
    singles = [
        losses_and_gradients(
            model, {**inputs, "noise": noise[draw::DRAWS].to(dtype), "time": time[draw::DRAWS]}
        )
        for draw in range(DRAWS)
    ]
    model.num_noise_samples = DRAWS
    losses, gradients = losses_and_gradients(model, {**inputs, "sample_seed": SEEDS})
    expected = torch.stack([single[0] for single in singles]).mean(dim=0)
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0)
    assert gradients.keys() == singles[0][1].keys()
    means = {n: torch.stack([s[1][n] for s in singles]).mean(dim=0) for n in gradients}
    floor = 1e-3 * max(mean.norm() for mean in means.values())  # key biases have gradient 0
    for name, mean in means.items():
        error = (gradients[name] - mean).norm() / mean.norm().clamp(min=floor)
        assert error < 10 * tolerance, (name, error)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "flex_attention"])
def test_every_attention_backend_reads_the_shared_prefix(model, batch, backend):
    model.train().num_noise_samples = DRAWS
    expected = model(**batch, sample_seed=SEEDS).per_sample_loss
    model.model.action_expert.set_action_attention_backend(backend)
    losses = model(**batch, sample_seed=SEEDS).per_sample_loss
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def test_images_are_encoded_once_per_observation(model, batch):
    seen = []
    model.visual.register_forward_hook(lambda *_: seen.append(1))
    model.language_model.layers[0].register_forward_hook(
        lambda _, inputs, __: seen.append(len(inputs[0]))
    )
    model.train().num_noise_samples = DRAWS
    model(**batch, sample_seed=SEEDS)
    assert seen == [1, len(SEEDS)]


def test_evaluation_takes_the_first_draw_whatever_training_takes(model, batch):
    single = model.eval()(**batch, sample_seed=SEEDS).per_sample_loss
    model.num_noise_samples = DRAWS
    assert model(**batch, sample_seed=SEEDS).per_sample_loss.equal(single)
    assert not model.train()(**batch, sample_seed=SEEDS).per_sample_loss.equal(single)


def test_a_given_draw_is_the_only_one(model, batch, draw):
    single = model.train()(**batch, **draw).loss
    model.num_noise_samples = DRAWS
    assert model(**batch, **draw).loss.equal(single)


def test_draws_without_a_seed_differ_within_a_sample(model, batch):
    model.train().num_noise_samples = 64
    with torch.no_grad():
        torch.manual_seed(1)
        many = model(**batch).loss
        model.num_noise_samples = 1
        singles = torch.stack([model(**batch).loss for _ in range(32)])
    assert abs(many - singles.mean()) < 4 * singles.std() * (1 / 32 + 1 / 64) ** 0.5
