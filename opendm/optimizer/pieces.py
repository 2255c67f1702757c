"""Tensors on disk by parameter name: every rank writes its pieces, and any number of ranks reads.

The files are safetensors, and an index says which file has which elements of each parameter.
Nothing is gathered, so no rank ever holds more than its own part.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opendm.errors import CheckpointError, OpenDMError
from opendm.optimizer.placement import Placement, is_distributed, local
from opendm.optimizer.shard_plan import Interval

Index = dict[str, dict[str, Any]]
"""By name: the whole ``shape``, the axis ``dim`` that comes first in the order of elements, and
``pieces``, each with first element, end and file."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of a parameter, and of all that is kept beside it."""

    placement: Placement
    tensors: Mapping[str, Tensor]
    """By key: in the parameter's own shape and sharding, or scalars."""


class PieceWriter:
    """Writes the pieces of all ranks, each once, in one file per rank. Every rank must make one.

    Args:
        stem: file names are ``stem-00000.safetensors`` and so on, numbered by rank.
        collect: gives this rank's pieces by name.

    Raises:
        CheckpointError: ``collect`` failed on some rank; on every rank.
    """

    def __init__(self, stem: str, collect: Callable[[], Mapping[str, Piece]]) -> None:
        self._stem = stem
        self._pieces: Mapping[str, Piece] = {}

        def intervals() -> dict[str, Interval]:
            self._pieces = collect()
            return {name: _interval(name, piece) for name, piece in self._pieces.items()}

        self._held = on_every_rank(intervals)
        self._rank = dist.get_rank() if is_distributed() else 0

    def write(self, folder: Path, metadata: dict[str, str] | None = None) -> None:
        """Write this rank's file into ``folder``; no rank waits for another here.

        Args:
            folder: is made if it is missing.
            metadata: texts that :meth:`PieceReader.metadata` gives back to this rank.

        Raises:
            CheckpointError: the file could not be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        flat = {
            f"{name}/{key}": _flatten(local(tensor), piece.placement.dim)
            for name, piece in self._pieces.items()
            if self._writer(name, self._held[self._rank][name]) == self._rank
            for key, tensor in piece.tensors.items()
        }
        path = folder / _file_name(self._stem, self._rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(flat, path, metadata=metadata)
            path.chmod(folder.stat().st_mode & 0o666)  # safetensors leaves 0600
        except (OSError, SafetensorError) as error:
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in flat.values())
            raise CheckpointError(
                f"{path} of {num_bytes / 2**30:.3f} GiB could not be written: {error}; make room "
                "for it, or name a folder that can be written"
            ) from error

    def index(self) -> Index:
        """Where everything is; the same on every rank."""
        index = {}
        for name, piece in self._pieces.items():
            distinct = sorted({held[name] for held in self._held if name in held} - {(0, 0)})
            writers = [self._writer(name, interval) for interval in distinct]
            index[name] = {
                "shape": list(piece.placement.shape),
                "dim": piece.placement.dim,
                "pieces": [
                    [start, stop, _file_name(self._stem, writer)]
                    for (start, stop), writer in zip(distinct, writers, strict=True)
                ],
            }
        return index

    def _writer(self, name: str, interval: Interval) -> int:
        """The rank that writes a piece, -1 if it is empty: copies are spread over their holders."""
        if interval[1] == interval[0]:
            return -1
        holders = [rank for rank, held in enumerate(self._held) if held.get(name) == interval]
        return holders[zlib.crc32(name.encode()) % len(holders)]


class PieceReader:
    """Reads what :class:`PieceWriter` wrote, under any engine and on any number of ranks.

    Args:
        folder: of the files.
        stem: of their names.
        index: what :meth:`PieceWriter.index` gave.
    """

    def __init__(self, folder: Path, stem: str, index: Index) -> None:
        self._folder = folder
        self._stem = stem
        self._index = index
        self._opened: dict[str, Any] = {}
        self._keys: dict[str, dict[str, list[str]]] = {}

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Compare a parameter's whole shape with the saved one.

        Raises:
            CheckpointError: they differ.
        """
        saved = tuple(self._index[name]["shape"])
        if shape != saved:
            raise CheckpointError(
                f"{self._folder} holds the state of {name} for shape {saved}, and the model has "
                f"{shape}; load the state of this very model"
            )

    def metadata(self, rank: int) -> dict[str, str]:
        """The texts that a rank wrote.

        Raises:
            CheckpointError: its file cannot be read.
        """
        return self._open(_file_name(self._stem, rank)).metadata() or {}

    def read(self, name: str, placement: Placement, shape: torch.Size) -> dict[str, Tensor]:
        """The tensors of one rank's piece, by key.

        Args:
            name: of the parameter.
            placement: of the piece that is wanted; the whole has been checked for its shape.
            shape: in which this rank holds it.

        Returns:
            Tensors on the CPU; nothing where the piece is empty.

        Raises:
            CheckpointError: a file cannot be read, or elements are missing.
        """
        interval = placement.interval
        if interval is None:
            raise CheckpointError(_unknown(name))
        start, stop = interval
        if start == stop:
            return {}
        saved_dim = self._index[name]["dim"]
        if placement.dim == saved_dim:
            flat = self._read_interval(name, start, stop)
        else:
            flat = {
                key: value
                if value.ndim == 0
                else _recut(value, placement.shape, saved_dim, placement.dim)[start:stop]
                for key, value in self._read_interval(name, 0, math.prod(placement.shape)).items()
            }
        return {
            key: value if value.ndim == 0 else _unflatten(value, shape, placement.dim)
            for key, value in flat.items()
        }

    def _read_interval(self, name: str, start: int, stop: int) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        num_found = 0
        for piece_start, piece_stop, file in self._index[name]["pieces"]:
            first, last = max(piece_start, start), min(piece_stop, stop)
            if first >= last:
                continue
            num_found += last - first
            opened = self._open(file)
            for key in self._keys[file].get(name, []):
                tensor = opened.get_slice(f"{name}/{key}")
                is_scalar = not tensor.get_shape()
                parts.setdefault(key, []).append(
                    opened.get_tensor(f"{name}/{key}")
                    if is_scalar
                    else tensor[first - piece_start : last - piece_start]
                )
        tensors = {key: p[0] if p[0].ndim == 0 else torch.cat(p) for key, p in parts.items()}
        for tensor in tensors.values():
            num_found = min(num_found, tensor.numel() if tensor.ndim > 0 else num_found)
        if num_found != stop - start:
            raise CheckpointError(
                f"{self._folder} holds {num_found} of {stop - start} elements of {name}; it is not "
                "complete, take another checkpoint"
            )
        return tensors

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._opened:
            try:
                opened: Any = safe_open(self._folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{self._folder / file} cannot be read: {error}; take another checkpoint"
                ) from error
            by_name: dict[str, list[str]] = {}
            for full_key in opened.keys():  # noqa: SIM118 - it is no mapping
                name, _, key = full_key.rpartition("/")
                by_name.setdefault(name, []).append(key)
            self._opened[file], self._keys[file] = opened, by_name
        return self._opened[file]


def on_every_rank(action: Callable[[], Any]) -> list[Any]:
    """What ``action`` returns on every rank, by rank; also a barrier for any device.

    Raises:
        CheckpointError: it failed on some rank; on every rank.
    """
    if not is_distributed():
        return [action()]
    outcome, failure = None, None
    try:
        outcome = action()
    except (OSError, OpenDMError) as error:
        failure = str(error)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (outcome, failure))
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            raise CheckpointError(f"rank {rank}: {message}")
    return [outcome for outcome, _ in everyone]


def _interval(name: str, piece: Piece) -> Interval:
    if piece.placement.interval is None:
        raise CheckpointError(_unknown(name))
    return piece.placement.interval


def _unknown(name: str) -> str:
    return (
        f"which part of {name} this rank holds is not known; give the optimizer the sharded model "
        "instead of its parameters"
    )


def _file_name(stem: str, rank: int) -> str:
    return f"{stem}-{rank:05d}.safetensors"


def _flatten(piece: Tensor, dim: int) -> Tensor:
    """Elements in the order of the whole, the cut axis first."""
    return piece.movedim(dim, 0).reshape(-1).contiguous() if piece.ndim > 1 else piece.contiguous()


def _unflatten(flat: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """The inverse of :func:`_flatten` for a piece of ``shape``."""
    if len(shape) <= 1:
        return flat.view(shape)
    rest = [size for axis, size in enumerate(shape) if axis != dim]
    return flat.view(shape[dim], *rest).movedim(0, dim)


def _recut(flat: Tensor, shape: tuple[int, ...], saved_dim: int, dim: int) -> Tensor:
    """The whole with another axis first."""
    stored = Placement(shape, None, saved_dim).stored_shape
    return flat.view(stored).movedim(0, saved_dim).movedim(dim, 0).reshape(-1)
