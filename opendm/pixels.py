"""Pixels as bytes on their way, and as the model sees them."""

from typing import Final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

HALF: Final = 127.5
"""Mean and deviation of 0.5, in steps of a byte."""


def scale_bytes(pixels: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """0 .. 255 to -1 .. 1 in float32, bit for bit as Gemma 3's image processor does.

    The result is contiguous; the bytes have their channels last where they come from Pillow.
    """
    floats = pixels.to(torch.float32, memory_format=torch.contiguous_format)
    return floats.sub_(HALF).div_(HALF)
