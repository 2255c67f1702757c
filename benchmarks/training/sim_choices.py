"""How soon a policy solves nine of ten starts, by optimizer, draws of noise and averaged weights.

    python benchmarks/training/sim_choices.py [--steps N] [--output FOLDER]

Needs the simulator, and the demonstrations that `make demo-sim` records. Every run is the
demonstration's training on two processes with other flags. The rates of both optimizers are tuned
alike: the same factors around the same rate with the first seed, the best of them with all seeds.
Checkpoints are evaluated on unseen starts that are not those of `make demo-sim`. Minutes are the
steps' own time, as `metrics.jsonl` has it. What is there already is not run again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import describe_machine

REPOSITORY: Final = Path(__file__).parents[2]
OPENDM: Final = str(Path(sys.executable).parent / "opendm")
TASK: Final = "button-press-topdown-v3"
SEEDS: Final = (1, 2, 3)
RATES: Final = ("5e-4", "1e-3", "2e-3")
FIRST_START: Final = 80_000
NUM_STARTS: Final = 50
NUM_CHECKPOINTS: Final = 8
GOAL: Final = 0.9


@dataclass(frozen=True, slots=True)
class Choice:
    """Flags of a run, and what the table calls it."""

    name: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Success of one run by optimizer steps and minutes of training."""

    steps: list[int]
    minutes: list[float]
    success: list[float]

    def first_good(self) -> int | None:
        """Place of the first checkpoint from which on every one reaches the goal."""
        good = len(self.success)
        while good and self.success[good - 1] >= GOAL:
            good -= 1
        return None if good == len(self.success) else good


def optimizer(name: str, rate: str) -> Choice:
    """One optimizer at one rate."""
    flags = ("--optimizer-config.optim", name, "--optimizer-config.base-lr", rate)
    return Choice(f"{name} {rate}", flags)


def run(choice: Choice, seed: int, num_steps: int, output: Path) -> Curve:
    """Train and evaluate, or read what an earlier call left."""
    folder = output / f"{choice.name.replace(' ', '_')}_{seed}"
    result = folder / "metaworld.json"
    if not result.is_file():
        start = output / f"start_{seed}"
        made = ["tiny-checkpoint", "--size", "sim", "--dataset-name", "metaworld"]
        call([OPENDM, *made, "--seed", str(seed), "--output", str(start)])
        call([
            "script/dm05_launcher.sh", "--nproc_per_node", "2",
            "--exp", "playground/dm05_metaworld.py",
            "--model-config.model-name-or-path", str(start),
            "--trainer-config.output-dir", str(folder),
            "--trainer-config.num-train-steps", str(num_steps),
            "--trainer-config.save-steps", str(num_steps // NUM_CHECKPOINTS),
            "--trainer-config.per-device-train-batch-size", "8", "--trainer-config.no-fsdp1",
            "--trainer-config.seed", str(seed), "--trainer-config.overwrite", *choice.flags,
        ])  # fmt: skip
        checkpoints = sorted(folder.glob("checkpoint-*"), key=step_of)
        call([
            OPENDM, "eval", "metaworld", "--no-controls", "--task", TASK,
            "--episodes", str(NUM_STARTS), "--seed", str(FIRST_START),
            "--checkpoint", *map(str, checkpoints), "--output", str(folder),
        ])  # fmt: skip
    rates = json.loads(result.read_text(encoding="utf-8"))["tasks"][TASK]["by_step"]
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    times = [json.loads(line)["step_s"] for line in lines]
    steps = sorted(map(int, rates))
    return Curve(
        steps,
        [sum(times[:step]) / 60 for step in steps],
        [rates[str(step)]["successes"] / rates[str(step)]["episodes"] for step in steps],
    )


def step_of(checkpoint: Path) -> int:
    """Optimizer steps behind a checkpoint."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def call(words: Sequence[str]) -> None:
    """Run a command in the repository; its output goes to the error stream."""
    subprocess.run(words, cwd=REPOSITORY, check=True, stdout=sys.stderr)


def row(choice: Choice, seed: int, curve: Curve) -> str:
    """A line of the table."""
    first = curve.first_good()
    reached = "not reached | " if first is None else f"{curve.steps[first]} | "
    reached += "" if first is None else f"{curve.minutes[first]:.1f}"
    shares = " ".join(f"{share:.0%}" for share in curve.success)
    return f"| {choice.name} | {seed} | {reached} | {curve.minutes[-1]:.1f} | {shares} |"


def main() -> None:
    """Print the table, a line as soon as it is there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("user_checkpoints/sim_choices"))
    options = parser.parse_args()
    output = options.output.resolve()
    print(describe_machine())
    print(
        f"| Choice | Seed | Steps to {GOAL:.0%} | Minutes to it | Minutes in all | By checkpoint |"
    )
    print("|---|---|---|---|---|---|", flush=True)

    def measure(choice: Choice, seed: int) -> Curve:
        curve = run(choice, seed, options.steps, output)
        print(row(choice, seed, curve), flush=True)
        return curve

    best: dict[str, Choice] = {}
    for name in ("adamw", "muon_adamw"):
        tuned = {rate: optimizer(name, rate) for rate in RATES}
        mean = {
            rate: sum(curve.success) / len(curve.success)
            for rate, choice in tuned.items()
            for curve in [measure(choice, SEEDS[0])]
        }
        best[name] = tuned[max(mean, key=mean.__getitem__)]
        for seed in SEEDS[1:]:
            measure(best[name], seed)
    adamw = best["adamw"]
    for label, flags in (
        ("1 draw", ("--model-config.num-noise-samples", "1")),
        ("no average", ("--trainer-config.ema-decay", "0")),
    ):
        for seed in SEEDS:
            measure(Choice(f"{adamw.name}, {label}", (*adamw.flags, *flags)), seed)


if __name__ == "__main__":
    main()
