"""Work and bytes of the distributed Muon step of the released DM05, from the plan alone.

    python benchmarks/optimizer/traffic.py [--flops-per-s 50e12] [--bytes-per-s 50e9]

One line for each way of sharding and number of ranks:

- bound: the least that any assignment whose busiest rank is as busy could move. It is the linear
  relaxation of the assignment problem, so the true ratio is smaller still.
- unbalanced: what moves if the rank with the largest part always does the work. With the Action
  Expert as one FSDP1 unit this is next to nothing, and balance costs many times as much; with a
  unit per layer every rank holds a part of every layer, and balance costs little more than the
  bound. In bytes one unit is still the cheaper one.
- lockstep work: the busiest owner of each bucket, summed over the buckets.
- one rank: the time if every rank did everything and nothing moved.

Needs scipy. Ends with 1 if a limit is missed. Where links are slow for the arithmetic, the plan may
prefer the unbalanced assignment; the limits hold for the default speeds.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array
from transformers import Gemma3TextConfig

from opendm.model.dm05.action_expert import DM05ActionExpert
from opendm.optimizer.balance import largest_holder
from opendm.optimizer.selection import is_default_muon_parameter
from opendm.optimizer.shard_plan import BYTES_PER_ELEMENT, Costs, Interval, MuonShardPlan

NUM_RANKS = (2, 4, 8, 16, 32)
NUM_MATRICES = 238
NUM_EXPERT_PARAMETERS = 641_886_208 + 217_267_200
MAX_WORK = 1.1
MAX_BYTES = 1.2
MAX_PLANNING_S = 5.0

Shape = tuple[int, ...]
Intervals = list[list[Interval]]


@dataclass(frozen=True, slots=True)
class Expert:
    """The Action Expert's parameters in order, and which of them Muon takes."""

    names: list[str]
    shapes: list[Shape]
    muon: list[int]


def released_expert() -> Expert:
    config = Gemma3TextConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=34, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, vocab_size=262208,
    )  # fmt: skip
    with torch.device("meta"):
        expert = DM05ActionExpert(config)
    parameters = {f"action_expert.{name}": p for name, p in expert.named_parameters()}
    muon = [i for i, (n, p) in enumerate(parameters.items()) if is_default_muon_parameter(n, p)]
    if (len(muon), sum(p.numel() for p in parameters.values())) != (
        NUM_MATRICES,
        NUM_EXPERT_PARAMETERS,
    ):
        raise SystemExit("this is not the released Action Expert")
    return Expert(list(parameters), [tuple(p.shape) for p in parameters.values()], muon)


def flat_shards(expert: Expert, units: Sequence[Sequence[int]], num_ranks: int) -> Intervals:
    """FSDP1: every unit is flattened, padded and cut into equal pieces."""
    found: list[dict[int, Interval]] = [{} for _ in range(num_ranks)]
    for unit in units:
        sizes = [int(np.prod(expert.shapes[i])) for i in unit]
        piece = -(-sum(sizes) // num_ranks)
        for rank, held in enumerate(found):
            offset = 0
            for i, size in zip(unit, sizes, strict=True):
                start = min(max(rank * piece - offset, 0), size)
                stop = min(max((rank + 1) * piece - offset, 0), size)
                held[i] = (start, stop) if start < stop else (0, 0)
                offset += size
    return [[held[i] for i in expert.muon] for held in found]


def one_unit(expert: Expert, num_ranks: int) -> Intervals:
    return flat_shards(expert, [range(len(expert.names))], num_ranks)


def unit_per_layer(expert: Expert, num_ranks: int) -> Intervals:
    units: dict[str, list[int]] = {}
    for i, name in enumerate(expert.names):
        parts = name.split(".")
        units.setdefault(parts[2] if parts[1] == "layers" else "rest", []).append(i)
    return flat_shards(expert, list(units.values()), num_ranks)


def row_shards(expert: Expert, num_ranks: int) -> Intervals:
    """FSDP2: rows are cut as by torch.chunk."""
    intervals: Intervals = []
    for rank in range(num_ranks):
        held: list[Interval] = []
        for rows, cols in (expert.shapes[i] for i in expert.muon):
            piece = -(-rows // num_ranks)
            start, stop = min(rank * piece, rows), min((rank + 1) * piece, rows)
            held.append((start * cols, stop * cols) if start < stop else (0, 0))
        intervals.append(held)
    return intervals


def replicas(expert: Expert, num_ranks: int) -> Intervals:
    full = [(0, int(np.prod(expert.shapes[i]))) for i in expert.muon]
    return [full] * num_ranks


def hybrid(expert: Expert, num_ranks: int) -> Intervals:
    """Two replicas of layer-wise flat shards."""
    return unit_per_layer(expert, num_ranks // 2) * 2


LAYOUTS: dict[str, Callable[[Expert, int], Intervals]] = {
    "FSDP1, one unit": one_unit,
    "FSDP1, unit per layer": unit_per_layer,
    "FSDP2": row_shards,
    "hybrid 2 x G/2": hybrid,
    "DDP": replicas,
}


def held_elements(plan: MuonShardPlan) -> np.ndarray:
    """``[rank, matrix]``."""
    return np.array([[stop - start for start, stop in row] for row in plan.intervals])


def moved_bytes(plan: MuonShardPlan, held_by_owners: float) -> float:
    """Bytes of any assignment, from what the owners hold before the step."""
    full = sum(rows * cols for rows, cols in plan.shapes)
    return BYTES_PER_ELEMENT * (full + held_elements(plan).sum() - 2 * held_by_owners)


def unbalanced_bytes(plan: MuonShardPlan) -> float:
    return moved_bytes(plan, held_elements(plan).max(axis=0).sum())


def bytes_bound(plan: MuonShardPlan, cap: int) -> float:
    """Least bytes of fractional assignments in which no rank has more work than ``cap``."""
    held = held_elements(plan)
    num_ranks, num_matrices = held.shape
    flops = np.array(plan.flops) / cap
    columns = np.arange(held.size)
    ones = coo_array((np.ones(held.size), (columns % num_matrices, columns)))
    loads = coo_array((np.tile(flops, num_ranks), (columns // num_matrices, columns)))
    solved = linprog(
        -held.ravel() / held.max(), A_ub=loads, b_ub=np.ones(num_ranks), A_eq=ones,
        b_eq=np.ones(num_matrices), bounds=(0, None), method="highs",
    )  # fmt: skip
    if not solved.success:
        raise SystemExit(f"no bound: {solved.message}")
    return moved_bytes(plan, -solved.fun * held.max())


def lockstep_work(plan: MuonShardPlan) -> float:
    """Work of the busiest owner of each bucket, summed, over the mean of all work."""
    total = 0
    for bucket in plan.buckets:
        loads = [0] * len(plan.intervals)
        for matrix in bucket:
            loads[plan.owners[matrix]] += plan.flops[matrix]
        total += max(loads)
    return total * len(plan.intervals) / sum(plan.flops)


def unbalanced_seconds(plan: MuonShardPlan, costs: Costs) -> float:
    held = [{r: n for r, n in enumerate(column) if n} for column in held_elements(plan).T.tolist()]
    owners = tuple(largest_holder(held, plan.flops, len(plan.intervals)))
    return replace(plan, owners=owners).modelled_seconds(costs)


def lines(expert: Expert, costs: Costs) -> Iterator[tuple[str, list[str]]]:
    """Each line of the table and the limits that it misses."""
    names = [expert.names[i] for i in expert.muon]
    shapes = [expert.shapes[i] for i in expert.muon]
    for layout, intervals in LAYOUTS.items():
        for num_ranks in NUM_RANKS:
            plan = MuonShardPlan.build(names, shapes, intervals(expert, num_ranks), costs=costs)
            work = max(plan.work()) * num_ranks / sum(plan.flops)
            sent, received = plan.sent_bytes(), plan.received_bytes()
            bound = bytes_bound(plan, max(plan.work()))
            ratio = sum(sent) / bound if bound > 1 else 1.0
            unbalanced = unbalanced_bytes(plan)
            alone = sum(plan.flops) / costs.flops_per_s
            mib = [sum(sent), max(map(max, sent, received)), bound, unbalanced]
            cells = [
                layout, str(num_ranks), f"{work:.3f}", *(f"{b / 2**20:.0f}" for b in mib),
                f"{ratio:.3f}", f"{sum(sent) / unbalanced:.1f}", str(len(plan.buckets)),
                f"{lockstep_work(plan):.2f}",
                *(f"{1e3 * s:.1f}" for s in (plan.modelled_seconds(costs),
                                            unbalanced_seconds(plan, costs), alone)),
            ]  # fmt: skip
            missed = []
            if work > MAX_WORK:
                missed.append(f"{layout}, {num_ranks} ranks: work {work:.3f} > {MAX_WORK}")
            if ratio > MAX_BYTES:
                missed.append(f"{layout}, {num_ranks} ranks: bytes {ratio:.3f} > {MAX_BYTES}")
            yield "| " + " | ".join(cells) + " |", missed


def planning_seconds(expert: Expert, num_matrices: int, num_ranks: int) -> float:
    shapes = [expert.shapes[i] for i in expert.muon]
    shapes = [shapes[i % len(shapes)] for i in range(num_matrices)]
    large = Expert([str(i) for i in range(num_matrices)], shapes, list(range(num_matrices)))
    intervals = row_shards(large, num_ranks)
    started = time.perf_counter()
    MuonShardPlan.build(large.names, shapes, intervals, costs=Costs(50e12, 50e9))
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flops-per-s", type=float, default=50e12, help="of one rank")
    parser.add_argument("--bytes-per-s", type=float, default=50e9, help="one rank, one direction")
    given = parser.parse_args()
    costs = Costs(given.flops_per_s, given.bytes_per_s)
    head = (
        "sharding", "ranks", "busiest work / mean", "MiB", "busiest MiB", "bound MiB",
        "unbalanced MiB", "bytes / bound", "bytes / unbalanced", "buckets", "lockstep work / mean",
        "modelled ms", "unbalanced ms", "one rank ms",
    )  # fmt: skip
    print(f"{given.flops_per_s:g} FLOP/s, {given.bytes_per_s:g} B/s\n")
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    failures = []
    expert = released_expert()
    for line, missed in lines(expert, costs):
        print(line, flush=True)
        failures += missed
    seconds = planning_seconds(expert, 2000, 64)
    print(f"\nplanning 2000 matrices on 64 ranks takes {seconds:.2f} s")
    if seconds > MAX_PLANNING_S:
        failures.append(f"planning {seconds:.2f} s > {MAX_PLANNING_S}")
    print("\n" + ("\n".join(failures) or "all limits are kept"))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
