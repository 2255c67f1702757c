"""Attention backends by name, and the one rule that picks one of them for a machine.

Letters: ``B`` batch, ``H`` query heads, ``K`` key/value heads, ``Q`` queries, ``L`` keys,
``E`` head size.
"""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, no_type_check

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from opendm.errors import ConfigError

logger = logging.getLogger(__name__)

Site = Literal["llm", "vision", "action"]
Visible: TypeAlias = Bool[Tensor, "#B 1 #Q L"]
Queries: TypeAlias = Float[Tensor, "B H Q E"]
KeysOrValues: TypeAlias = Float[Tensor, "B K L E"]
Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor, "Visible | BlockMask", float], Tensor]

ALLOWED: Final[dict[Site, tuple[str, ...]]] = {
    "llm": ("auto", "eager", "sdpa", "flex_attention"),
    "vision": ("auto", "eager", "sdpa", "flash_attention_2"),
    "action": ("auto", "eager", "sdpa", "flex_attention"),
}


def repeat_heads(states: KeysOrValues, num_heads: int) -> Queries:
    """Give each query head its key or value head: ``[B, K, L, E]`` to ``[B, H, L, E]``."""
    repeats = num_heads // states.shape[1]
    return states if repeats == 1 else states.repeat_interleave(repeats, dim=1)


def eager_attention(
    query: Queries, key: KeysOrValues, value: KeysOrValues, visible: Visible, scale: float
) -> Queries:
    """Softmax attention in plain matrix products; the softmax is taken in float32."""
    key, value = (repeat_heads(states, query.shape[1]) for states in (key, value))
    scores_BHQL = query @ key.transpose(-1, -2) * scale
    scores_BHQL = scores_BHQL.masked_fill(~visible, torch.finfo(scores_BHQL.dtype).min)
    return scores_BHQL.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value


def sdpa_attention(
    query: Queries, key: KeysOrValues, value: KeysOrValues, visible: Visible, scale: float
) -> Queries:
    """Torch's fused attention with a boolean mask."""
    key, value = (repeat_heads(states, query.shape[1]) for states in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)


def flex(
    query: Queries, key: KeysOrValues, value: KeysOrValues, block_mask: BlockMask, scale: float
) -> Queries:
    """Torch's block-sparse attention; compiled where it has kernels, plain on a CPU."""
    run = _compiled_flex() if query.is_cuda else flex_attention
    return run(query, key, value, block_mask=block_mask, scale=scale, enable_gqa=True)


ATTENTION: Final[dict[str, Attention]] = {
    "eager": eager_attention,
    "sdpa": sdpa_attention,
    "flex_attention": flex,
}


def mask_for(backend: str, visible: Visible, num_queries: int) -> "Visible | BlockMask":
    """The mask in the form that ``backend`` reads."""
    if backend != "flex_attention":
        return visible
    batch, _, rows, num_keys = visible.shape
    grid = visible.expand(batch, 1, num_queries, num_keys) if rows == 1 else visible

    @no_type_check  # torch counts the positional arguments, which a checking wrapper hides
    def mask_mod(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return grid[b, 0, q, k]

    return create_block_mask(mask_mod, batch, None, num_queries, num_keys, device=visible.device)


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides whether a backend can run."""

    device: str
    training: bool
    half_precision: bool
    """Whether attention computes in bfloat16 or float16."""

    def reason_against(self, backend: str) -> str | None:
        """Why ``backend`` cannot run here, or None when it can."""
        if backend == "flex_attention" and self.device == "cpu" and self.training:
            return "flex_attention has no backward on a CPU"
        if backend == "flash_attention_2":
            if self.device != "cuda":
                return "flash_attention_2 needs a CUDA device"
            if not self.half_precision:
                return "flash_attention_2 computes in bfloat16 or float16 only"
            if importlib.util.find_spec("flash_attn") is None:
                return "flash_attention_2 needs the package flash-attn"
        return None


def resolve_backend(site: Site, wanted: str, machine: Machine, *, named: bool) -> str:
    """The backend that ``site`` uses on this machine.

    Args:
        site: which of the three attention stacks.
        wanted: the flag's value; ``auto`` picks the fastest that the machine has.
        machine: device, mode and precision.
        named: whether the user asked for ``wanted`` (then a fallback is worth one warning).

    Raises:
        ConfigError: the name is not one of the site's backends.
    """
    if wanted not in ALLOWED[site]:
        raise ConfigError(
            f"--model-config.{site}-attn-implementation {wanted!r} is unknown; "
            f"allowed: {', '.join(ALLOWED[site])}"
        )
    fastest = "flash_attention_2" if site == "vision" else "flex_attention"
    if wanted == "auto" and machine.device == "cpu":
        return "sdpa"
    backend = fastest if wanted == "auto" else wanted
    reason = machine.reason_against(backend)
    if reason is None:
        return backend
    if named and wanted != "auto":
        logger.warning("%s attention uses sdpa instead of %s: %s", site, backend, reason)
    return "sdpa"


_COMPILED_FLEX: list[Callable[..., Tensor]] = []


def _compiled_flex() -> Callable[..., Tensor]:
    if not _COMPILED_FLEX:
        _COMPILED_FLEX.append(torch.compile(flex_attention, dynamic=True))
    return _COMPILED_FLEX[0]
