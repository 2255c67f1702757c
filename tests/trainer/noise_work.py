"""Two steps with several noise draws per observation; imported by forked workers only."""

import torch
import torch.distributed as dist
import workers

from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.optimizer.config import DM05OptimizerConfig

DRAWS = 3


def two_losses(case, rank=0, world_size=1):
    """Mean loss of two AdamW steps on the same four samples, however they are spread."""
    wrapped = workers.build(case)
    for module in wrapped.modules():
        if isinstance(module, DM05ForConditionalGeneration):
            module.num_noise_samples = DRAWS
    optimizer = DM05OptimizerConfig(optim="adamw", base_lr=1e-3).build_optimizer(wrapped)
    batch = {key: value[rank::world_size] for key, value in workers.small_batch(4).items()}
    losses = []
    for _ in range(2):
        loss = wrapped(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if world_size > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return losses


def all_cases(rank, world_size, cases):
    """Losses of every case, in one process group."""
    torch.set_num_threads(1)
    return [two_losses(case, rank, world_size) for case in cases]
