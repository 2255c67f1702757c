"""What the ranks of one group tell each other, once, when the optimizer is made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from opendm.errors import ConfigError
from opendm.optimizer.shard_plan import Interval


@dataclass(frozen=True, slots=True)
class Claim:
    """One matrix, and the piece of it that a rank holds."""

    name: str
    shape: tuple[int, int]
    """With the cut axis first."""
    dim: int
    interval: Interval | None
    """None: only the number of elements is known, and pieces lie in the order of the ranks."""
    numel: int


def gather_intervals(
    claims: Sequence[Claim], group: dist.ProcessGroup | None
) -> list[list[Interval]]:
    """The interval of every matrix on every rank, by rank; the same on all of them.

    Raises:
        ConfigError: the ranks name different matrices, or one has failed; on every rank with the
            same message.
    """
    gathered = _gather(list(claims), group)
    _check_same_matrices(gathered)
    by_matrix = [_resolve(pieces) for pieces in zip(*gathered, strict=True)]
    return [list(by_rank) for by_rank in zip(*by_matrix, strict=True)]


def fail_together(error: ConfigError, group: dist.ProcessGroup | None) -> NoReturn:
    """Raise an error on all ranks: the others may be waiting for this one's claims.

    Raises:
        ConfigError: that of the first rank that has one.
    """
    _gather(str(error), group)
    raise error


def _gather(mine: list[Claim] | str, group: dist.ProcessGroup | None) -> list[list[Claim]]:
    gathered: list[Any] = [mine]
    if group is not None:
        gathered *= dist.get_world_size(group)
        dist.all_gather_object(gathered, mine, group=group)
    for claims_or_error in gathered:
        if isinstance(claims_or_error, str):
            raise ConfigError(claims_or_error)
    return gathered


def _check_same_matrices(gathered: Sequence[Sequence[Claim]]) -> None:
    inventories = [[(claim.name, claim.shape, claim.dim) for claim in c] for c in gathered]
    for rank, inventory in enumerate(inventories):
        if inventory == inventories[0]:
            continue
        differing = sorted(set(inventory) ^ set(inventories[0])) or inventory
        name, shape, dim = differing[0]
        raise ConfigError(
            f"the ranks do not agree on Muon's matrices: rank 0 has {len(inventories[0])}, rank "
            f"{rank} has {len(inventory)}, and {name} of shape {shape} (axis {dim} first) differs. "
            "Every rank must build the same model and select by name and whole shape"
        )


def _resolve(pieces: Sequence[Claim]) -> list[Interval]:
    """Intervals by rank; unknown ones follow each other, and start again when the whole is full."""
    rows, cols = pieces[0].shape
    resolved, start = [], 0
    for piece in pieces:
        if piece.interval is not None:
            resolved.append(piece.interval)
            continue
        stop = start + piece.numel
        resolved.append((start, stop) if piece.numel else (0, 0))
        start = 0 if stop == rows * cols else stop
    return resolved
