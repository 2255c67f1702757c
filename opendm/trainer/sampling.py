"""Which sample is drawn when, and what its randomness is: pure functions of seed and position.

One order per (seed, epoch) serves every world size: a step takes the next rows of it, and rank r
takes rows r, r + W, ... of the step. All randomness inside a sample comes from (seed, epoch, row).
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from opendm.errors import OpenDMError

BAD_PICTURES: Final = "bad_pictures"
"""Field of a sample that was drawn in place of others: file and error of each of these. Of a batch:
one such list per replaced draw; absent where nothing was replaced."""

DrawOrder = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
"""(seed, epoch) to the draws of that epoch: int64 ``[N]`` passes and rows, see `SampleKey`."""


class SampleKey(NamedTuple):
    """Row of the dataset, and how often that row was drawn before."""

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
    first_step: int = 0
    """Steps that a resumed run has behind it."""
    first_sample: int = 0
    """Samples that it has behind it, of all ranks."""
    draw_order: DrawOrder | None = None
    """``num_samples`` draws per epoch; None draws every row once, in a random order."""

    def __len__(self) -> int:
        """Micro-batches of the whole run, those before ``first_step`` included."""
        return self.num_steps * self.accumulation

    def __iter__(self) -> Iterator[list[SampleKey]]:
        keys = self._keys(self.first_sample)
        for _ in range(self.first_step, self.num_steps):
            yield from self._micro_batches([next(keys) for _ in range(self.rows)])

    @property
    def rows(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.batch_size * self.accumulation * self.world_size

    def samples_before(self, step: int) -> int:
        """Samples that were drawn when ``step`` optimizer steps are done."""
        return self.first_sample + (step - self.first_step) * self.rows

    def step_keys(self, step: int) -> list[list[SampleKey]]:
        """This rank's micro-batches of the optimizer step after ``step`` steps."""
        keys = self._keys(self.samples_before(step))
        return list(self._micro_batches([next(keys) for _ in range(self.rows)]))

    def _micro_batches(self, step: list[SampleKey]) -> Iterator[list[SampleKey]]:
        mine = step[self.rank :: self.world_size]
        for start in range(0, len(mine), self.batch_size):
            yield mine[start : start + self.batch_size]

    def _keys(self, position: int) -> Iterator[SampleKey]:
        epoch, start = divmod(position, self.num_samples)
        while True:
            passes, rows = self._epoch(epoch)
            for number, row in zip(passes[start:], rows[start:], strict=True):
                yield SampleKey(int(number), int(row))
            epoch, start = epoch + 1, 0

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if self.draw_order is not None:
            return self.draw_order(self.seed, epoch)
        rows = epoch_order(self.seed, epoch, self.num_samples)
        return np.full_like(rows, epoch), rows


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
    """Collate with the user's collator; add ``sample_seed`` ``[B]`` and what was replaced."""

    def __init__(self, collate: Callable[[Sequence[Any]], dict[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, items: Sequence[tuple[Any, int]]) -> "dict[str, Any] | OpenDMError":
        samples = [sample for sample, _ in items]
        for sample in samples:
            if isinstance(sample, OpenDMError):
                return sample
        replaced = [
            sample.pop(BAD_PICTURES)
            for sample in samples
            if isinstance(sample, dict) and BAD_PICTURES in sample
        ]
        try:
            batch = self.collate(samples)
        except OpenDMError as error:
            return error
        batch = {**batch, "sample_seed": torch.tensor([seed for _, seed in items])}
        return {**batch, BAD_PICTURES: replaced} if replaced else batch
