"""Cutting pieces so that a kernel computes every element in a full vector.

On a CPU torch's fused AdamW uses fused multiply-adds in full vectors and none in the rest of a
tensor, which rounds differently. The rest of a piece lies elsewhere than the rest of the whole, so
each piece is cut at a multiple of the vector's width, and its rest is padded to one vector.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from opendm.optimizer.update_rules import AdamWTensors

WIDTH: Final = 16
"""Float32 elements of AVX-512's vectors; a multiple of all narrower ones."""

Rest = tuple[AdamWTensors, AdamWTensors]


def cut_into_whole_vectors(
    pieces: Sequence[AdamWTensors],
) -> tuple[list[AdamWTensors], list[Rest]]:
    """What to compute instead of ``pieces``, and the rests among it.

    Returns:
        Tensors for the kernel; and for :func:`put_back` each padded rest with the place it is from.
    """
    whole, rests = [], []
    for piece in pieces:
        even = piece.weight.numel() // WIDTH * WIDTH
        is_cut = piece.weight.device.type == "cpu" and piece.weight.is_contiguous()
        if not is_cut or even == piece.weight.numel():
            whole.append(piece)
            continue
        rest = _slice(piece, even, None, piece.step)
        if even:
            whole.append(_slice(piece, 0, even, piece.step))
            rest = _slice(piece, even, None, piece.step.clone())
        padded = AdamWTensors(
            _pad(rest.weight), _pad(rest.grad), _pad(rest.exp_avg), _pad(rest.exp_avg_sq), rest.step
        )
        whole.append(padded)
        rests.append((padded, rest))
    return whole, rests


def put_back(rests: Sequence[Rest]) -> None:
    """Copy computed rests to where they are from."""
    for padded, rest in rests:
        num = rest.weight.numel()
        rest.weight.copy_(padded.weight[:num])
        rest.exp_avg.copy_(padded.exp_avg[:num])
        rest.exp_avg_sq.copy_(padded.exp_avg_sq[:num])


def _slice(piece: AdamWTensors, start: int, stop: int | None, step: Tensor) -> AdamWTensors:
    return AdamWTensors(
        piece.weight.view(-1)[start:stop],
        piece.grad.reshape(-1)[start:stop],
        piece.exp_avg.view(-1)[start:stop],
        piece.exp_avg_sq.view(-1)[start:stop],
        step,
    )


def _pad(rest: Tensor) -> Tensor:
    return torch.nn.functional.pad(rest, (0, WIDTH - rest.numel()))
