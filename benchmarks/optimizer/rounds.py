"""What every comparison of optimizers shares: the model, its gradients and interleaved rounds."""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

LR: Final = 1e-2
WEIGHT_DECAY: Final = 0.1
BETAS: Final = (0.9, 0.95)
MATRICES: Final = ("q", "k", "v", "o", "gate", "up", "down")


class Stepper(Protocol):
    """An optimizer, or several that step together."""

    def step(self) -> object: ...


class Layer(nn.Module):
    """The parameters of one layer of the Action Expert, in its own proportions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, 2 * width)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(2 * width, width, bias=False)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])


class Expert(nn.Module):
    """Layers and one projection, which goes to AdamW as biases and norms do."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(num_layers)])
        self.projection = nn.Linear(32, width)


def make_expert(width: int, num_layers: int) -> Expert:
    """Return the same model at every call."""
    torch.manual_seed(0)
    return Expert(width, num_layers)


def is_matrix(name: str, param: nn.Parameter) -> bool:  # noqa: ARG001
    """Whether Muon gets the parameter; by name alone, since FSDP1 flattens the parameters."""
    *_, module, kind = name.split(".")
    return module in MATRICES and kind == "weight"


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def give_gradients(model: nn.Module, seed: int) -> None:
    """Fill every local gradient; another seed for every rank makes the whole matrix random."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        own = local(param)
        grad = torch.randn(own.shape, generator=generator).to(own.dtype)
        if isinstance(param, DTensor):
            grad = DTensor.from_local(
                grad, param.device_mesh, param.placements, run_check=False,
                shape=param.shape, stride=param.stride(),
            )  # fmt: skip
        param.grad = grad if own.numel() > 0 else None


def orthogonalisation_flops(width: int, num_layers: int) -> tuple[float, float]:
    """FLOPs of one step over the whole model: the plain iteration, and the least that is known.

    For a matrix with shorter side n and aspect ratio r the plain form takes (20 r + 10) n^3. With
    symmetric products it takes (15 r + 5) n^3, and over the n x n products alone with one restart
    (14 + 6 r) n^3; the least is the smaller of these two.
    """
    ratios = (2, 1, 1, 2, 4, 4, 4)
    cube = num_layers * float(width) ** 3
    plain = sum(20 * ratio + 10 for ratio in ratios)
    least = sum(min(15 * ratio + 5, 14 + 6 * ratio) for ratio in ratios)
    return plain * cube, least * cube


@dataclass(frozen=True, slots=True)
class Side:
    """One optimizer with its own copy of the model."""

    name: str
    model: nn.Module
    optimizer: Stepper


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over the rounds, of the slowest rank where there are several."""

    ours_s: float
    theirs_s: float
    ratio: float
    lowest: float
    highest: float


def interleave(ours: Side, theirs: Side, rounds: int, seed: int = 0) -> Comparison:
    """Step both sides in turn on the same gradients; one round more to warm up."""
    times = torch.zeros(rounds + 1, 2, dtype=torch.float64)
    for index in range(rounds + 1):
        for column, side in enumerate((ours, theirs)):
            give_gradients(side.model, seed + 1000 * index)
            times[index, column] = timed_step(side.optimizer)
    if dist.is_initialized():
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
    ratios = [float(late / early) for early, late in times[1:]]
    return Comparison(
        ours_s=float(times[1:, 0].median()),
        theirs_s=float(times[1:, 1].median()),
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
    )


def timed_step(optimizer: Stepper) -> float:
    """Return the seconds of one step that all ranks begin together."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


@torch.no_grad()
def worst_difference(ours: nn.Module, theirs: nn.Module, start: nn.Module) -> float:
    """Largest relative difference over the parameters, held against how far each has moved."""
    squares = torch.tensor(
        [
            [float((local(a) - local(b)).double().square().sum()),
             float((local(b) - local(c)).double().square().sum())]
            for a, b, c in zip(ours.parameters(), theirs.parameters(), start.parameters(),
                               strict=True)
        ],
        dtype=torch.float64,
    )  # fmt: skip
    if dist.is_initialized():
        dist.all_reduce(squares)
    return float((squares[:, 0] / squares[:, 1]).sqrt().max())


def time_by_part(labels: Mapping[str, str], optimizer: Stepper) -> dict[str, float]:
    """Seconds of one step by part.

    Args:
        labels: part by file stem, or by ``stem.function``; what has none counts to its caller's.
        optimizer: what steps.
    """
    seconds: dict[str, float] = defaultdict(float)
    stack = ["rest"]
    last_s = time.perf_counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal last_s
        if event not in ("call", "return"):
            return
        now_s = time.perf_counter()
        seconds[stack[-1]] += now_s - last_s
        if event == "call":
            stem = Path(frame.f_code.co_filename).stem
            part = labels.get(f"{stem}.{frame.f_code.co_name}", labels.get(stem))
            stack.append(part or stack[-1])
        elif len(stack) > 1:
            stack.pop()
        last_s = time.perf_counter()

    if dist.is_initialized():
        dist.barrier()
    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
