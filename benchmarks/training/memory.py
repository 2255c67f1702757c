"""Memory of a rank at start-up and in a training step, computed for the released size.

    OMP_NUM_THREADS=1 python benchmarks/training/memory.py [--measure] [--scale 16] [--ranks 2 4 8]

Counted are weights, gradients, AdamW's states and what an engine needs to move them; activations
are not (they depend on the batch and are the same under every preset). The token embedding is
frozen, as by default. ``--measure`` holds the formula against the allocations of the last rank in a
model of the same depth whose widths and vocabulary are divided by ``--scale``: 24 tokens,
activation checkpointing, so that activations are next to nothing. That rank reads no weights. Ends
with 1 if a figure is off by more than 10 %.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from opendm.model.dm05.checkpoint_files import skeleton
from opendm.model.dm05.configuration import DM05Config
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.trainer.engine import Engine, autocast

sys.path.insert(0, str(Path(__file__).parents[1]))

from machine import describe_machine

DDP_BUCKET: Final = 25 << 20
"""Bytes of gradients that DDP reduces at once, by default."""
GIB: Final = 1 << 30
MIB: Final = 1 << 20
TOLERANCE: Final = 0.1
NUM_TOKENS: Final = 24
PRESETS: Final = ("published", "per_layer")
STRATEGIES: Final = ("shard_grad_op", "full_shard")
ENGINES: Final = ("fsdp1", "fsdp2")
HEAD: Final = (
    "ranks", "engine and preset", "gathered in", "start-up MiB", "/ formula", "step MiB",
    "/ formula", "seconds",
)  # fmt: skip
MASTER: Final = 4
"""Bytes of a stored weight, a reduced gradient, and each of AdamW's two moments."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that an FSDP unit holds outside units in it: elements, and if trained."""

    tensors: tuple[tuple[int, bool], ...]

    @property
    def numel(self) -> int:
        return sum(numel for numel, _ in self.tensors)

    @property
    def trainable(self) -> int:
        return sum(numel for numel, is_trained in self.tensors if is_trained)


@dataclass(frozen=True, slots=True)
class Setup:
    """What decides how much memory a rank needs."""

    engine: str
    strategy: str
    preset: str
    world: int
    compute_bytes: int = 2
    """Of a gathered weight: 2 under ``bf16_mixed``, 4 under ``fp32_mixed``."""
    is_gloo: bool = False
    """Gloo copies what it reduces; NCCL does not."""

    def stored(self, numel: int, *, is_trained: bool) -> int:
        """Bytes on the device; FSDP1 wants one dtype per unit, others keep the file's."""
        return numel * (MASTER if is_trained or self.engine == "fsdp1" else self.compute_bytes)

    @property
    def shards(self) -> int:
        """In how many parts weights, reduced gradients and moments lie."""
        return self.world if self.engine.startswith("fsdp") else 1

    @property
    def title(self) -> str:
        whole = {"single": "one process", "ddp": "not sharded (DDP)"}
        return whole.get(self.engine, f"{self.engine.upper()} {self.strategy}, {self.preset}")


def config(scale: int) -> DM05Config:
    """The released sizes, widths and vocabulary divided by ``scale``."""
    text: dict[str, Any] = {
        "hidden_size": 2560 // scale,
        "intermediate_size": 10240 // scale,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256 // scale,
        "vocab_size": 262208 // scale,
        "query_pre_attn_scalar": 256 // scale,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152 // scale,
        "intermediate_size": 4304 // scale,
        "num_hidden_layers": 27,
        "num_attention_heads": 16 if 1152 // scale % 16 == 0 else 8,
        "image_size": 448 // scale,
        "patch_size": 14,
        "vision_use_head": False,
    }
    vlm = {
        "text_config": text,
        "vision_config": vision,
        "mm_tokens_per_image": 256 // scale**2,
        "image_token_index": 12,
    }
    action = {**text, "hidden_size": 1024 // scale, "intermediate_size": 4096 // scale}
    return DM05Config(vlm_config=vlm, action_config=action, chunk_size=2)


def units_in_order(model: DM05ForConditionalGeneration, preset: str) -> list[Unit]:
    """Units in the order of the forward pass, the root first."""
    modules = model.fsdp_wrap_modules(preset)
    if preset == "published":
        modules = modules[1:] + modules[:1]
    taken: set[int] = set()
    units = []
    for module in modules:
        own = list(module.parameters())
        taken |= {id(p) for p in own}
        units.append(_unit(own))
    return [_unit([p for p in model.parameters() if id(p) not in taken]), *units]


def _unit(parameters: Sequence[nn.Parameter]) -> Unit:
    return Unit(tuple((p.numel(), p.requires_grad) for p in parameters))


def startup_bytes(units: Sequence[Unit], setup: Setup) -> float:
    """Most that a device holds while units are cut one after another, the root last."""
    held, peak = 0.0, 0.0
    for unit in [*units[1:], units[0]]:
        placed = 0.0
        for numel, is_trained in unit.tensors:
            stored = setup.stored(numel, is_trained=is_trained)
            placed += stored
            came = numel * setup.compute_bytes  # kept until it is float32
            peak = max(peak, held + placed + (came if stored > came else 0))
        if setup.shards > 1:
            # FSDP1 copies a unit into one flat tensor, and has both when it cuts it
            copies = 2 if setup.engine == "fsdp1" else 1
            peak = max(peak, held + placed / setup.shards + copies * placed)
        held += placed / setup.shards
    gradients = MASTER * sum(u.trainable for u in units)  # DDP makes them at once
    return held + gradients if setup.engine == "ddp" else peak


def step_bytes(units: Sequence[Unit], setup: Setup) -> float:
    """Most that a device holds in a step, activations aside."""
    trainable = sum(u.trainable for u in units)
    stored = sum(setup.stored(n, is_trained=trained) for u in units for n, trained in u.tensors)
    kept = (stored + 2 * MASTER * trainable) / setup.shards
    if setup.shards == 1:  # a layer's casts to bfloat16 go with its recomputation
        return kept + MASTER * trainable + DDP_BUCKET * (setup.engine == "ddp" and setup.is_gloo)
    return kept + max(*_forward(units, setup), *_backward(units, setup))


def _forward(units: Sequence[Unit], setup: Setup) -> Iterator[float]:
    """Gathered weights while each unit is gathered."""
    size = setup.compute_bytes
    gathered = 0.0
    for index, unit in enumerate(units):
        # FSDP2 copies what it gathered into one tensor a parameter
        yield gathered + size * unit.numel * (2 if setup.engine == "fsdp2" else 1)
        if setup.strategy == "shard_grad_op" or index == 0:
            gathered += size * unit.numel


def _backward(units: Sequence[Unit], setup: Setup) -> Iterator[float]:
    """Gathered weights, whole gradients of a unit, and reduced gradients of those before it."""
    size, world = setup.compute_bytes, setup.world
    order = [*reversed(units[1:]), units[0]]
    reduced, before = 0.0, 0
    for index, unit in enumerate(order):
        after = order[index + 1 :]
        if setup.strategy == "full_shard":
            after = [*after[:1], units[0]] if len(after) > 1 else after  # one is gathered ahead
        others = reduced + size * sum(u.numel for u in after)
        # FSDP1 reduces one flat gradient, frozen weights and all
        whole = unit.numel if setup.engine == "fsdp1" else unit.trainable
        shard = MASTER * whole / world
        copied = MASTER * whole if setup.is_gloo else 0
        if setup.engine == "fsdp1":  # gradients by parameter, then in one piece
            yield others + size * (unit.numel + 2 * whole)
            yield others + size * whole + (MASTER * whole if size < MASTER else 0) + shard + copied
        else:  # the input of the reduction before is kept; gradients go when they are in this one
            yield others + size * (unit.numel + whole) + MASTER * before
            yield others + MASTER * whole + max(size * whole, shard + copied)
        reduced += shard
        before = whole


# Measurement


def peaks(trace: Path, names: Sequence[str]) -> dict[str, int]:
    """By name of a recorded span: most bytes at once, of allocations since the trace began."""
    events = json.loads(trace.read_text())["traceEvents"]
    spans = {
        e["name"]: (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("name") in names and e.get("cat") == "user_annotation"
    }
    changes = [(e["ts"], e["args"]) for e in events if e.get("name") == "[memory]"]
    starts, sizes, total, found = [], [], 0, dict.fromkeys(names, 0)
    for moment, change in sorted(changes, key=lambda item: item[0]):
        address, size = change["Addr"], change["Bytes"]
        # gloo's threads free without a record: what a new block overlaps is gone. A freed block
        # that the trace does not know was there before it and does not count.
        first = bisect_right(starts, address) - 1
        first += first < 0 or starts[first] + sizes[first] <= address
        last = bisect_left(starts, address + max(size, 1))
        total -= sum(sizes[first:last])
        del starts[first:last], sizes[first:last]
        if size > 0:
            starts.insert(first, address)
            sizes.insert(first, size)
            total += size
        for name, (start, stop) in spans.items():
            if start <= moment <= stop:
                found[name] = max(found[name], total)
    return found


def batch_of(model_config: DM05Config) -> dict[str, torch.Tensor]:
    vlm = model_config.vlm_config
    ids = torch.randint(13, vlm.text_config.vocab_size, (1, NUM_TOKENS))
    ids[:, 2 : 2 + vlm.mm_tokens_per_image] = vlm.image_token_id
    size = vlm.vision_config.image_size
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == vlm.image_token_id).long(),
        "pixel_values": torch.randn(1, 3, size, size),
        "action": torch.randn(1, 2, model_config.action_dim),
        "sample_seed": torch.zeros(1, dtype=torch.long),
    }


def train_two_steps(rank: int, setup: Setup, model: DM05ForConditionalGeneration) -> dict[str, int]:
    """Peaks of the last rank at start-up and in two steps; nothing on the other ranks."""
    engine = Engine(
        name=setup.engine,
        device=torch.device("cpu"),
        compute_dtype=torch.bfloat16,
        shard_in_compute_dtype=setup.compute_bytes == 2,
        strategy=setup.strategy,
    )
    batch = batch_of(model.config)

    def work() -> None:
        with record_function("startup"):
            wrapped = engine.wrap(model, model.fsdp_wrap_modules(setup.preset))
        with record_function("step"):
            trained = [p for p in wrapped.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, fused=True)
            for _ in range(2):
                with autocast(engine)():
                    loss = wrapped(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    if rank < setup.world - 1:
        work()
        return {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        return peaks(Path(folder, "trace.json"), ("startup", "step"))


def small_model(scale: int, dtype: torch.dtype, *, on_meta: bool) -> DM05ForConditionalGeneration:
    """A model as a rank has it before its engine wraps it; all zeros where weights were read."""
    model = skeleton(DM05ForConditionalGeneration, config(scale), dtype).train()
    if not on_meta:
        state = {name: torch.zeros_like(p, device="cpu") for name, p in model.named_parameters()}
        model.load_state_dict(state, assign=True, strict=False)
    model.freeze_vlm_embedding()
    model.enable_gradient_checkpointing(
        vlm_gradient_checkpointing=True, ae_gradient_checkpointing=True
    )
    return model


def one_rank(rank: int, world: int, scale: int, setups: Sequence[Setup], folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store{world}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for index, setup in enumerate(setups):
        started = time.perf_counter()
        dtype = {2: torch.bfloat16, 4: torch.float32}[setup.compute_bytes]
        model = small_model(scale, dtype, on_meta=rank == world - 1)
        found = train_two_steps(rank, setup, model)
        if found:
            found["seconds"] = round(time.perf_counter() - started)
            print(setup, found, file=sys.stderr, flush=True)
            Path(folder, f"{world}-{index}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def computed_table(model: DM05ForConditionalGeneration, worlds: Sequence[int]) -> Iterator[str]:
    """GiB at start-up / in a step, by number of ranks; the unsharded model first."""
    yield "| engine and preset | " + " | ".join(f"{n} ranks" for n in worlds) + " |"
    yield "| --- |" + " --- |" * len(worlds)
    sharded = product(ENGINES, STRATEGIES, PRESETS)
    for engine, strategy, preset in [("ddp", "", "published"), *sharded]:
        units = units_in_order(model, preset)
        setups = [Setup(engine, strategy, preset, world) for world in worlds]
        cells = [f"{startup_bytes(units, s) / GIB:.1f} / {step_bytes(units, s) / GIB:.1f}"
                 for s in setups]  # fmt: skip
        yield f"| {setups[0].title} | " + " | ".join(cells) + " |"


def measured_table(scale: int, worlds: Sequence[int], only: str) -> tuple[list[str], float]:
    """Measured MiB and their ratio to the formula, and the largest deviation from 1."""
    model = small_model(scale, torch.bfloat16, on_meta=True)
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    furthest = 0.0
    for world in worlds:
        for setup, found in measure(world, scale, only):
            units = units_in_order(model, setup.preset)
            ratios = (
                found["startup"] / startup_bytes(units, setup),
                found["step"] / step_bytes(units, setup),
            )
            furthest = max(furthest, *(abs(ratio - 1) for ratio in ratios))
            cells = [
                str(world), setup.title, {2: "bf16", 4: "fp32"}[setup.compute_bytes],
                f"{found['startup'] / MIB:.0f}", f"{ratios[0]:.2f}",
                f"{found['step'] / MIB:.0f}", f"{ratios[1]:.2f}", str(found["seconds"]),
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return lines, furthest


def measure(world: int, scale: int, only: str) -> list[tuple[Setup, dict[str, int]]]:
    """Peaks of the last rank by set-up; with weights gathered in float32 on two ranks only."""
    setups = [
        Setup(engine, strategy, preset, world, size, is_gloo=True)
        for size in ((2, 4) if world == 2 else (2,))
        for engine in ENGINES
        for strategy in STRATEGIES
        for preset in PRESETS
    ]
    setups.insert(0, Setup("ddp", "", "published", world, is_gloo=True))
    if world == 1:
        setups = [Setup("single", "", "published", world, size, is_gloo=True) for size in (2, 4)]
    setups = [setup for setup in setups if only in setup.title]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(one_rank, (world, scale, setups, folder), world)
        return [
            (setup, json.loads(Path(folder, f"{world}-{index}.json").read_text()))
            for index, setup in enumerate(setups)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--scale", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--only", default="", help="rows with this in their title, 'FSDP2 full_'")
    given = parser.parse_args()
    model = small_model(1, torch.bfloat16, on_meta=True)
    print("Released size, bf16_mixed, AdamW; GiB of a rank, start-up / step\n")
    print("\n".join(computed_table(model, given.ranks)), flush=True)
    if not given.measure:
        return 0
    lines, furthest = measured_table(given.scale, [1, *given.ranks], given.only)
    print(f"\n{describe_machine()}\n\nWidths / {given.scale}, last rank\n")
    print("\n".join(lines))
    print(f"\nfurthest from the formula: {furthest:.1%}")
    return int(furthest > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
