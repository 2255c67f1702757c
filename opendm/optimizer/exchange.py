"""Packed transfers along a plan: pieces to the owners, updates and verdicts back.

A transfer is one all-to-all in a group that exists already. A rank lays its pieces for each other
rank side by side in one buffer. On the way to an owner each piece is followed by one element that
says whether there was a gradient; on the way back each rank's part begins with the owner's verdicts
on its matrices, which every rank gets, whatever it holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float32
from torch import Tensor

from opendm.errors import ConfigError
from opendm.optimizer.shard_plan import Interval, MuonShardPlan


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a piece of a matrix lies in a buffer."""

    matrix: int
    interval: Interval
    offset: int

    @property
    def stop(self) -> int:
        """The element after the piece."""
        return self.offset + self.interval[1] - self.interval[0]


@dataclass(frozen=True, slots=True)
class Half:
    """What one rank sends, or what it receives, in one transfer."""

    slots: tuple[Slot, ...]
    verdicts: tuple[tuple[int, tuple[int, ...]], ...]
    """Offsets of verdicts, and of which matrices they are."""
    splits: tuple[int, ...]
    """Elements for, or from, each rank."""

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(self.splits)


@dataclass(frozen=True, slots=True)
class Route:
    """Both halves of a transfer, as one rank sees it."""

    send: Half
    receive: Half


def gather_route(plan: MuonShardPlan, bucket: Sequence[int], rank: int) -> Route:
    """Pieces from where they are held to the matrices' owners."""
    pairs = [
        (source, plan.owners[matrix], matrix, interval)
        for matrix in bucket
        for source, interval in plan.sources(matrix)
    ]
    num_ranks = len(plan.intervals)
    sent = [[(m, i) for s, o, m, i in pairs if s == rank and o == r] for r in range(num_ranks)]
    got = [[(m, i) for s, o, m, i in pairs if o == rank and s == r] for r in range(num_ranks)]
    none: list[tuple[int, ...]] = [()] * num_ranks
    return Route(_half(sent, none, flag_each=True), _half(got, none, flag_each=True))


def return_route(plan: MuonShardPlan, bucket: Sequence[int], rank: int) -> Route:
    """Updates from the owners to all who hold a piece, verdicts to everybody."""
    num_ranks = len(plan.intervals)
    owned = [tuple(m for m in bucket if plan.owners[m] == r) for r in range(num_ranks)]
    others = [r for r in range(num_ranks) if r != rank]
    pieces = {m: dict(plan.destinations(m)) for m in bucket}
    sent = [[(m, pieces[m][r]) for m in owned[rank] if r in pieces[m]] for r in range(num_ranks)]
    got = [[(m, pieces[m][rank]) for m in owned[r] if rank in pieces[m]] for r in range(num_ranks)]
    said = [owned[rank] if r in others else () for r in range(num_ranks)]
    heard = [owned[r] if r in others else () for r in range(num_ranks)]
    return Route(_half(sent, said, flag_each=False), _half(got, heard, flag_each=False))


def _half(
    pieces: Sequence[Sequence[tuple[int, Interval]]],
    verdicts: Sequence[tuple[int, ...]],
    *,
    flag_each: bool,
) -> Half:
    slots, heads, splits, offset = [], [], [], 0
    for of_rank, of_verdicts in zip(pieces, verdicts, strict=True):
        begin = offset
        if of_verdicts:
            heads.append((offset, of_verdicts))
        offset += len(of_verdicts)
        for matrix, interval in of_rank:
            slot = Slot(matrix, interval, offset)
            slots.append(slot)
            offset = slot.stop + flag_each
        splits.append(offset - begin)
    return Half(tuple(slots), tuple(heads), tuple(splits))


class Transfer:
    """A running all-to-all; holds its buffers until it has ended."""

    def __init__(
        self, route: Route, send: Float32[Tensor, " n"], group: dist.ProcessGroup | None
    ) -> None:
        self._receive = send.new_empty(route.receive.numel)
        work = dist.all_to_all_single(
            self._receive,
            send,
            list(route.receive.splits),
            list(route.send.splits),
            group=group,
            async_op=True,
        )
        self._flying: tuple[Any, Tensor] | None = (work, send)

    def wait(self) -> Float32[Tensor, " m"]:
        """What arrived. On a GPU the stream waits, and the host does not."""
        if self._flying is not None:
            work, _ = self._flying
            work.wait()
            self._flying = None  # gloo's work holds what was sent, too
        return self._receive


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Open the connections of all pairs now: NCCL can deadlock if the first step opens them."""
    num_ranks = dist.get_world_size(group)
    try:
        dist.all_to_all_single(
            torch.empty(num_ranks, device=device),
            torch.empty(num_ranks, device=device),
            group=group,
        )
    except RuntimeError as error:
        if "No backend type" not in str(error):
            raise
        raise ConfigError(
            f"the process group has no backend for parameters on {device.type}; make it with one, "
            "for example init_process_group('cpu:gloo,cuda:nccl') where weights are offloaded"
        ) from error
