"""Which sample is drawn when, and what its randomness is: pure functions of seed and position.

One order per (seed, epoch) serves every world size: a step takes the next rows of it, and rank r
takes rows r, r + W, ... of the step. All randomness inside a sample comes from (seed, epoch, row).
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from opendm.errors import OpenDMError


class SampleKey(NamedTuple):
    """Row of the dataset, and how often the dataset was gone through before."""

    epoch: int
    row: int


def sample_seed(seed: int, key: SampleKey) -> int:
    """The seed of everything random in one sample, below 2**63."""
    digest = hashlib.sha256(f"{seed}/{key.epoch}/{key.row}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def epoch_order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    """The permutation of one pass over the dataset."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


@dataclass(frozen=True)
class StepSampler(Sampler[list[SampleKey]]):
    """Micro-batches of one rank for a whole run.

    Passes follow each other without a break, so no sample is dropped and workers never restart.
    """

    num_samples: int
    seed: int
    num_steps: int
    batch_size: int
    """Samples per rank and micro-step."""
    accumulation: int = 1
    rank: int = 0
    world_size: int = 1

    def __len__(self) -> int:
        return self.num_steps * self.accumulation

    def __iter__(self) -> Iterator[list[SampleKey]]:
        keys = self._keys()
        rows = self.batch_size * self.accumulation * self.world_size
        for _ in range(self.num_steps):
            step = [next(keys) for _ in range(rows)]
            mine = step[self.rank :: self.world_size]
            for start in range(0, len(mine), self.batch_size):
                yield mine[start : start + self.batch_size]

    def _keys(self) -> Iterator[SampleKey]:
        epoch = 0
        while True:
            for index in epoch_order(self.seed, epoch, self.num_samples):
                yield SampleKey(epoch, int(index))
            epoch += 1


class SeededDataset(Dataset[tuple[Any, int]]):
    """A map-style dataset read by :class:`SampleKey`, its randomness fixed per key.

    Any transform may use the global generators of torch, numpy or random. A bad sample comes back
    as its error, because a worker process would wrap it in a traceback.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: SampleKey) -> tuple[Any, int]:
        seed = sample_seed(self.seed, key)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002 - users' transforms may use it
            try:
                return self.dataset[key.row], seed
            except OpenDMError as error:
                return error, seed


class SeededCollator:
    """Collate with the user's collator and add ``sample_seed`` ``[B]``."""

    def __init__(self, collate: Callable[[Sequence[Any]], dict[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, items: Sequence[tuple[Any, int]]) -> "dict[str, Any] | OpenDMError":
        samples = [sample for sample, _ in items]
        for sample in samples:
            if isinstance(sample, OpenDMError):
                return sample
        try:
            batch = self.collate(samples)
        except OpenDMError as error:
            return error
        return {**batch, "sample_seed": torch.tensor([seed for _, seed in items])}
