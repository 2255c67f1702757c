"""Orthogonalisation alone, per shape of the Action Expert: plain loop, torch.optim.Muon's, ours.

    python benchmarks/optimizer/newton_schulz.py --width 1024

One thread, interleaved rounds, processor time (so that other work on the machine counts less);
errors are relative Frobenius norms against float64.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz as torch_muon

from opendm.optimizer.newton_schulz import (
    COEFFICIENTS,
    newton_schulz,
    orthogonalization_flops,
    scale_to_unit_norm,
    zeropower_via_newtonschulz5,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import describe_machine
from rounds import time_by_part
from straightforward import orthogonalise

STEPS: Final = 5
SHAPES: Final = (
    ("k, v", 1, 1, 2),
    ("q", 2, 1, 1),
    ("o", 1, 2, 1),
    ("gate, up", 4, 1, 2),
    ("down", 1, 4, 1),
)
"""Names, rows and columns in units of the width, and how many there are in a layer."""
SIDES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "plain": orthogonalise,
    "torch": lambda matrix: torch_muon(matrix, COEFFICIENTS, STEPS, 1e-7),
    "ours": zeropower_via_newtonschulz5,
    "bf16": lambda matrix: newton_schulz(
        scale_to_unit_norm(matrix)[0], steps=STEPS, ns_dtype="bf16"
    ),
}
"""The public loop, torch.optim.Muon's (bfloat16), ours in float32 and ours in bfloat16."""
PARTS: Final = {
    "symmetric.product": "matrix products",
    "symmetric.symmetric_product": "slices and mirrors",
    "newton_schulz.scale_to_unit_norm": "scaling",
}


def in_float64(matrix: Float[Tensor, "R C"]) -> Float[Tensor, "R C"]:
    """Apply the quintic in float64."""
    a, b, c = COEFFICIENTS
    x = matrix.double() / matrix.double().norm()
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def flops(rows: int, cols: int) -> tuple[float, float, int]:
    """FLOPs of the plain form, of the least form with symmetric products, and of ours."""
    n, m = min(rows, cols), max(rows, cols)
    plain = STEPS * (4 * n * n * m + 2 * n**3)
    least = min(STEPS * (3 * n * n * m + n**3), 6 * n * n * m + 14 * n**3)
    return plain, least, orthogonalization_flops(rows, cols, steps=STEPS)


def median_seconds(matrix: Float[Tensor, "R C"], rounds: int) -> dict[str, float]:
    """Processor time of each side; one round more to warm up."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds + 1):
        for side, function in SIDES.items():
            start = time.process_time()
            function(matrix)
            seconds[side].append(time.process_time() - start)
    return {side: statistics.median(values[1:]) for side, values in seconds.items()}


@dataclass(frozen=True, slots=True)
class Ours:
    """One call of ours as a step."""

    matrix: Float[Tensor, "R C"]

    def step(self) -> None:
        """Orthogonalise."""
        zeropower_via_newtonschulz5(self.matrix)


def shares(matrix: Float[Tensor, "R C"]) -> str:
    """Where the time of one call of ours goes."""
    seconds = time_by_part(PARTS, Ours(matrix))
    total = sum(seconds.values())
    return ", ".join(f"{part} {part_s / total:.1%}" for part, part_s in seconds.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(describe_machine())
    heads = "".join(f"{side + ' ms':>10}" for side in SIDES)
    print(f"{'shape':22}{heads}{'ours is x':>10}{'bound x':>9}{'GFLOP/s':>9}   errors (same order)")
    totals = dict.fromkeys(SIDES, 0.0)
    plain_flops = least_flops = 0.0
    for names, rows, cols, count in SHAPES:
        matrix = torch.randn(rows * flags.width, cols * flags.width)
        seconds = median_seconds(matrix, flags.rounds)
        reference = in_float64(matrix)
        errors = [
            float((function(matrix).double() - reference).norm() / reference.norm())
            for function in SIDES.values()
        ]
        plain, least, ours = flops(*matrix.shape)
        plain_flops, least_flops = plain_flops + count * plain, least_flops + count * least
        for side in SIDES:
            totals[side] += count * seconds[side]
        print(f"{names + ' ' + 'x'.join(map(str, matrix.shape)):22}"
              + "".join(f"{1e3 * seconds[side]:10.1f}" for side in SIDES)
              + f"{seconds['plain'] / seconds['ours']:10.2f}{plain / least:9.2f}"
              + f"{ours / seconds['ours'] / 1e9:9.0f}   "
              + ", ".join(f"{error:.1e}" for error in errors))  # fmt: skip
    print(f"the set of a layer: {totals['plain'] / totals['ours']:.2f} x the plain loop's speed, "
          f"{totals['torch'] / totals['ours']:.2f} x torch.optim.Muon's (in bfloat16 "
          f"{totals['torch'] / totals['bf16']:.2f} x); bound by FLOPs "
          f"{plain_flops / least_flops:.2f} x")  # fmt: skip
    print(f"where the time goes at {tuple(matrix.shape)}: {shares(matrix)}")


if __name__ == "__main__":
    main()
