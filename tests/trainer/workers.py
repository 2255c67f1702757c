"""What each process of a two-process engine test does. Imported by forked workers only."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from opendm.errors import EngineError
from opendm.model.dm05.tiny import random_model, tiny_config
from opendm.optimizer.config import DM05OptimizerConfig
from opendm.trainer.engine import Engine, assert_fsdp1, broadcast_from_rank_0, gather_weights


def small_model(seed=0):
    return random_model(tiny_config(64, chunk_size=4, num_layers=2, hidden_size=32), seed)


def small_batch(rows):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(13, 64, (rows, 24), generator=generator)
    ids[:, 2:18] = 12
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == 12).long(),
        "pixel_values": torch.randn(rows, 3, 112, 112, generator=generator),
        "action": torch.randn(rows, 4, 32, generator=generator),
        "action_mask": torch.ones(rows, 4, 32, dtype=torch.bool),
        "sample_seed": torch.arange(rows),
    }


def train_two_steps(
    rank, name, world_size, checkpointing=False, compute_dtype=None, seed=0, optim="adamw"
):
    """Loss and gradient norm of two steps, the description, and the gathered weights."""
    model = small_model(seed).train()
    model.enable_gradient_checkpointing(
        vlm_gradient_checkpointing=checkpointing, ae_gradient_checkpointing=checkpointing
    )
    engine = Engine(name, torch.device("cpu"), compute_dtype)
    wrapped = engine.wrap(model, model.fsdp_wrap_modules())
    engine.assert_got(wrapped)
    config = DM05OptimizerConfig(optim=optim, base_lr=1e-3, weight_decay=0.01)
    optimizer = config.build_optimizer(wrapped)
    batch = small_batch(4)
    mine = {key: value[rank::world_size] for key, value in batch.items()}
    record = []
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute_dtype is not None):
            loss = wrapped(**mine).loss
        loss.backward()
        norm = engine.clip_grad_norm(wrapped, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if world_size > 1:
            dist.all_reduce(total)
            total /= world_size
        record.append((float(total), float(norm)))
    weights = gather_weights(wrapped, keep=rank == 0)
    weights = {key: value.numpy() for key, value in weights.items()}
    return record, engine.describe(wrapped), weights


def train_from_own_seed(rank):
    """As :func:`train_two_steps` under FSDP1, with other weights on every rank."""
    return train_two_steps(rank, "fsdp1", 2, seed=rank)[0]


def synchronise_by_torch(_rank):
    """What FSDP1 says when it is asked to synchronise a module on the CPU."""
    try:
        FullyShardedDataParallel(
            small_model(), device_id=torch.device("cpu"), sync_module_states=True
        )
    except ValueError as error:
        return str(error)
    return "accepted"


def broadcast(rank):
    """Sum of a weight after the broadcast."""
    model = small_model(seed=rank)
    broadcast_from_rank_0(model)
    return model.model.action_in_proj.weight.sum().item()


def sharded_linear(size, strategy="SHARD_GRAD_OP"):
    """One FSDP unit."""
    return FullyShardedDataParallel(
        torch.nn.Linear(size, size),
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
    )


def check_assertion(_rank, strategy, num_units):
    """The error of ``assert_fsdp1``, if any."""
    try:
        assert_fsdp1(sharded_linear(4, strategy), num_units=num_units)
    except EngineError as error:
        return str(error)
    return "accepted"


def gradient_norms(rank):
    """Norm by torch's function, by the engine, and over all ranks by hand."""
    model = sharded_linear(64)
    model(torch.ones(1, 64) * (1 + rank)).pow(2).sum().backward()
    own = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    whole = Engine("fsdp1", torch.device("cpu"), None).clip_grad_norm(model, float("inf"))
    squares = own.clone().square()
    dist.all_reduce(squares)
    return float(own), float(whole), float(squares.sqrt())
