"""Bit equality of sharded steps with one process, and what such a step costs in calls.

    OMP_NUM_THREADS=1 python benchmarks/optimizer/exactness.py [--steps N] [--random N]

Runs the cases of tests/optimizer/test_sharded.py: every way of sharding on 2, 3 and 4 ranks under
gloo, with gradients that are missing, zero or not finite, then random shapes in a random one of
them. A column that is not zero, or a number that is not as wanted, ends it with 1.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/optimizer"))

from machine import describe_machine
from ranks import fork_ranks
from sharded_work import train, train_cases
from test_sharded import BLOCKS, ENGINES, NUM_MATRICES, mismatches

Counters = Sequence[dict[str, Any]]
HEAD: Final = (
    "sharding", "ranks", "differing elements", "elements nobody holds",
    "orthogonalisations / (steps x matrices)", "buckets", "collectives a step and bucket, at most",
    "new process groups", "host reads", "matrices cut in mid-row",
)  # fmt: skip


def run(cases: list[dict[str, Any]], world: int) -> list[list[Any]]:
    """Results by case and rank."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank = fork_ranks(train_cases, cases, tmp_path=Path(folder), world_size=world)
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def cut_in_mid_row(counters: dict[str, Any]) -> int:
    """Matrices with a border between two ranks that is not one between two rows."""
    return sum(
        any(stop % cols for _, stop in (row[matrix] for row in counters["intervals"]))
        for matrix, (_, cols) in enumerate(counters["shapes"])
    )


def engine_row(
    engine: str, world: int, ranks: list[Any], reference: Any, steps: int
) -> tuple[str, bool]:
    """One line of the table, and whether it is as wanted."""
    counters: Counters = [counted for _, counted in ranks]
    differing, missing = mismatches([pieces for pieces, _ in ranks], reference[0])
    done = sum(c["orthogonalized"] for c in counters) / (steps * NUM_MATRICES)
    calls = max(c["collectives"] / (steps * c["buckets"]) for c in counters)
    others = sum(len(c["other_collectives"]) for c in counters)
    groups = max(c["groups_added"] for c in counters)
    reads = sum(len(c["host_reads"]) for c in counters)
    cells = (
        engine, world, int(differing), int(missing), f"{done:g}", counters[0]["buckets"],
        f"{calls:g}", groups, reads, cut_in_mid_row(counters[0]),
    )  # fmt: skip
    is_right = (differing, missing, groups, reads, others) == (0,) * 5 and done == 1 and calls <= 2
    is_right &= all(c["skipped"] == reference[1]["skipped"] for c in counters)
    return "| " + " | ".join(map(str, cells)) + " |", is_right


def engine_rows(steps: int) -> Iterator[tuple[str, bool]]:
    options = {"scenario": "faults", "num_steps": steps}
    reference = train(0, BLOCKS, "single", **options)
    for world, engines in ENGINES.items():
        cases = [{"args": (BLOCKS, engine), "options": options} for engine in engines]
        for engine, ranks in zip(engines, run(cases, world), strict=True):
            yield engine_row(engine, world, ranks, reference, steps)


def random_case(chooser: random.Random, world: int) -> dict[str, Any]:
    """Up to nine matrices of up to 40x40 and buckets of any size, in one of the engines."""
    blocks = tuple(
        tuple((chooser.randint(1, 40), chooser.randint(1, 40)) for _ in range(3))
        for _ in range(chooser.randint(1, 3))
    )
    options = {"num_steps": 2, "bucket_bytes": chooser.choice([1, 2000, 1 << 20])}
    return {"args": (blocks, chooser.choice(ENGINES[world])), "options": options}


def wrong_random_cases(num_cases: int, world: int) -> list[dict[str, Any]]:
    """The cases in which some element differs."""
    chooser = random.Random(1000 + world)
    cases = [random_case(chooser, world) for _ in range(num_cases)]
    return [
        case
        for case, ranks in zip(cases, run(cases, world), strict=True)
        if mismatches([r[0] for r in ranks], train(0, case["args"][0], "single", 2)[0]) != (0, 0)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--random", type=int, default=40, help="cases for each number of ranks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{describe_machine()}\n\n{given.steps} steps of {NUM_MATRICES} matrices\n")
    print("| " + " | ".join(HEAD) + " |\n|" + " --- |" * len(HEAD))
    failures = []
    for line, is_right in engine_rows(given.steps):
        print(line, flush=True)
        failures += [] if is_right else [line]
    print()
    for world in ENGINES:
        wrong = wrong_random_cases(given.random, world)
        print(f"{world} ranks: {given.random - len(wrong)} of {given.random} random cases are "
              "bit-equal", flush=True)  # fmt: skip
        failures += map(str, wrong)
    print("\n" + ("\n".join(["not as wanted:", *failures]) if failures else "all as wanted"))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
