"""The step of the released Action Expert's 238 matrices on one GPU, against its FLOP bound.

    python benchmarks/optimizer/device.py [--device cuda] [--width 1024] [--layers 34]

Takes below four minutes. On a CPU, with small sizes, it shows that the script runs; the rates, the
ratios to the bound and the search for host synchronisation need a GPU. Ends with 1 if a step on a
GPU is more than 1.35 times as long as its products take at the measured rate, or waits for the
device.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from opendm.optimizer import MuonAdamW
from opendm.optimizer.newton_schulz import (
    TORCH_DTYPES,
    NsDtype,
    newton_schulz,
    scale_to_unit_norm,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import describe_machine
from newton_schulz import in_float64
from rounds import is_matrix, make_expert

DTYPES: Final[tuple[NsDtype, ...]] = get_args(NsDtype)
MAX_RATIO: Final = 1.35
RATE_SIZE: Final = 8192
LOOPED: Final = 1
"""``stack_bytes`` with which every matrix is a stack of its own."""


def seconds(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Median time of ``work``, once more to warm up."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def precision(ns_dtype: NsDtype) -> Iterator[None]:
    """What float32 products are computed in."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if ns_dtype == "tf32" else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def matmul_rate(ns_dtype: NsDtype) -> float:
    """FLOP/s of a large square product on the GPU."""
    left, right = torch.randn(2, RATE_SIZE, RATE_SIZE, device="cuda").to(TORCH_DTYPES[ns_dtype])
    out = torch.empty_like(left)
    with precision(ns_dtype):
        return 2 * RATE_SIZE**3 / seconds(lambda: torch.mm(left, right, out=out), "cuda")


def make_model(device: str, width: int, layers: int) -> nn.Module:
    """The matrices with the gradients of one step."""
    with torch.device(device):
        model = make_expert(width, layers)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return model


def make_optimizer(model: nn.Module, ns_dtype: NsDtype, **options: int) -> MuonAdamW:
    return MuonAdamW(model, lr=1e-6, predicate=is_matrix, ns_dtype=ns_dtype, **options)


def products_flops(optimizer: MuonAdamW) -> int:
    """FLOPs of all matrix products that a step launches."""
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    return counter.get_total_flops()


def compare_steps(model: nn.Module, device: str) -> bool:
    """Print a line for each dtype; whether all are within the bound."""
    print("\n| ns_dtype | TFLOP/s of a large product | TFLOP a step | batched ms | looped ms | "
          "bound ms | batched / bound |\n|" + " --- |" * 7)  # fmt: skip
    is_within = True
    for ns_dtype in DTYPES:
        optimizer = make_optimizer(model, ns_dtype)
        flops = products_flops(optimizer)
        batched_s = seconds(optimizer.step, device)
        looped_s = seconds(make_optimizer(model, ns_dtype, stack_bytes=LOOPED).step, device)
        of_bound = ["-", "-", "-"]
        if device == "cuda":
            rate = matmul_rate(ns_dtype)
            ratio = batched_s * rate / flops
            is_within &= ratio <= MAX_RATIO
            of_bound = [f"{rate / 1e12:.0f}", f"{1e3 * flops / rate:.1f}", f"{ratio:.2f}"]
        cells = (
            ns_dtype, of_bound[0], f"{flops / 1e12:.4g}", f"{1e3 * batched_s:.1f}",
            f"{1e3 * looped_s:.1f}", *of_bound[1:],
        )  # fmt: skip
        print("| " + " | ".join(cells) + " |", flush=True)
    return is_within


def hard_matrix(rows: int, cols: int, device: str) -> Float[Tensor, "rows cols"]:
    """Singular values evenly spaced in the logarithm over four decades."""
    left = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(cols, rows, dtype=torch.float64))[0]
    values = torch.logspace(0, -4, rows, dtype=torch.float64)
    return (left * values @ right.T).float().to(device)


def compare_accuracy(device: str, width: int) -> None:
    """Print relative errors to the same iteration in float64."""
    print("\n| matrix | " + " | ".join(DTYPES) + " |\n|" + " --- |" * (1 + len(DTYPES)))
    matrices = {
        f"normal {width}x{width}": torch.randn(width, width, device=device),
        f"normal {width}x{4 * width}": torch.randn(width, 4 * width, device=device),
        f"four decades {width}x{width}": hard_matrix(width, width, device),
        f"four decades {width}x{4 * width}": hard_matrix(width, 4 * width, device),
    }
    for name, matrix in matrices.items():
        exact = in_float64(matrix)
        unit, _ = scale_to_unit_norm(matrix)
        errors = [
            float((newton_schulz(unit, steps=5, ns_dtype=d).double() - exact).norm() / exact.norm())
            for d in DTYPES
        ]
        print(f"| {name} | " + " | ".join(f"{error:.1e}" for error in errors) + " |", flush=True)


def never_waits(model: nn.Module) -> bool:
    """Whether a step runs where every wait of the host for the GPU is an error."""
    optimizer = make_optimizer(model, "fp32")
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    except RuntimeError as error:
        print(f"\nthe step waits for the device: {error}")
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    print("\nno host synchronisation in a step")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=34)
    given = parser.parse_args()
    print(describe_machine())
    on_gpu = given.device == "cuda"
    print(f"device: {torch.cuda.get_device_name() if on_gpu else 'cpu'}")
    torch.manual_seed(0)
    model = make_model(given.device, given.width, given.layers)
    print(f"{7 * given.layers} matrices, width {given.width}")
    is_right = compare_steps(model, given.device)
    compare_accuracy(given.device, given.width)
    if on_gpu:
        is_right &= never_waits(model)
    else:
        print("\nno GPU: rates, ratios to the bound and waits of the host are not measured")
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
