"""What each process of a two-process LoRA test does. Imported by forked workers only."""

import torch

from opendm.model.dm05.dm05_lora import DM05LoraConfig, apply_lora_to_dm05_model
from opendm.model.dm05.tiny import random_model, tiny_config
from opendm.optimizer.config import DM05OptimizerConfig
from opendm.trainer.engine import Engine, autocast, gather_weights

CASES = {
    "float32": ("shard_grad_op", "published", None),
    "bfloat16": ("shard_grad_op", "published", torch.bfloat16),
    "full shards by layer": ("full_shard", "per_layer", None),
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


def two_steps(case, base, rank, *, on_meta):
    """Loss and gradient norm by step, and the adapter after them, byte by byte."""
    strategy, preset, dtype = CASES[case]
    engine = Engine(
        "fsdp1", torch.device("cpu"), dtype, dtype is not None, strategy, preset,
        ranks_per_node=2, frozen_as_loaded=True,
    )  # fmt: skip
    model = build(base, dtype, on_meta=on_meta)
    names = model.adapter.names
    wrapped = engine.wrap(model, model.fsdp_wrap_modules(preset))
    engine.assert_got(wrapped)
    optimizer = DM05OptimizerConfig(base_lr=1e-3).build_optimizer(wrapped)
    batch = {key: value[rank::2] for key, value in small_batch().items()}
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
    return record, {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


def read_by_all_and_by_one(rank, base):
    """By case: what comes of a start where all ranks have weights, and where rank 0 alone has."""
    return {
        case: [two_steps(case, base, rank, on_meta=on_meta) for on_meta in (False, rank > 0)]
        for case in CASES
    }
