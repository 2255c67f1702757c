"""Speed of MuonAdamW against the public algorithm written plainly and against torch's own Muon.

    python benchmarks/optimizer/speed.py [--case single|torch|fsdp1|fsdp2|packages|all]

Both sides step in turn on the same gradients, one thread per rank; the ratio is the median over the
rounds. The results must agree; nothing is asserted about time.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

from opendm.optimizer import MuonAdamW
from opendm.optimizer.newton_schulz import NsDtype

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import describe_machine, gemm_rate
from packages import compare_packages
from rounds import (
    BETAS,
    LR,
    WEIGHT_DECAY,
    Comparison,
    Side,
    Stepper,
    give_gradients,
    interleave,
    is_matrix,
    make_expert,
    orthogonalisation_flops,
    time_by_part,
    worst_difference,
)
from straightforward import StraightforwardMuonAdamW, matrix_shapes

NUM_RANKS: Final = 2
LARGEST_DIFFERENCE: Final = 1e-4
ACCURACY_WIDTH: Final = 256
WANTED: Final = {"single": 1.7, "torch": 2.0, "fsdp1": 2.2, "fsdp2": 3.0}
OUR_PARTS: Final = {"newton_schulz": "orthogonalisation", "symmetric": "orthogonalisation",
                    "exchange": "exchange", "adamw_step": "AdamW",
                    "update_rules.adamw_": "AdamW"}  # fmt: skip
THEIR_PARTS: Final = {"straightforward.orthogonalise": "orthogonalisation",
                      "straightforward.gather": "exchange", "_api.full_tensor": "exchange",
                      "straightforward._adamw": "AdamW"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the command line asks for."""

    width: int
    sharded_width: int
    layers: int
    rounds: int


class Together:
    """Two optimizers that step as one."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self._both = (first, second)

    def step(self) -> None:
        for optimizer in self._both:
            optimizer.step()


def our_optimizer(model: nn.Module, ns_dtype: NsDtype = "fp32") -> Stepper:
    return MuonAdamW(
        model, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, predicate=is_matrix,
        ns_dtype=ns_dtype,
    )  # fmt: skip


def plain_optimizer(model: nn.Module, shapes: dict[str, tuple[int, int]]) -> Stepper:
    return StraightforwardMuonAdamW(
        model.named_parameters(), shapes, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY
    )


def torch_optimizers(model: nn.Module) -> Stepper:
    """torch.optim.Muon, which computes in bfloat16, with the same size of update as ours."""
    named = list(model.named_parameters())
    matrices = [param for name, param in named if is_matrix(name, param)]
    rest = [param for name, param in named if not is_matrix(name, param)]
    return Together(
        torch.optim.Muon(
            matrices, lr=LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True),
    )


def plainly(model: nn.Module) -> Stepper:
    return plain_optimizer(model, matrix_shapes(model, is_matrix))


def error_to_float64(make: Callable[[nn.Module], Stepper]) -> float:
    """Worst relative error of two steps on one narrow layer, held against how far it moved."""
    start, exact, model = (make_expert(ACCURACY_WIDTH, 1) for _ in range(3))
    exact.double()
    sides = ((exact, plainly(exact)), (model, make(model)))
    for step in range(2):
        for own_model, optimizer in sides:
            give_gradients(own_model, step)
            optimizer.step()
    return worst_difference(model, exact, start)


def compare_in_one_process(sizes: Sizes) -> None:
    ours, theirs, start = (make_expert(sizes.width, sizes.layers) for _ in range(3))
    report(
        "single",
        Side("MuonAdamW", ours, our_optimizer(ours)),
        Side("straightforward", theirs, plainly(theirs)),
        start,
        sizes,
    )


def compare_with_torch(sizes: Sizes) -> None:
    """Compare in float32, and in torch's own bfloat16 as well: processors differ in its speed."""
    precisions: tuple[NsDtype, ...] = ("fp32", "bf16")
    for precision in precisions:
        make = partial(our_optimizer, ns_dtype=precision)
        ours, theirs, start = (make_expert(sizes.width, sizes.layers) for _ in range(3))
        report(
            "torch",
            Side(f"MuonAdamW in {precision}", ours, make(ours)),
            Side("torch.optim.Muon + AdamW(fused=True)", theirs, torch_optimizers(theirs)),
            start,
            sizes,
        )
        print(f"  error to float64: ours {error_to_float64(make):.1e}, "
              f"theirs {error_to_float64(torch_optimizers):.1e}", flush=True)  # fmt: skip


def compare_sharded(case: str, sizes: Sizes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_one_rank, (case, sizes, folder), NUM_RANKS)


def _one_rank(rank: int, case: str, sizes: Sizes, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    models = [make_expert(sizes.sharded_width, sizes.layers) for _ in range(3)]
    shapes = matrix_shapes(models[0], is_matrix)
    ours, theirs, start = (_shard(case, model) for model in models)
    report(
        case,
        Side("MuonAdamW", ours, our_optimizer(ours)),
        Side("straightforward", theirs, plain_optimizer(theirs, shapes)),
        start,
        sizes,
    )
    dist.destroy_process_group()


def _shard(case: str, model: nn.Module) -> nn.Module:
    """Make every layer a unit of its own, as the per-layer preset does."""
    if case == "fsdp2":
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    layers = set(model.get_submodule("layers").children())
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=lambda module, recurse, **_: recurse or module in layers,
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=torch.device("cpu"),
    )


def report(case: str, ours: Side, theirs: Side, start: nn.Module, sizes: Sizes) -> None:
    """Time one case and print its block; every rank takes part and the first one prints."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    width = sizes.width if ranks == 1 else sizes.sharded_width
    comparison = interleave(ours, theirs, sizes.rounds, seed=rank)
    difference = worst_difference(ours.model, theirs.model, start)
    parts = [
        time_by_part(labels, side.optimizer)
        for side, labels in ((ours, OUR_PARTS), (theirs, THEIR_PARTS))
    ]
    if rank == 0:
        print(f"{case}: {ranks} rank(s), width {width}, {sizes.layers} layers")
        print_ratio(comparison, ours.name, theirs.name, WANTED[case])
        print(f"  largest relative difference of the parameters' movement: {difference:.1e}")
        for side, seconds in zip((ours, theirs), parts, strict=True):
            listed = ", ".join(f"{part} {value:.3f}" for part, value in seconds.items())
            print(f"  time of {side.name} on rank 0 (s): {listed}")
        plain, least = (flops / ranks for flops in orthogonalisation_flops(width, sizes.layers))
        rate = gemm_rate()
        print(f"  floor of the orthogonalisation at {rate / 1e9:.0f} GFLOP/s a rank (s): plain "
              f"form {plain / rate:.3f}, least FLOPs known {least / rate:.3f}",
              flush=True)  # fmt: skip
    if case != "torch" and not difference < LARGEST_DIFFERENCE:
        raise SystemExit(f"{case}: the two sides differ by {difference:.1e}; "
                         f"less than {LARGEST_DIFFERENCE:.0e} is allowed")  # fmt: skip


def print_ratio(comparison: Comparison, ours: str, theirs: str, wanted: float) -> None:
    print(f"  {ours} {comparison.ours_s:.3f} s, {theirs} {comparison.theirs_s:.3f} s a step")
    print(f"  ratio {comparison.ratio:.2f} ({comparison.lowest:.2f} to {comparison.highest:.2f}), "
          f"wanted {wanted}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024, help="of the model in one process")
    parser.add_argument("--sharded-width", type=int, default=512, help="of the sharded model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    cases = ("single", "torch", "fsdp1", "fsdp2", "packages")
    parser.add_argument("--case", choices=(*cases, "all"), default="all")
    chosen = parser.parse_args()
    sizes = Sizes(chosen.width, chosen.sharded_width, chosen.layers, chosen.rounds)
    torch.set_num_threads(1)
    print(describe_machine(), flush=True)
    for case in cases if chosen.case == "all" else (chosen.case,):
        if case == "single":
            compare_in_one_process(sizes)
        elif case == "torch":
            compare_with_torch(sizes)
        elif case == "packages":
            compare_packages(sizes.width, sizes.rounds)
        else:
            compare_sharded(case, sizes)


if __name__ == "__main__":
    main()
