"""Most memory that a sharded step takes beyond what lives between steps, against its bound.

    OMP_NUM_THREADS=1 python benchmarks/optimizer/memory.py [--width N] [--layers N]

The bound is ``bucket_bytes`` (or the largest matrix by itself, which no bucket can be smaller than)
and one stack: what orthogonalising the largest matrix alone takes. Both peaks are running sums over
the allocations that torch's profiler reports; scratch memory inside a kernel is not among them.
Ends with 1 if a peak is above its bound.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.profiler import ProfilerActivity, profile

from opendm.optimizer import MuonAdamW
from opendm.optimizer.buckets import alive_bytes
from opendm.optimizer.newton_schulz import newton_schulz, scale_to_unit_norm
from opendm.optimizer.shard_plan import MuonShardPlan

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import describe_machine
from rounds import give_gradients, is_matrix, make_expert
from speed import _shard as shard

NUM_RANKS: Final = 2
ENGINES: Final = ("fsdp1", "fsdp2")
BUCKETS_MIB: Final = (8, 16, 64)
MIB: Final = 1 << 20
SLACK: Final = 64 << 10
"""Scalars: rates, verdicts, flags and steps."""
HEAD: Final = (
    "sharding", "bucket_bytes MiB", "buckets", "largest matrix's exchange MiB", "one stack MiB",
    "bound MiB", "peak MiB", "peak / bound",
)  # fmt: skip


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that are allocated at once while ``work`` runs, beyond those at its start."""
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    total = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        total += change
        peak = max(peak, total)
    return peak


def stack_bytes(plan: MuonShardPlan) -> int:
    """What the largest matrix takes from being put together to its update."""

    def orthogonalise() -> None:
        whole = torch.empty(largest, dtype=torch.float32).copy_(source)
        unit, finite = scale_to_unit_norm(whole)
        del whole
        newton_schulz(unit, steps=5).masked_fill_(~finite, 0.0)

    largest = max(plan.shapes, key=lambda shape: shape[0] * shape[1])
    source = torch.randn(largest)
    orthogonalise()
    return peak_bytes(orthogonalise)


def exchange_bytes(plan: MuonShardPlan) -> int:
    """What the largest matrix takes in flight, counted as ``bucket_bytes`` counts."""
    traffic = [plan.traffic(matrix) for matrix in range(len(plan.names))]
    return 2 * max(alive_bytes(by_rank.values()) for by_rank in traffic if by_rank)


def measure(rank: int, engine: str, bucket_bytes: int, model: nn.Module) -> tuple[str, bool]:
    """One line of the table and whether the peak is within its bound; the busiest rank counts."""
    optimizer = MuonAdamW(model, predicate=is_matrix, bucket_bytes=bucket_bytes)
    for step in range(2):
        give_gradients(model, seed=rank + 1000 * step)
        optimizer.step()
    give_gradients(model, seed=rank + 2000)
    peak = torch.tensor(peak_bytes(optimizer.step))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    (plan,) = optimizer.plans
    one_stack, single = stack_bytes(plan), exchange_bytes(plan)
    bound = max(bucket_bytes, single) + one_stack + SLACK
    mib = [f"{n / MIB:.1f}" for n in (single, one_stack, bound, int(peak))]
    cells = [engine, str(bucket_bytes // MIB), str(len(plan.buckets)), *mib, f"{peak / bound:.2f}"]
    return "| " + " | ".join(cells) + " |", int(peak) <= bound


def one_rank(rank: int, width: int, layers: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    failures = 0
    for engine in ENGINES:
        for size in BUCKETS_MIB:
            model = shard(engine, make_expert(width, layers))
            line, is_within = measure(rank, engine, size * MIB, model)
            failures += not is_within
            if rank == 0:
                print(line, flush=True)
    if rank == 0:
        Path(folder, "failures").write_text(str(failures))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(describe_machine())
    print(f"\n{NUM_RANKS} ranks, width {given.width}, {given.layers} layers\n")
    print("| " + " | ".join(HEAD) + " |\n|" + " --- |" * len(HEAD), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(one_rank, (given.width, given.layers, folder), NUM_RANKS)
        failures = int(Path(folder, "failures").read_text())
    print(f"\n{failures} peaks are above their bound" if failures else "\nall within the bound")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
