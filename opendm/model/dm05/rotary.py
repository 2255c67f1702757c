"""Rotary position embedding of queries and keys (Su et al. 2021, arXiv:2104.09864)."""

from collections.abc import Callable
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import apply_rotary_pos_emb

Queries: TypeAlias = Float[Tensor, "B H T E"]
Keys: TypeAlias = Float[Tensor, "B K T E"]
Angles: TypeAlias = Float[Tensor, "#B T E"]
Rotate: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def rotate(query: Queries, key: Keys, cos: Angles, sin: Angles) -> tuple[Queries, Keys]:
    """Turn queries and keys by their positions.

    Under ``fp32_mixed`` the angles are float32 and the products bfloat16; they are turned in
    float32 and rounded once, so that queries, keys and values reach attention in one dtype.
    """
    turned_query, turned_key = apply_rotary_pos_emb(query, key, cos, sin)
    return turned_query.to(query.dtype), turned_key.to(key.dtype)
