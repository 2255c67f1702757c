"""``BadPictures``: samples that were replaced because a picture was bad, counted and named."""

import logging
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Final

import torch.distributed as dist

from opendm.trainer.sampling import BAD_PICTURES

logger = logging.getLogger(__name__)

MAX_NAMED: Final = 100
"""Files that a process names in its log; the others are counted."""


class BadPictures:
    """What a process was given in place of samples with bad pictures.

    It is told of every batch that is used, so that what workers prepare and nobody uses, as at the
    end of a run, is not counted.
    """

    def __init__(self) -> None:
        self.num_replaced = 0
        """Draws of the run that got another sample, over all ranks; kept in checkpoints."""
        self.files: set[str] = set()
        """Bad files that this process met since its start."""
        self._new = 0

    def take_from(self, batch: dict[str, Any], *, is_counted: bool = True) -> None:
        """Take what a batch of this rank says of its replaced draws out of it, and count it.

        Args:
            batch: of a :class:`SeededCollator`.
            is_counted: False for a batch that only repeats samples.
        """
        draws: Sequence[Iterable[tuple[str, str]]] = batch.pop(BAD_PICTURES, ())
        if not is_counted:
            return
        self._new += len(draws)
        for file, error in chain.from_iterable(draws):
            if file in self.files:
                continue
            self.files.add(file)
            if len(self.files) <= MAX_NAMED:
                logger.warning("another sample is drawn, since a picture is bad: %s", error)
            if len(self.files) == MAX_NAMED:
                logger.warning("further bad pictures are counted and not named")

    def take_new(self) -> int:
        """Draws of this rank since the last call."""
        new, self._new = self._new, 0
        return new

    def report(self) -> None:
        """Log counts over all ranks. Every rank must call it."""
        if not self.num_replaced:  # the same number on all ranks
            return
        everyone: list[Any] = [self.files]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, self.files)
        logger.info(
            "bad pictures: %d draws of this run got another sample; %d different files were bad "
            "since this start", self.num_replaced, len(set().union(*everyone)),
        )  # fmt: skip
