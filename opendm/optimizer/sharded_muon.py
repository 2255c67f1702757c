"""``ShardedMuon``: one step of Muon over the matrices of one process group.

Momentum, decay and application happen on the pieces. Each matrix is put together and
orthogonalised once, at its owner, which also gives the verdict whether the step of that matrix is
taken at all. The host never reads a verdict.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float32
from torch import Tensor

from opendm.optimizer.exchange import Half, Transfer, gather_route, return_route
from opendm.optimizer.muon_piece import APPLY, NON_FINITE, MuonPiece
from opendm.optimizer.newton_schulz import NsDtype, newton_schulz, scale_to_unit_norm
from opendm.optimizer.shard_plan import MuonShardPlan


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How the orthogonalisation is computed."""

    ns_dtype: NsDtype
    missing_grad: Literal["skip", "zero"]
    stack_bytes: int
    """Largest stack of equal matrices that is orthogonalised at once on a GPU."""


class ShardedMuon:
    """The matrices of one process group, or (``group=None``) of this process alone."""

    def __init__(
        self,
        pieces: Sequence[MuonPiece],
        plan: MuonShardPlan,
        group: dist.ProcessGroup | None,
        options: StepOptions,
    ) -> None:
        self.plan = plan
        self.num_orthogonalized = 0
        """Matrices that this rank has orthogonalised so far."""
        self._pieces = pieces
        self._group = group
        self._options = options
        self._rank = 0 if group is None else dist.get_rank(group)
        self._device = pieces[0].device
        self._skipped = torch.zeros((), dtype=torch.int64, device=self._device)
        self._gathers = [gather_route(plan, bucket, self._rank) for bucket in plan.buckets]
        self._returns = [return_route(plan, bucket, self._rank) for bucket in plan.buckets]
        self._is_gathered = [any(plan.sources(m) for m in bucket) for bucket in plan.buckets]
        self._flying: Transfer | None = None
        """Pieces on their way to the owners."""
        self._returning: Transfer | None = None
        """Updates on their way back."""
        self._counts_missing = False

    def num_skipped(self) -> int:
        """Steps of single matrices dropped for a non-finite gradient, over all ranks."""
        return int(self._skipped)

    def begin(self) -> None:
        """Send the first bucket's directions off."""
        for piece in self._pieces:
            piece.check_gradient()  # before any transfer: an error must not leave others waiting
            piece.reconcile()
        self._counts_missing = self._options.missing_grad == "zero" and any(
            piece.param.grad is not None for piece in self._pieces
        )
        self._flying = self._start_gather(0)

    def finish(self) -> None:
        """Orthogonalise bucket by bucket while others are under way; apply what comes back.

        The updates of the bucket before return during a bucket's first half, the pieces of the one
        after it arrive during its second half: no more than two buckets are held at a time.
        """
        for index in range(len(self.plan.buckets)):
            self._orthogonalize_bucket(index)
        self._apply_returned(len(self.plan.buckets) - 1)

    def _start_gather(self, index: int) -> Transfer | None:
        if index == len(self.plan.buckets) or not self._is_gathered[index]:
            return None
        route = self._gathers[index]
        outbox = self._empty(route.send.numel)
        for slot in route.send.slots:
            has_grad = self._write_direction(slot.matrix, outbox[slot.offset : slot.stop])
            outbox[slot.stop].fill_(float(has_grad))
        return Transfer(route, outbox, self._group)

    def _orthogonalize_bucket(self, index: int) -> None:
        owned = [m for m in self.plan.buckets[index] if self.plan.owners[m] == self._rank]
        waiting = [m for m in owned if self.plan.sources(m)]
        here = [m for m in owned if m not in waiting]
        stacks = [*self._stacks(here), *self._stacks(waiting)]
        arriving, route = self._flying, self._returns[index]
        if arriving is not None and self._returning is not None:
            arriving.wait()  # three transfers must not hold what they send
        outbox = self._empty(route.send.numel)
        verdicts: dict[int, Tensor] = {}
        half = (len(stacks) + 1) // 2
        for stack in stacks[:half]:
            verdicts |= self._orthogonalize(stack, index, arriving, outbox)
        self._turn_over(index, arriving)
        for stack in stacks[half:]:
            verdicts |= self._orthogonalize(stack, index, arriving, outbox)
        del arriving
        if owned:
            said = torch.stack([verdicts[m] for m in owned])
            self._skipped += (said == NON_FINITE).sum()
            for offset, matrices in route.send.verdicts:
                outbox[offset : offset + len(matrices)].copy_(said)
        if self._group is not None:
            self._returning = Transfer(route, outbox, self._group)

    def _turn_over(self, index: int, arriving: Transfer | None) -> None:
        """End the transfers that a bucket began with, and begin the next one's."""
        if arriving is not None:
            arriving.wait()
        self._apply_returned(index - 1)
        self._flying = self._start_gather(index + 1)

    def _stacks(self, matrices: Sequence[int]) -> Iterator[list[int]]:
        """Equal matrices together on a GPU, where one small product leaves it idle; else singly.

        On a CPU a batched product is slower than a loop.
        """
        if self._device.type == "cpu":
            yield from ([m] for m in matrices)
            return
        equal: dict[tuple[tuple[int, int], int, int], list[int]] = {}
        for m in matrices:
            piece = self._pieces[m]
            alike = (self.plan.shapes[m], piece.dim, piece.options["muon_ns_steps"])
            equal.setdefault(alike, []).append(m)
        for ((rows, cols), *_), members in equal.items():
            size = max(1, self._options.stack_bytes // (4 * rows * cols))
            yield from (members[k : k + size] for k in range(0, len(members), size))

    def _orthogonalize(
        self,
        stack: Sequence[int],
        index: int,
        arriving: Transfer | None,
        outbox: Float32[Tensor, " n"],
    ) -> dict[int, Tensor]:
        """Put matrices together, orthogonalise, write their updates; returns the verdicts."""
        shape = self.plan.shapes[stack[0]]
        whole = self._empty(len(stack), *shape)
        flags = []
        for k, m in enumerate(stack):
            start, stop = self.plan.intervals[self._rank][m]
            has_grad = stop > start and self._write_direction(m, whole[k].view(-1)[start:stop])
            flags.append(self._empty().fill_(float(has_grad)))
        if arriving is not None and self.plan.sources(stack[0]):
            inbox = arriving.wait()
            for slot in self._gathers[index].receive.slots:
                if slot.matrix in stack:
                    k = stack.index(slot.matrix)
                    start, stop = slot.interval
                    whole[k].view(-1)[start:stop].copy_(inbox[slot.offset : slot.stop])
                    flags[k] = torch.maximum(flags[k], inbox[slot.stop])
        # Of matrices that are not square the transposed one gives the transposed bits anyway.
        is_turned = self._pieces[stack[0]].dim == 1 and shape[0] == shape[1]
        whole = whole.mT if is_turned else whole
        unit, finite = scale_to_unit_norm(whole if len(stack) > 1 else whole[0])
        del whole
        steps = self._pieces[stack[0]].options["muon_ns_steps"]
        update = newton_schulz(unit, steps=steps, ns_dtype=self._options.ns_dtype)
        self.num_orthogonalized += len(stack)
        update.masked_fill_(~finite.view(*finite.shape, 1, 1), 0.0)
        update = update.mT if is_turned else update
        said = torch.stack(flags) * torch.where(finite, APPLY, NON_FINITE).float()
        verdicts = dict(zip(stack, said.unbind(), strict=True))
        updates = dict(zip(stack, update.reshape(len(stack), -1).unbind(), strict=True))
        for slot in self._returns[index].send.slots:
            if slot.matrix in updates:
                start, stop = slot.interval
                outbox[slot.offset : slot.stop].copy_(updates[slot.matrix][start:stop])
        for m in stack:
            start, stop = self.plan.intervals[self._rank][m]
            if stop > start:
                self._pieces[m].take(updates[m][start:stop], verdicts[m])
        return verdicts

    def _apply_returned(self, index: int) -> None:
        if self._returning is None:
            return
        half: Half = self._returns[index].receive
        inbox = self._returning.wait()
        self._returning = None
        verdicts: dict[int, Tensor] = {}
        for offset, matrices in half.verdicts:
            said = inbox[offset : offset + len(matrices)]
            self._skipped += (said == NON_FINITE).sum()
            verdicts |= dict(zip(matrices, said.unbind(), strict=True))
        for slot in half.slots:
            self._pieces[slot.matrix].take(inbox[slot.offset : slot.stop], verdicts[slot.matrix])

    def _write_direction(self, matrix: int, out: Float32[Tensor, " n"]) -> bool:
        return self._pieces[matrix].write_direction(out) or self._counts_missing

    def _empty(self, *shape: int) -> Float32[Tensor, "*shape"]:
        """Everything that travels is float32, whatever torch's default dtype is."""
        return torch.empty(shape, dtype=torch.float32, device=self._device)
