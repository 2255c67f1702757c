"""What several draws of noise and time per observation cost, and where a step's time goes.

    OMP_NUM_THREADS=1 python benchmarks/training/noise_samples.py [--rounds N] [--rows N]

Times are processor seconds of whole AdamW steps of the simulator's model (``tiny-checkpoint --size
sim``, chunk 16, two pictures, 64 tokens), best of the rounds, draws interleaved. Operations are
counted by torch over one forward pass; for the released shape (448-pixel pictures, chunk 50, two
pictures, 564 tokens) they are counted on tensors without numbers, and its time is that of forward
and backward passes of a few of its layers, in the same proportion, for one observation.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import describe_machine

from opendm.model.dm05.checkpoint_files import skeleton
from opendm.model.dm05.configuration import DM05Config
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.tiny import RESERVED, SIZES, random_model, tiny_config

DRAWS: Final = (1, 2, 4, 8)
VOCAB, NUM_VIEWS, SIM_LENGTH, SIM_CHUNK = 768, 2, 64, 16
RELEASED_LENGTH, RELEASED_CHUNK = 564, 50
RELEASED_LAYERS, SOME_LAYERS = (34, 27), (4, 3)
"""Of text (and of the Action Expert) and of vision."""
IMAGE_TOKEN: Final = RESERVED.index("<image_soft_token>")


def make_batch(rows: int, length: int, chunk: int, config: DM05Config) -> dict[str, torch.Tensor]:
    """Prompts with two pictures each, and actions."""
    vision, tokens = config.vlm_config.vision_config, config.vlm_config.mm_tokens_per_image
    ids = torch.randint(len(RESERVED), VOCAB, (rows, length))
    for view in range(NUM_VIEWS):
        start = 8 + view * (tokens + 8)
        ids[:, start : start + tokens] = config.vlm_config.image_token_id
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == config.vlm_config.image_token_id).long(),
        "pixel_values": torch.randn(rows * NUM_VIEWS, 3, vision.image_size, vision.image_size),
        "action": torch.randn(rows, chunk, 32),
        "sample_seed": torch.arange(rows),
    }


def released_config(layers: tuple[int, int] = RELEASED_LAYERS) -> DM05Config:
    """The released sizes: Gemma 3 4B, SigLIP So400m at 448 pixels, an expert of width 1024."""
    text: dict[str, Any] = {
        "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": layers[0],
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
        "num_hidden_layers": layers[1], "num_attention_heads": 16, "image_size": 448,
        "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    expert = {**text, "hidden_size": 1024, "intermediate_size": 4096}
    return DM05Config(
        vlm_config={
            "text_config": text, "vision_config": vision, "mm_tokens_per_image": 256,
            "image_token_index": IMAGE_TOKEN,
        },
        action_config=expert,
        chunk_size=RELEASED_CHUNK,
    )  # fmt: skip


def best_times(steps: dict[Any, Callable[[], None]], rounds: int) -> dict[Any, float]:
    """Least processor time of each of several steps in seconds, interleaved."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            best[name] = min(best[name], time.process_time() - start)
    return best


def training_steps(
    model: DM05ForConditionalGeneration, batch: dict[str, torch.Tensor], *, updates: bool
) -> dict[int, Callable[[], None]]:
    """Forward and backward pass for each number of draws, and AdamW's update."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def make(draws: int) -> Callable[[], None]:
        def step() -> None:
            model.num_noise_samples = draws
            model(**batch).loss.backward()
            if updates:
                optimizer.step()
            optimizer.zero_grad()

        return step

    return {draws: make(draws) for draws in DRAWS}


def plain_training(model: DM05ForConditionalGeneration) -> DM05ForConditionalGeneration:
    """In training mode, in float32, with torch's attention."""
    model.train().set_attention_implementation(
        llm_attn_implementation="sdpa",
        vision_attn_implementation="sdpa",
        action_attn_implementation="sdpa",
        bf16=False,
    )
    return model


def report_times(title: str, times: dict[Any, float]) -> None:
    """Print seconds a step, and what each number of draws costs."""
    print(f"\n{title}, seconds a step")
    for draws in DRAWS:
        print(f"  {draws} draws{times[draws]:>10.3f}  {times[draws] / times[1]:.3f} of one draw")
    each = (times[8] - times[1]) / 7
    print(f"  each further draw{each:>8.3f}  {each / times[1]:.1%}")


def count_operations(
    model: DM05ForConditionalGeneration, batch: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Floating point operations of one forward pass, by part."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    network = model.model
    weight = network.action_in_proj.weight
    counts = {}
    with torch.no_grad():
        with FlopCounterMode(display=False) as vision:
            network.vlm.model.vision_tower(pixel_values=batch["pixel_values"])
        with FlopCounterMode(display=False) as text:
            prefix = network.prefix(**inputs, pixel_values=None)
        with FlopCounterMode(display=False) as suffix:
            x_t = batch["action"].to(weight.dtype)
            network.velocity(x_t, torch.full((len(x_t),), 0.5, device=weight.device), prefix)
    for name, counter in (("vision", vision), ("text", text), ("suffix, one draw", suffix)):
        counts[name] = float(counter.get_total_flops())
    return counts


def report_operations(title: str, counts: dict[str, float]) -> None:
    """Print the counts, and what four draws cost if time followed them."""
    suffix = counts["suffix, one draw"]
    total = sum(counts.values())
    print(f"\n{title}: forward operations")
    for name, count in counts.items():
        print(f"  {name:<18}{count / 1e9:>10.2f} GFLOP{count / total:>8.1%}")
    print(f"  suffix / prefix   {suffix / (total - suffix):>10.3f}")
    print(f"  4 draws / 1 draw  {(total + 3 * suffix) / total:>10.3f}")


def parts(
    model: DM05ForConditionalGeneration, batch: dict[str, torch.Tensor]
) -> dict[str, Callable[[], None]]:
    """Forward and backward passes of the parts that draws share."""
    network = model.model
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}

    def vision() -> None:
        outputs = network.vlm.model.vision_tower(pixel_values=batch["pixel_values"])
        outputs.last_hidden_state.sum().backward()
        model.zero_grad()

    def text() -> None:
        prefix = network.prefix(**inputs, pixel_values=None)
        total = sum(part.sum() for part in (*prefix.keys, *prefix.values))
        total.backward()
        model.zero_grad()

    return {"vision tower": vision, "text layers": text}


def main() -> None:
    """Print times of the simulator's model and operations of both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=32)
    options = parser.parse_args()
    print(describe_machine())
    torch.manual_seed(0)
    size = SIZES["sim"]
    config = tiny_config(VOCAB, chunk_size=SIM_CHUNK, images=size.images, mlp_ratio=size.mlp_ratio)
    model = plain_training(random_model(config))
    batch = make_batch(options.rows, SIM_LENGTH, SIM_CHUNK, config)
    steps = training_steps(model, batch, updates=True)
    times = best_times({**steps, **parts(model, batch)}, options.rounds)
    report_times(f"simulator's model, {options.rows} observations", times)
    for name in ("vision tower", "text layers"):
        print(
            f"  {name} alone{times[name]:>10.3f}  {times[name] / times[1]:.1%} of one draw's step"
        )
    report_operations("simulator's model", count_operations(model, batch))
    released = skeleton(DM05ForConditionalGeneration, released_config(), None)
    with FakeTensorMode(allow_non_fake_inputs=True):  # shapes without numbers
        released.to_empty(device="cpu")
        fake = make_batch(1, RELEASED_LENGTH, RELEASED_CHUNK, released.config)
        report_operations("released shape", count_operations(released, fake))
    some = plain_training(random_model(released_config(SOME_LAYERS)))
    batch = make_batch(1, RELEASED_LENGTH, RELEASED_CHUNK, some.config)
    times = best_times(training_steps(some, batch, updates=False), 2)
    report_times(f"released widths, {SOME_LAYERS} layers, without the update", times)


if __name__ == "__main__":
    main()
