"""The loss on held-out samples, comparable between steps, runs, engines and numbers of ranks.

Noise, time and every other draw of a sample come from (seed, row) alone, each sample counts once,
and the mean is over samples, not over batches.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opendm.errors import OpenDMError
from opendm.trainer.bad_pictures import BadPictures
from opendm.trainer.engine import Engine, autocast, free_gathered
from opendm.trainer.interrupt import outlive_signals
from opendm.trainer.sampling import SampleKey, SeededCollator, SeededDataset

logger = logging.getLogger(__name__)

VALIDATION_EPOCH: Final = -1
"""Epoch of the sample keys: training counts from 0, so no draw is shared with it."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out samples of one rank."""

    loader: DataLoader
    """This rank's batches: the counted samples first, then at most repetitions."""
    num_counted: int
    """Samples of this rank that count."""
    num_samples: int
    """Samples of all ranks."""
    bad_pictures: BadPictures = field(default_factory=BadPictures)
    """Those that were met in place of samples of this rank."""


def rank_batches(
    num_samples: int, *, batch_size: int, rank: int, world_size: int
) -> list[list[int]]:
    """Rows of one rank, in equally many batches on every rank.

    FSDP gathers weights in every forward pass, so a rank without rows left repeats one, which is
    not counted.
    """
    rows = list(range(rank, num_samples, world_size))
    num_batches = -(-num_samples // (batch_size * world_size))
    return [
        rows[batch * batch_size : (batch + 1) * batch_size] or [rank % num_samples]
        for batch in range(num_batches)
    ]


def held_out(
    dataset: Any,
    collator: Callable[[Sequence[Any]], dict[str, Any]],
    *,
    seed: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
) -> HeldOut:
    """The samples that :func:`validation_loss` measures.

    Args:
        dataset: map-style dataset of the held-out samples, at least one.
        collator: samples to a batch.
        seed: of noise, times and whatever a transform draws.
        batch_size: samples per rank and forward pass; changes the result by rounding alone.
        rank: of this process.
        world_size: processes that share the samples.
        num_workers: processes that prepare samples, started anew for every loss.
    """
    num_samples = len(dataset)
    batches = rank_batches(num_samples, batch_size=batch_size, rank=rank, world_size=world_size)
    loader = DataLoader(
        SeededDataset(dataset, seed),
        batch_sampler=[[SampleKey(VALIDATION_EPOCH, row) for row in rows] for rows in batches],
        collate_fn=SeededCollator(collator),
        num_workers=num_workers,
        worker_init_fn=outlive_signals,
        generator=torch.Generator(),  # else the loader draws from the generator of training
    )
    return HeldOut(loader, len(range(rank, num_samples, world_size)), num_samples)


@torch.no_grad()
def validation_loss(model: nn.Module, samples: HeldOut, engine: Engine) -> float:
    """Mean loss over all held-out samples, the same number on every rank.

    Every rank must call it. The model, wrapped by ``engine``, computes in evaluation mode and comes
    back as it was, with nothing gathered.

    Raises:
        OpenDMError: a sample is bad.
    """
    was_training = model.training
    model.eval()
    losses: list[Tensor] = []
    num_seen = 0
    try:
        for batch in samples.loader:
            if isinstance(batch, OpenDMError):
                raise batch
            samples.bad_pictures.take_from(batch, is_counted=num_seen < samples.num_counted)
            inputs = {key: value.to(engine.device) for key, value in batch.items()}
            with autocast(engine)():
                losses.append(model(**inputs)["per_sample_loss"])
            num_seen += len(losses[-1])
    finally:
        free_gathered(model)  # no backward pass follows that would
        model.train(was_training)
    total = torch.cat(losses)[: samples.num_counted].double().sum()
    totals = torch.stack([total, total.new_tensor(samples.bad_pictures.take_new())])
    if dist.is_initialized():
        dist.all_reduce(totals)
    loss, num_replaced = totals.tolist()
    if num_replaced:
        logger.info(
            "validation: %d of %d samples were replaced, since pictures are bad",
            num_replaced, samples.num_samples,
        )  # fmt: skip
    return loss / samples.num_samples
