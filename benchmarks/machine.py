"""What a benchmark ran on: processor, versions and a rate to hold its times against."""

import datetime
import os
import platform
import time
from pathlib import Path
from typing import Final

import torch

CALIBRATION_SIZE: Final = 2048
CPU_FLAGS: Final = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def gemm_rate(size: int = CALIBRATION_SIZE, repeats: int = 3) -> float:
    """Return the best rate of one float32 matrix product on one thread, in FLOP/s."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    left, right = torch.randn(size, size), torch.randn(size, size)
    result = left @ right
    fastest_s = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(left, right, out=result)
        fastest_s = min(fastest_s, time.perf_counter() - start)
    torch.set_num_threads(threads)
    return 2 * size**3 / fastest_s


def describe_machine() -> str:
    """Return a few lines for the head of a result file: no host name and no path."""
    model, flags = _processor()
    listed = ", ".join(f"{flag} {'yes' if flag in flags else 'no'}" for flag in CPU_FLAGS)
    rate = gemm_rate() / 1e9
    return "\n".join((
        f"date: {datetime.datetime.now(tz=datetime.UTC).date().isoformat()}",
        f"processor: {model}, {os.cpu_count()} visible; {listed}",
        f"threads per process: {torch.get_num_threads()}",
        f"python {platform.python_version()}, torch {torch.__version__}",
        f"calibration: {rate:.1f} GFLOP/s, float32 {CALIBRATION_SIZE}^2, one thread, best of 3",
    ))  # fmt: skip


def _processor() -> tuple[str, frozenset[str]]:
    """Name and flags of the first processor that Linux lists; elsewhere the architecture alone."""
    listing = Path("/proc/cpuinfo")
    if not listing.exists():
        return platform.machine(), frozenset()
    fields = {}
    for line in listing.read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields.get("model name", platform.machine()), frozenset(fields.get("flags", "").split())
