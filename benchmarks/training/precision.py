"""What each precision policy buys: error of the velocity, and weights that a small rate moves.

    OMP_NUM_THREADS=1 python benchmarks/training/precision.py [--hidden N] [--layers N] [--seeds N]

Random weights of the tiny model's kind, widened. The velocity is held against the network in numpy
and float64 with the float32 weights; an error is a ratio of root mean squares, the median of the
seeds. A weight counts as unmoved when one step of AdamW with a gradient leaves its bits alone.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/model"))

from machine import describe_machine
from precision_measures import PROMPT, unmoved_by_storage, velocity_errors

from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.tiny import RESERVED, TOKENS_PER_IMAGE, random_model, tiny_config

RATES: Final = (2.5e-6, 2.5e-5, 1e-4, 1e-3)
VOCAB, CHUNK, ROWS, LENGTH = 768, 10, 2, 48
RELEASED_STD: Final = 0.02
"""The released model's kind of matrix: Gemma's initialiser range."""


def build(hidden: int, layers: int, seed: int) -> DM05ForConditionalGeneration:
    """A float32 model whose every parameter matters: fresh ones hold zeros and ones."""
    config = tiny_config(VOCAB, chunk_size=CHUNK, num_layers=layers, hidden_size=hidden)
    model = random_model(config, seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    """Prompts with one image each, actions, noise and times."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(len(RESERVED), VOCAB, (ROWS, LENGTH), generator=generator)
    image = RESERVED.index("<image_soft_token>")
    ids[:, 4 : 4 + TOKENS_PER_IMAGE] = image
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == image).long(),
        "pixel_values": torch.randn(ROWS, 3, 112, 112, generator=generator),
        "action": torch.randn(ROWS, CHUNK, 32, generator=generator),
        "noise": torch.randn(ROWS, CHUNK, 32, generator=generator),
        "time": torch.rand(ROWS, generator=generator),
    }


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """A markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def velocity_table(hidden: int, layers: int, seeds: int) -> str:
    """Median error of each case over seeds."""
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        batch = make_batch(seed)
        prompt = {name: batch[name] for name in PROMPT}
        errors = velocity_errors(build(hidden, layers, seed), prompt, batch["noise"], batch["time"])
        for name, error in errors.items():
            found.setdefault(name, []).append(error)
    rows = [(name, f"{statistics.median(errors):.1e}") for name, errors in found.items()]
    return table(("computed", "relative error of the velocity"), rows)


def unmoved_table(hidden: int, layers: int) -> str:
    """Fractions by storage and rate, for a model whose matrices are N(0, 0.02)."""
    model = build(hidden, layers, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=RELEASED_STD)
    by_rate = [unmoved_by_storage(model, make_batch(0), rate) for rate in RATES]
    rows = [(name, *(f"{found[name]:.1%}" for found in by_rate)) for name in by_rate[0]]
    return table(("trained weights", *(f"lr {rate:g}" for rate in RATES)), rows)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(describe_machine())
    print(f"model: hidden size {options.hidden}, {options.layers} layers, seeds {options.seeds}\n")
    print(velocity_table(options.hidden, options.layers, options.seeds))
    print("\nweights that one step of AdamW leaves unchanged\n")
    print(unmoved_table(options.hidden, options.layers))


if __name__ == "__main__":
    main()
