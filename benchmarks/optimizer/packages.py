"""Speed and accuracy of MuonAdamW against the packages on PyPI that run Muon on a CPU.

    python benchmarks/optimizer/packages.py [--width N] [--rounds N]

A package that is not installed is named and skipped; none is a dependency of this project.
"""

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from opendm.optimizer import MuonAdamW
from opendm.optimizer.newton_schulz import NsDtype

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import describe_machine
from rounds import MATRICES, Layer, Side, Stepper, give_gradients, interleave
from straightforward import QUINTIC, orthogonalise

RATE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Package:
    """One way to run Muon from PyPI."""

    pip_name: str
    module: str
    setting: str
    precision: str
    build: Callable[[Any, list[nn.Parameter]], Stepper]


PACKAGES: Final = (
    Package("muon-optimizer", "muon", "SingleDeviceMuon", "bf16",
            lambda m, p: m.SingleDeviceMuon(p, lr=RATE)),
    Package("pytorch-optimizer", "pytorch_optimizer", "newton_schulz", "bf16",
            lambda m, p: m.Muon([{"params": p, "use_muon": True, "lr": RATE}])),
    Package("timm", "timm.optim.muon", "original coefficients", "bf16",
            lambda m, p: m.Muon(p, lr=RATE, nesterov=True, ns_coefficients="original")),
    Package("heavyball", "heavyball", "compiled, coefficients of its own", "bf16",
            lambda m, p: m.Muon(p, lr=RATE, betas=(0.95, 0.99))),
    Package("optimuon", "optimuon", "gram form, batched", "fp32",
            lambda m, p: m.Muon(p, lr=RATE, ns_dtype=torch.float32, ns_coefficients=QUINTIC,
                                ns_norm_scale=1.0, normuon=False, cautious_wd=False)),
    Package("optimuon", "optimuon", "standard form, looped", "fp32",
            lambda m, p: m.Muon(p, lr=RATE, ns_dtype=torch.float32, ns_coefficients=QUINTIC,
                                ns_norm_scale=1.0, normuon=False, cautious_wd=False,
                                gram_ns=False, batched_ns=False)),
    Package("optimuon", "optimuon", "standard form, batched", "bf16",
            lambda m, p: m.Muon(p, lr=RATE, ns_dtype=torch.bfloat16, ns_coefficients=QUINTIC,
                                ns_norm_scale=1.0, normuon=False, cautious_wd=False,
                                gram_ns=False)),
    Package("omnimuon", "omnimuon.muon", "standard form", "fp32",
            lambda m, p: m.Muon(p, matrix_lr=RATE, weight_decay=0.0)),
)  # fmt: skip
NOT_COMPARED: Final = {
    "pytorch-optimizer 4.1.0, gram form": "float16 alone, which takes a CPU 2 s where float32 "
    "takes 0.07 s (width 256)",
    "muonium 0.2.0": "its Newton-Schulz products are Triton kernels for CUDA",
    "dtensor-muon 0.1.0": "its Newton-Schulz products are Triton kernels for CUDA",
    "triton-muon-adamw 1.0.0": "its update rules are Triton kernels for CUDA",
    "muon-fsdp2 0.3.0": "its path for one process calls a function that the package lacks",
}


def make_matrices(width: int) -> nn.Module:
    """Return the seven matrices of one layer, at zero so that a step shows the update alone."""
    layer = Layer(width)
    matrices = nn.ModuleDict({
        name: nn.Linear(*reversed(layer.get_submodule(name).weight.shape), bias=False)
        for name in MATRICES
    })  # fmt: skip
    for param in matrices.parameters():
        nn.init.zeros_(param)
    return matrices


def our_optimizer(model: nn.Module, precision: NsDtype) -> Stepper:
    return MuonAdamW(
        model, lr=RATE, weight_decay=0.0, predicate=lambda _n, _p: True, ns_dtype=precision
    )


@functools.cache
def exact_directions(width: int) -> list[torch.Tensor]:
    """Float64 directions of the first update of ``make_matrices(width)``."""
    model = make_matrices(width)
    give_gradients(model, seed=0)
    return [unit(orthogonalise(param.grad.double())) for param in model.parameters()]


def error_to_float64(side: Side, exact: list[torch.Tensor]) -> float:
    """Worst relative error of the first update's direction; packages scale it differently."""
    give_gradients(side.model, seed=0)
    side.optimizer.step()
    updates = [unit(-param.detach().double()) for param in side.model.parameters()]
    return float(max((a - b).norm() for a, b in zip(updates, exact, strict=True)))


def unit(matrix: torch.Tensor) -> torch.Tensor:
    return matrix / matrix.norm()


def compare_packages(width: int, rounds: int) -> None:
    """Print a line for each package, and one more at bfloat16 where the package computes in it."""
    print(f"packages: one process, width {width}, the seven matrices of one layer, ratio to ours")
    for name, reason in NOT_COMPARED.items():
        print(f"  {name}: not compared, {reason}")
    for package in PACKAGES:
        what = f"({package.setting}, {package.precision})"
        try:
            module = importlib.import_module(package.module)
        except ImportError as error:
            print(f"  {package.pip_name} {what}: skipped, {error}; pip install {package.pip_name}")
            continue
        head = f"  {package.pip_name} {version(package.pip_name)} {what}"
        precisions: list[NsDtype] = ["fp32", "bf16"] if package.precision == "bf16" else ["fp32"]
        for precision in precisions:
            ours, theirs = make_matrices(width), make_matrices(width)
            our_side = Side(f"ours in {precision}", ours, our_optimizer(ours, precision))
            their_optimizer = package.build(module, list(theirs.parameters()))
            their_side = Side("theirs", theirs, their_optimizer)
            exact = exact_directions(width)
            print(f"{head}: {compare_one(our_side, their_side, exact, rounds)}", flush=True)


def compare_one(ours: Side, theirs: Side, exact: list[torch.Tensor], rounds: int) -> str:
    errors = [error_to_float64(side, exact) for side in (ours, theirs)]
    comparison = interleave(ours, theirs, rounds)
    return (
        f"{ours.name} {comparison.ours_s:.3f} s, theirs {comparison.theirs_s:.3f} s, "
        f"ratio {comparison.ratio:.2f} ({comparison.lowest:.2f} to {comparison.highest:.2f}); "
        f"error to float64: ours {errors[0]:.1e}, theirs {errors[1]:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(describe_machine(), flush=True)
    compare_packages(chosen.width, chosen.rounds)


if __name__ == "__main__":
    main()
