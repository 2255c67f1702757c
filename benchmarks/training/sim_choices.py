"""How soon a policy solves nine of ten starts, by optimizer, draws of noise and averaged weights.

    make bench-sim && python benchmarks/training/sim_choices.py [--output FOLDER]

Runs of `make bench-sim` are used where a choice is the preset's; every other run is the same
training with other flags. The rates of both optimizers are tuned alike: short runs of the first
seed at the same rates around the preset's, and at twice or half of them while the best is at the
edge; the rate of the least loss over the last sixth is used with all seeds, and with 1 draw.
Averages are compared within the same runs: checkpoints have the trained weights beside them.
Checkpoints are evaluated on unseen starts that are not those of `make bench-sim`, from the last one
back to two in a row that miss the goal; steps to the goal are those of the earliest that reaches
it. Minutes are these steps at the least median time a step that a choice had among its seeds, which
other work on the machine disturbs least. What is there already is not run again: delete the folder
after a change.
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
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
RATES: Final = (5e-4, 1e-3, 2e-3)
TUNING_STEPS: Final = 600
NUM_STEPS: Final = 1800
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


def optimizer(name: str, rate: float) -> Choice:
    """One optimizer at one rate."""
    flags = ("--optimizer-config.optim", name, "--optimizer-config.base-lr", f"{rate:g}")
    return Choice(f"{name} {rate:g}", flags)


PRESET: Final = optimizer("adamw", 1e-3)


def train(choice: Choice, seed: int, output: Path, num_steps: int = NUM_STEPS) -> list[Path]:
    """Checkpoints of a run, the last one first."""
    folder = choice.folder(output, seed)
    if not (folder / f"checkpoint-{num_steps}" / "manifest.json").is_file():
        if folder.parent == BENCH:
            sys.exit(f"{folder} has no checkpoint-{num_steps}; run `make bench-sim` first")
        shutil.rmtree(folder, ignore_errors=True)
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
            "--trainer-config.seed", str(seed), *choice.flags,
        ])  # fmt: skip
    return sorted(folder.glob("checkpoint-*"), key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Optimizer steps behind a checkpoint."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def trained_weights(checkpoint: Path, output: Path) -> Path:
    """The same checkpoint with the weights that were trained in place of their average."""
    copy = output / checkpoint.parent.name / checkpoint.name
    if not copy.is_dir():
        partial = copy.with_name(f"partial-{copy.name}")
        shutil.rmtree(partial, ignore_errors=True)
        unneeded = shutil.ignore_patterns("state", "manifest.json")
        shutil.copytree(checkpoint, partial, ignore=unneeded)
        averages = load_file(partial / "model.safetensors")
        weights = dict(averages)
        for part in sorted((checkpoint / "state").glob("state-*.safetensors")):
            weights |= whole_weights(part, averages)
        if all(torch.equal(weights[name], tensor) for name, tensor in averages.items()):
            sys.exit(f"{checkpoint} has no weights that differ from its average")
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        partial.rename(copy)
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


def success(checkpoint: Path, page: Path) -> float:
    """Share of the starts that a checkpoint solves."""
    result = page / "metaworld.json"
    if not result.is_file():
        call([
            OPENDM, "eval", "metaworld", "--no-controls", "--task", TASK,
            "--episodes", str(NUM_STARTS), "--seed", str(FIRST_START),
            "--checkpoint", str(checkpoint), "--output", str(page),
        ])  # fmt: skip
    rate = json.loads(result.read_text(encoding="utf-8"))["tasks"][TASK]["judged"]
    return float(rate["successes"] / rate["episodes"])


def tuned(name: str, output: Path) -> Choice:
    """An optimizer at the rate that is best in a short run."""
    losses: dict[float, float] = {}
    rates = list(RATES)
    while rates:
        rate = rates.pop(0)
        choice = optimizer(name, rate)
        losses[rate] = last_loss(choice, output / "tuning")
        print(f"tuning: {choice.name}, {TUNING_STEPS} steps, loss {losses[rate]:.4f}", flush=True)
        best = min(losses, key=losses.__getitem__)
        if not rates and math.isinf(losses[best]):
            sys.exit(f"no run of {name} reached {TUNING_STEPS} steps; its log says why")
        if not rates and best in (min(losses), max(losses)):
            rates = [best * 2 if best == max(losses) else best / 2]
    return optimizer(name, best)


def last_loss(choice: Choice, output: Path) -> float:
    """Mean loss over the last sixth of a short run; infinite where it diverged."""
    try:
        train(choice, SEEDS[0], output, TUNING_STEPS)
    except subprocess.CalledProcessError:
        return math.inf
    last = [r["loss"] for r in metrics(choice.folder(output, SEEDS[0]))[-TUNING_STEPS // 6 :]]
    return math.inf if None in last else sum(last) / len(last)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run wrote of every step."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def measure(label: str, runs: dict[int, Path], output: Path, times: Sequence[Path]) -> None:
    """Evaluate runs by seed, and print a line of the table for each.

    Args:
        label: of the choice.
        runs: folders of checkpoints by seed.
        output: folder of the pages.
        times: folders of the runs whose steps were timed.
    """
    medians = [statistics.median(r["step_s"] for r in metrics(folder)) for folder in times]
    for seed, folder in runs.items():
        shares: dict[int, float] = {}
        for checkpoint in sorted(folder.glob("checkpoint-*"), key=step_of, reverse=True):
            page = output / "pages" / label.replace(" ", "_") / str(seed) / checkpoint.name
            shares[step_of(checkpoint)] = success(checkpoint, page)
            if len(shares) > 1 and max(list(shares.values())[-2:]) < GOAL:
                break
        good = [step for step, share in shares.items() if share >= GOAL]
        reached = "not reached | "
        if good:
            bound = "at most " if min(good) == min(shares) else ""
            reached = f"{bound}{min(good)} | {bound}{min(good) * min(medians) / 60:.1f}"
        by_step = ", ".join(f"{step}: {share:.0%}" for step, share in sorted(shares.items()))
        print(f"| {label} | {seed} | {reached} | {min(medians):.3f} | {by_step} |", flush=True)


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

    def run(choice: Choice) -> list[list[Path]]:
        checkpoints = [train(choice, seed, output) for seed in SEEDS]
        folders = {seed: choice.folder(output, seed) for seed in SEEDS}
        measure(choice.name, folders, output, list(folders.values()))
        return checkpoints

    adamw = best["adamw"]
    copies = output / "no_average"
    for path in chain.from_iterable(run(adamw)):
        trained_weights(path, copies)
    folders = [adamw.folder(output, seed) for seed in SEEDS]
    raw = {seed: copies / folder.name for seed, folder in zip(SEEDS, folders, strict=True)}
    measure(f"{adamw.name}, no average", raw, output, folders)
    run(best["muon_adamw"])
    run(Choice(f"{adamw.name}, 1 draw", (*adamw.flags, "--model-config.num-noise-samples", "1")))


if __name__ == "__main__":
    main()
