"""A policy with random weights, its requests, and where the time of one goes."""

import base64
import io
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from opendm.data.normalize import NormStats, NormStatsFile
from opendm.infer.cuda_graphs import run_prefix
from opendm.infer.layout import PolicyLayout
from opendm.infer.limits import Limits
from opendm.infer.policy import MODEL_INPUTS, Observation, Policy, to_picture
from opendm.infer.request import Contract, parse_infer
from opendm.model.dm05.configuration import DM05Config
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.prefix import encode_images
from opendm.model.dm05.tiny import ImageSizes, build_processor, random_model, tiny_config

RELEASED: Final = ImageSizes(picture=448, patch=14, tokens=256)
STATE_DIM: Final = 14
LABELS: Final = ("Head", "Left wrist", "Right wrist")


def released_config() -> DM05Config:
    """The released sizes: Gemma 3 4B, SigLIP So400m at 448 pixels, an expert of width 1024."""
    text: dict[str, Any] = {
        "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
        "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 448, "patch_size": 14,
        "vision_use_head": False,
    }  # fmt: skip
    return DM05Config(
        vlm_config={
            "text_config": text, "vision_config": vision, "mm_tokens_per_image": 256,
            "boi_token_index": 10, "eoi_token_index": 11, "image_token_index": 12,
        },
        action_config={**text, "hidden_size": 1024, "intermediate_size": 4096},
        chunk_size=50,
    )  # fmt: skip


def make_policy(size: str, device: str, dtype: torch.dtype, num_cameras: int = 3) -> Policy:
    """A policy of ``tiny`` or ``released`` size; the tokenizer is the tiny one."""
    images = RELEASED if size == "released" else ImageSizes()
    processor = build_processor(["Pick up the cube"], images)
    if size == "released":
        with torch.device(device):
            torch.set_default_dtype(dtype)
            model = DM05ForConditionalGeneration(released_config())
            torch.set_default_dtype(torch.float32)
    else:
        model = random_model(tiny_config(len(processor.tokenizer)))
    model = model.to(device, dtype).eval()
    model.set_attention_implementation(
        llm_attn_implementation="sdpa",
        vision_attn_implementation="sdpa",
        action_attn_implementation="sdpa",
        bf16=dtype == torch.bfloat16,
        training=False,
    )
    layout = PolicyLayout(
        dataset_name="benchmark",
        image_keys=[f"images_{i + 1}" for i in range(num_cameras)],
        image_prompts=list(LABELS[:num_cameras]),
        action_mode="relative",
        n_bins=256,
        add_state=True,
        action_dim=STATE_DIM,
        chunk_size=50,
        max_length=1024,
        state_desc=["joint"] * STATE_DIM,
    )
    stats = NormStats(*(np.full(STATE_DIM, value) for value in (0.0, 1.0, -1.0, 1.0)))
    return Policy(
        model, processor, layout, NormStatsFile({None: {"state": stats, "action": stats}})
    )


def request_body(num_cameras: int, seed: int, side: tuple[int, int] = (320, 240)) -> bytes:
    """A request of ``/v1/infer`` with JPEG pictures."""
    rng = np.random.default_rng(seed)
    files = []
    for _ in range(num_cameras):
        small = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(small).resize(side).save(buffer, "JPEG", quality=90)
        files.append(base64.b64encode(buffer.getvalue()).decode())
    observation = {
        "prompt": "Pick up the cube",
        "state": rng.uniform(-1, 1, STATE_DIM).round(4).tolist(),
        "images": {str(i): file for i, file in enumerate(files, start=1)},
    }
    return json.dumps({"observation": observation, "sampling": {"seed": seed}}).encode()


def contract_of(policy: Policy, num_steps: int) -> Contract:
    """What the service would hold requests against."""
    return Contract(policy.layout, num_steps, 0, policy.shrink, frozenset(), Limits())


def median_ms(work: Callable[[], object], repeats: int, device: str) -> float:
    """Median time of ``work``, after two runs to warm up."""
    times = []
    for _ in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[2:])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def flops(work: Callable[[], object]) -> int:
    """Operations of the matrix products, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@torch.no_grad()
def print_split(policy: Policy, num_steps: int, repeats: int, device: str) -> None:
    """Time and operations of each part of a request."""
    body = request_body(len(policy.layout.image_keys), 0)
    contract = contract_of(policy, num_steps)
    as_sent = replace(contract, shrink=lambda picture: picture)
    observation: Observation = parse_infer(body, contract).observation
    pictures = parse_infer(body, as_sent).observation.images.values()
    prepared = policy.prepare(observation)
    batch = policy._collate([prepared.inputs])  # noqa: SLF001 - the parts of act_prepared
    inputs = {k: batch[k].to(device) for k in MODEL_INPUTS if batch.get(k) is not None}
    prefix = run_prefix(policy.model, inputs)
    network = policy.model.model
    x: Float[Tensor, "1 T A"] = torch.randn(1, 50, 32, device=device)
    times = torch.ones(1, dtype=torch.float64, device=device)
    parts: dict[str, tuple[Callable[[], object], int]] = {
        "read, decode": (lambda: parse_infer(body, as_sent), 1),
        "resize": (lambda: [policy.shrink(to_picture("", one)) for one in pictures], 1),
        "tokenise": (lambda: policy.prepare(observation), 1),
        "vision": (lambda: encode_images(network.vlm, inputs["pixel_values"]), 1),
        "vision and prefix": (lambda: run_prefix(policy.model, inputs), 1),
        "suffix step": (lambda: network.velocity(x, times, prefix), num_steps),
    }
    measured = {
        name: (median_ms(work, repeats, device), flops(work), count)
        for name, (work, count) in parts.items()
    }
    vision = measured["vision"]
    both = measured.pop("vision and prefix")
    measured["prefix"] = (both[0] - vision[0], both[1] - vision[1], 1)
    total_ms = sum(ms * count for ms, _, count in measured.values())
    total_flops = sum(number * count for _, number, count in measured.values())
    print(
        f"{'part':<22}{'ms':>9}{'times':>7}{'of time':>9}{'GFLOP':>10}{'of FLOP':>9}{'GFLOP/s':>9}"
    )
    for name, (ms, number, count) in measured.items():
        rate = number / ms / 1e6 if ms > 0 else 0.0
        print(
            f"{name:<22}{ms:>9.2f}{count:>7}{ms * count / total_ms:>9.1%}{number / 1e9:>10.3f}"
            f"{number * count / total_flops:>9.1%}{rate:>9.1f}"
        )
