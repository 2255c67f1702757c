"""How soon a policy solves nine of ten starts, by optimizer, draws of noise and averaged weights.

    make bench-sim && python benchmarks/training/sim_choices.py [--output FOLDER]

The runs of `make bench-sim` are the first rows; every other run is the same training with other
flags. The rates of both optimizers are tuned alike: short runs of the first seed at the same rates
around the preset's, and the rate of the least loss over the last sixth is used with all seeds.
Averages are compared within the same runs: checkpoints have the trained weights beside them.
Checkpoints are evaluated on unseen starts that are not those of `make bench-sim`, from the last one
back to the first that misses the goal. Minutes are the steps' own time, as `metrics.jsonl` has it.
What is there already is not run again.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import describe_machine

from opendm.model.dm05.checkpoint_files import released_name

REPOSITORY: Final = Path(__file__).parents[2]
OPENDM: Final = str(Path(sys.executable).parent / "opendm")
TASK: Final = "button-press-topdown-v3"
SEEDS: Final = (1, 2, 3)
RATES: Final = ("5e-4", "1e-3", "2e-3")
TUNING_STEPS: Final = 600
NUM_STEPS: Final = 2400
BENCH: Final = REPOSITORY / "user_checkpoints" / "bench_sim"
"""Runs of the preset's own choice: AdamW at 1e-3, 4 draws, averaged."""
FIRST_START: Final = 80_000
NUM_STARTS: Final = 50
NUM_CHECKPOINTS: Final = 8
GOAL: Final = 0.9


@dataclass(frozen=True, slots=True)
class Choice:
    """Flags of a run, and what the table calls it."""

    name: str
    flags: tuple[str, ...]

    def folder(self, output: Path, seed: int) -> Path:
        """Where its run with a seed goes."""
        if self == PRESET and output.name != "tuning":
            return BENCH / f"seed{seed}"
        return output / f"{self.name.replace(' ', '_').replace(',', '')}_{seed}"


@dataclass(frozen=True, slots=True)
class Curve:
    """Success of one run by optimizer steps, from the first good checkpoint's predecessor on."""

    success: dict[int, float]
    minutes_per_step: float

    @property
    def first_good(self) -> int | None:
        """Steps of the first checkpoint from which on every one reaches the goal."""
        good = [step for step, share in self.success.items() if share >= GOAL]
        return min(good) if self.success[max(self.success)] >= GOAL else None


def optimizer(name: str, rate: str) -> Choice:
    """One optimizer at one rate."""
    flags = ("--optimizer-config.optim", name, "--optimizer-config.base-lr", rate)
    return Choice(f"{name} {rate}", flags)


PRESET: Final = optimizer("adamw", "1e-3")


def train(choice: Choice, seed: int, output: Path, num_steps: int = NUM_STEPS) -> list[Path]:
    """Checkpoints of a run, the last one first."""
    folder = choice.folder(output, seed)
    if not (folder / f"checkpoint-{num_steps}" / "manifest.json").is_file():
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
    return sorted(folder.glob("checkpoint-*"), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Optimizer steps behind a checkpoint."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def trained_weights(checkpoint: Path) -> Path:
    """The same checkpoint with the weights that were trained in place of their average."""
    copy = checkpoint.parent / "no_average" / checkpoint.name
    if not copy.is_dir():
        shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns("state", "manifest.json"))
        weights = load_file(copy / "model.safetensors")
        for part in sorted((checkpoint / "state").glob("state-*.safetensors")):
            weights |= whole_weights(part, weights)
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def whole_weights(part: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What one rank saved: under DDP each has some of the parameters, whole."""
    saved = {
        released_name(key.removesuffix("/weight")): tensor
        for key, tensor in load_file(part).items()
        if key.endswith("/weight")
    }
    return {name: tensor.view_as(like[name]) for name, tensor in saved.items()}


def call(words: Sequence[str]) -> None:
    """Run a command in the repository; its output goes to the error stream."""
    subprocess.run(words, cwd=REPOSITORY, check=True, stdout=sys.stderr)


def success(checkpoint: Path) -> float:
    """Share of the starts that a checkpoint solves."""
    page = checkpoint.with_name(f"success-{step_of(checkpoint)}")
    result = page / "metaworld.json"
    if not result.is_file():
        call([
            OPENDM, "eval", "metaworld", "--no-controls", "--task", TASK,
            "--episodes", str(NUM_STARTS), "--seed", str(FIRST_START),
            "--checkpoint", str(checkpoint), "--output", str(page),
        ])  # fmt: skip
    rates = json.loads(result.read_text(encoding="utf-8"))["tasks"][TASK]["by_step"]
    (rate,) = rates.values()
    return float(rate["successes"] / rate["episodes"])


def tuned(name: str, output: Path) -> Choice:
    """An optimizer at the rate that is best in a short run."""
    losses = {}
    for choice in (optimizer(name, rate) for rate in RATES):
        train(choice, SEEDS[0], output / "tuning", TUNING_STEPS)
        records = metrics(choice.folder(output / "tuning", SEEDS[0]))
        last = [record["loss"] for record in records[-TUNING_STEPS // 6 :]]
        losses[choice] = sum(last) / len(last)
        print(f"tuning: {choice.name}, {TUNING_STEPS} steps, loss {losses[choice]:.4f}", flush=True)
    return min(losses, key=losses.__getitem__)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run wrote of every step."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def measure(label: str, seed: int, folder: Path, checkpoints: Sequence[Path]) -> Curve:
    """Evaluate back to the first checkpoint that misses the goal; print a line of the table."""
    times = sorted(record["step_s"] for record in metrics(folder))
    shares: dict[int, float] = {}
    for checkpoint in checkpoints:
        shares[step_of(checkpoint)] = share = success(checkpoint)
        if share < GOAL:
            break
    curve = Curve(dict(sorted(shares.items())), times[len(times) // 2] / 60)
    first = curve.first_good
    reached = f"{first} | {first * curve.minutes_per_step:.1f}" if first else "not reached |"
    seconds = curve.minutes_per_step * 60
    by_step = ", ".join(f"{step}: {share:.0%}" for step, share in curve.success.items())
    print(f"| {label} | {seed} | {reached} | {seconds:.3f} | {by_step} |", flush=True)
    return curve


def main() -> None:
    """Print the table, a line as soon as it is there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("user_checkpoints/sim_choices"))
    output = parser.parse_args().output.resolve()
    print(describe_machine())
    best = {name: tuned(name, output) for name in ("adamw", "muon_adamw")}
    print(
        f"| Choice | Seed | Steps to {GOAL:.0%} | Minutes to it | Seconds a step | By checkpoint |"
    )
    print("|---|---|---|---|---|---|", flush=True)

    def run(choice: Choice) -> None:
        for seed in SEEDS:
            checkpoints = train(choice, seed, output)
            measure(choice.name, seed, choice.folder(output, seed), checkpoints)

    run(best["adamw"])
    for seed in SEEDS:
        copies = [trained_weights(path) for path in train(best["adamw"], seed, output)]
        label = f"{best['adamw'].name}, no average"
        measure(label, seed, best["adamw"].folder(output, seed), copies)
    run(best["muon_adamw"])
    flags = (*best["adamw"].flags, "--model-config.num-noise-samples", "1")
    run(Choice(f"{best['adamw'].name}, 1 draw", flags))


if __name__ == "__main__":
    main()
