"""AdamW and MuonAdamW on a small transformer that learns to write Python's documentation.

    python examples/muon_language_model.py [--quick] [--plot muon_language_model.svg]

The text is ``pydoc_data.topics``, which every Python carries; the tokens are its bytes. Each
optimizer gets the same rates to choose from, the best one by held-out loss on a seed of its own,
and is then compared on other seeds: same model, data, number of steps, schedule and weight decay.
"""

import argparse
import os
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from opendm.eval.charts import Series, line_chart
from opendm.optimizer import MuonAdamW, is_hidden_matrix

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 128, 128, 4, 2, 16
NUM_STEPS, NUM_EVALUATIONS, EVALUATION_WINDOWS = 300, 12, 96
RATES = (4e-3, 8e-3, 16e-3, 32e-3, 64e-3)
TUNING_SEED, SEEDS = 0, (1, 2, 3)
OPTIONS = {"betas": (0.9, 0.95), "weight_decay": 0.1}
OPTIMIZERS = {
    "AdamW": lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr, **OPTIONS),
    "MuonAdamW": lambda model, lr: MuonAdamW(model, lr=lr, predicate=is_hidden_matrix, **OPTIONS),
}


class Block(nn.Module):
    """Causal attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.mix = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        read = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(read.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Bytes to the logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(256, WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        return self.lm_head(self.norm(self.blocks(x)))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte."""
        return cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@dataclass(frozen=True, slots=True)
class Run:
    """One training run."""

    name: str
    lr: float
    seed: int
    losses: dict[int, float]
    """Held-out loss by step."""
    seconds_per_step: float


def load_text() -> tuple[Tensor, Tensor]:
    """Bytes to learn and bytes held out: of the distinct paragraphs every tenth block of 20."""
    paragraphs = list(
        dict.fromkeys(p for _, text in sorted(topics.items()) for p in text.split("\n\n"))
    )
    parts: tuple[list[str], list[str]] = [], []
    for index, paragraph in enumerate(paragraphs):
        parts[index // 20 % 10 == 9].append(paragraph)
    learnt, held_out = ("\n\n".join(part).encode() for part in parts)
    return torch.tensor(list(learnt)), torch.tensor(list(held_out))


def pair_loss() -> float:
    """Held-out loss of counted pairs of bytes: what a model knows that looks one byte back."""
    learnt, held_out = load_text()
    counts = torch.full((256, 256), 0.01)
    counts.index_put_((learnt[:-1], learnt[1:]), torch.ones(len(learnt) - 1), accumulate=True)
    probabilities = counts / counts.sum(1, keepdim=True)
    return -float(probabilities[held_out[:-1], held_out[1:]].log().mean())


def train(name: str, lr: float, seed: int, num_steps: int) -> Run:
    """Train from ``seed``; the rate warms up over a tenth of the steps, then falls to zero."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    learnt, held_out = load_text()
    validation = held_out.unfold(0, CONTEXT + 1, len(held_out) // (EVALUATION_WINDOWS + 1))
    model = LanguageModel()
    optimizer = OPTIMIZERS[name](model, lr)
    warmup = max(1, num_steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, (num_steps - i) / (num_steps - warmup))
    )
    losses, seconds = {}, 0.0
    for step in range(1, num_steps + 1):
        start = time.perf_counter()
        first = torch.randint(len(learnt) - CONTEXT, (BATCH, 1))
        model.loss(learnt[first + torch.arange(CONTEXT + 1)]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - start
        if step % max(1, num_steps // NUM_EVALUATIONS) == 0:
            with torch.no_grad():
                losses[step] = float(model.loss(validation))
    return Run(name, lr, seed, losses, seconds / num_steps)


def run_all(pool: Executor, jobs: list[tuple[str, float, int]], num_steps: int) -> list[Run]:
    """Runs of ``(optimizer, rate, seed)``, each printed when it is done."""
    runs = []
    for future in [pool.submit(train, *job, num_steps) for job in jobs]:
        run = future.result()
        runs.append(run)
        print(
            f"{run.name:<10} {run.lr:<7g} {run.seed:<5} {run.losses[num_steps]:<10.3f} "
            f"{1000 * run.seconds_per_step:.0f}",
            flush=True,
        )
    return runs


def report(runs: list[Run], num_steps: int) -> str:
    """Print both mean curves; returns the chart."""
    curves = []
    for name in OPTIMIZERS:
        losses = [run.losses for run in runs if run.name == name]
        curves.append(
            Series(
                name, list(losses[0]), [fmean(one[step] for one in losses) for step in losses[0]]
            )
        )
    print("\nstep      " + "  ".join(f"{curve.name:<9}" for curve in curves))
    for step, *values in zip(curves[0].x, *(curve.y for curve in curves), strict=True):
        print(f"{step:<9} " + "  ".join(f"{value:<9.3f}" for value in values))
    print(f"counted pairs of bytes: {pair_loss():.3f}")
    title = f"Held-out loss, mean of {len(runs) // len(OPTIMIZERS)} seeds, {num_steps} steps"
    svg = line_chart(curves, title=title, x_label="step", y_label="nats per byte")
    visible = 'xmlns="http://www.w3.org/2000/svg" color="#222"'  # a file of its own needs both
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return svg.replace("<svg", f"<svg {visible}", 1).replace(">", f">{background}", 1)


def main() -> None:
    """Tune, compare, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--plot", type=Path, help="write the mean curves as SVG")
    arguments = parser.parse_args()
    num_steps, rates, seeds = (
        (10, RATES[:1], SEEDS[:1]) if arguments.quick else (NUM_STEPS, RATES, SEEDS)
    )
    print("optimizer  rate    seed  held-out   ms/step")
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        jobs = [(name, lr, TUNING_SEED) for name in OPTIMIZERS for lr in rates]
        tuning = run_all(pool, jobs, num_steps)
        best = {
            name: min((r for r in tuning if r.name == name), key=lambda r: r.losses[num_steps]).lr
            for name in OPTIMIZERS
        }
        print("chosen:", ", ".join(f"{name} {lr:g}" for name, lr in best.items()), flush=True)
        jobs = [(name, lr, seed) for name, lr in best.items() for seed in seeds]
        chart = report(run_all(pool, jobs, num_steps), num_steps)
    if arguments.plot:
        arguments.plot.write_text(chart + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
