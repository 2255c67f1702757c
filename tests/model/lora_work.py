"""What each process of a LoRA test of several does. Imported by forked workers only."""

from typing import NamedTuple

import torch

from opendm.model.dm05.dm05_lora import DM05LoraConfig, apply_lora_to_dm05_model
from opendm.model.dm05.tiny import random_model, tiny_config
from opendm.optimizer.config import DM05OptimizerConfig
from opendm.trainer.engine import Engine, autocast, clean_name, gather_weights


class Case(NamedTuple):
    """How the model is cut, and in which dtype its base is."""

    engine: str = "fsdp1"
    strategy: str = "shard_grad_op"
    preset: str = "published"
    dtype: torch.dtype | None = None


CASES = {
    "float32": Case(),
    "bfloat16": Case(dtype=torch.bfloat16),
    "full shards by layer": Case("fsdp1", "full_shard", "per_layer"),
}
HYBRID = {
    "FSDP1": Case("fsdp1", "hybrid_shard"),
    "FSDP2": Case("fsdp2", "hybrid_shard", "per_layer"),
    "FSDP1 in bfloat16": Case("fsdp1", "hybrid_shard", "per_layer", torch.bfloat16),
}


def small_batch():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(13, 64, (4, 24), generator=generator)
    ids[:, 2:18] = 12
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == 12).long(),
        "pixel_values": torch.randn(4, 3, 112, 112, generator=generator),
        "action": torch.randn(4, 4, 32, generator=generator),
        "action_mask": torch.ones(4, 4, 32, dtype=torch.bool),
        "sample_seed": torch.arange(4),
    }


def build(base, dtype, *, on_meta):
    """A model with an adapter; its frozen weights in ``dtype``."""
    model = random_model(tiny_config(64, chunk_size=4, num_layers=2, hidden_size=32)).train()
    if dtype is not None:
        model.set_precision_policy("bf16_mixed")
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    if on_meta:
        model.to("meta")
    config = DM05LoraConfig(r=4, lora_alpha=6)
    return apply_lora_to_dm05_model(model, config, base, seed=3, base_sha256="")


def two_steps(case, base, rank, world_size, *, on_meta=False):
    """Loss and gradient norm by step, the adapter after them, and the dtypes of the base."""
    dtype = case.dtype
    engine = Engine(
        case.engine, torch.device("cpu"), dtype, dtype is not None, case.strategy, case.preset,
        ranks_per_node=2, frozen_as_loaded=True,
    )  # fmt: skip
    model = build(base, dtype, on_meta=on_meta)
    names = model.adapter.names
    wrapped = engine.wrap(model, model.fsdp_wrap_modules(case.preset))
    engine.assert_got(wrapped)
    optimizer = DM05OptimizerConfig(base_lr=1e-3).build_optimizer(wrapped)
    batch = {key: value[rank::world_size] for key, value in small_batch().items()}
    record = []
    for _ in range(2):
        with autocast(engine)():
            loss = wrapped(**batch).loss
        loss.backward()
        norm = engine.clip_grad_norm(wrapped, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        record.append((float(loss.detach()), float(norm)))
    weights = gather_weights(wrapped, keep=rank == 0, names=names)
    named = wrapped.named_parameters()
    of_base = {str(p.dtype)[6:] for name, p in named if clean_name(name) not in names}
    return record, {name: tensor.numpy() for name, tensor in weights.items()}, of_base


def read_by_all_and_by_one(rank, base):
    """By case: what comes of a start where all ranks have weights, and where rank 0 alone has."""
    return {
        name: [two_steps(case, base, rank, 2, on_meta=on_meta) for on_meta in (False, rank > 0)]
        for name, case in CASES.items()
    }


def hybrid(rank, base):
    """By case: what comes of two nodes of two ranks, of which rank 0 alone has read weights."""
    return {name: two_steps(case, base, rank, 4, on_meta=rank > 0) for name, case in HYBRID.items()}
