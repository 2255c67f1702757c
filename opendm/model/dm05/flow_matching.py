"""Flow matching: times, noisy actions, targets, the masked loss and the Euler step.

Time runs from 1 (noise) to 0 (data), the reverse of Lipman et al. 2023, arXiv:2210.02747.
"""

import math
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from opendm.shapes import ActionMask, Actions, Loss, Time

# Density of training times: Beta(1.5, 1), which favours noisy inputs, kept off the ends
# (Black et al. 2024, arXiv:2410.24164, appendix B, mirrored to our direction of time).
BETA_ALPHA: Final = 1.5
TIME_SCALE: Final = 0.999
TIME_OFFSET: Final = 0.001

MIN_PERIOD: Final = 4e-3
MAX_PERIOD: Final = 4.0


def training_time(uniform: Float[Tensor, " B"]) -> Time:
    """Times of the training law from uniform numbers in [0, 1).

    Beta(a, 1) has the distribution function ``t**a``, so its inverse is a power.
    """
    return uniform ** (1.0 / BETA_ALPHA) * TIME_SCALE + TIME_OFFSET


def draw_noise_and_time(
    sample_seed: Int[Tensor, " S"], num_steps: int, action_dim: int, num_draws: int = 1
) -> tuple[Actions, Time]:
    """Noise ``[B, T, A]`` and times ``[B]`` on the CPU, ``num_draws`` rows after another per seed.

    Draw m of a sample depends on nothing but the sample's seed and m: neither rank, nor batch, nor
    device, nor how many draws follow. Torch's CPU generator reads the low 32 bits of a seed, so
    these must differ between samples.
    """
    noises, uniforms = [], []
    for seed in sample_seed.tolist():
        generator = torch.Generator().manual_seed(seed)
        for _ in range(num_draws):
            noises.append(torch.randn(num_steps, action_dim, generator=generator))
            uniforms.append(torch.rand(1, generator=generator, dtype=torch.float64))
    return torch.stack(noises), training_time(torch.cat(uniforms)).float()


def posemb_sincos(
    time: Time, dim: int, min_period: float = 4e-3, max_period: float = 256.0
) -> Float[Tensor, "B dim"]:
    """Sines and cosines of ``time`` at ``dim / 2`` log-spaced periods, float32.

    Angles reach 2π / min_period ≈ 1571 rad, where float32 is off by 1e-4; they are computed in
    float64 and only the sines and cosines are rounded.
    """
    fraction = torch.linspace(0.0, 1.0, dim // 2, dtype=torch.float64, device=time.device)
    period = min_period * (max_period / min_period) ** fraction
    angle = 2.0 * math.pi * time.double()[:, None] / period
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()


def noisy_actions(action: Actions, noise: Actions, time: Time) -> Actions:
    """Points on the straight line from data (time 0) to noise (time 1)."""
    time = time[:, None, None].to(action.dtype)
    return time * noise + (1.0 - time) * action


def velocity_target(action: Actions, noise: Actions) -> Actions:
    """Direction from data to noise."""
    return noise - action


def real_dimensions(action_mask: ActionMask) -> Bool[Tensor, "B 1 A"]:
    """Dimensions that any row of the sample has; padding is false."""
    return action_mask.any(dim=1, keepdim=True)


def masked_flow_matching_loss(
    prediction: Actions, target: Actions, mask: Bool[Tensor, "#B #T #A"] | None
) -> Loss:
    """Mean squared error per sample over its valid elements, float32.

    A sample without any valid element has loss 0 and gradient 0.
    """
    difference = prediction.float() - target.float()
    if mask is None:
        return difference.square().mean(dim=(1, 2))
    valid = mask.expand_as(difference)
    # Before squaring: the square of an infinite difference has the gradient 0 * inf.
    error = torch.where(valid, difference, 0.0).square()
    return error.sum(dim=(1, 2)) / valid.sum(dim=(1, 2)).clamp(min=1)


def fused_linear_euler_update(
    *, hidden_states: Float[Tensor, "B T H"], current: Actions, linear: nn.Linear, dt: float
) -> Actions:
    """One explicit Euler step, ``current + dt * linear(hidden_states)``."""
    return current + dt * linear(hidden_states)


def sampling_times(num_flow_steps: int) -> list[float]:
    """Times 1, 1 - 1/n, ... at which the velocity is evaluated, accumulated in Python."""
    times, time = [], 1.0
    for _ in range(num_flow_steps):
        times.append(time)
        time -= 1.0 / num_flow_steps
    return times
