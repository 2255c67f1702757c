"""Which tokens exist, which may look at which, and where they stand.

One definition serves training and sampling: a prefix token is visible when its attention mask is 1
and it is not the padding of a missing history frame. Letters: ``B`` batch, ``L`` prefix tokens,
``T`` action steps.
"""

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opendm.constants.robot import HISTORY_PAD_TOKEN_ID
from opendm.shapes import TokenMask, Tokens

MASKED: Final = -2.3819763e38
"""Additive mask value of what must not be seen; Gemma's own number."""


def mask_history_pad_tokens_in_attention(
    input_ids: Tokens, attention_mask: Int[Tensor, "B L"]
) -> Int[Tensor, "B L"]:
    """A copy of ``attention_mask`` that is 0 where the id pads a missing history frame."""
    return attention_mask.masked_fill(input_ids == HISTORY_PAD_TOKEN_ID, 0)


def visible_tokens(
    input_ids: Tokens, attention_mask: Int[Tensor, "B L"] | None, pad_token_id: int
) -> TokenMask:
    """Prefix tokens that exist; without a mask, all that are not padding."""
    if attention_mask is None:
        attention_mask = (input_ids != pad_token_id).long()
    return mask_history_pad_tokens_in_attention(input_ids, attention_mask).bool()


def prefix_positions(visible: TokenMask) -> Int[Tensor, "B L"]:
    """Running count of visible tokens, from 0."""
    return (visible.long().cumsum(dim=-1) - 1).clamp(min=0)


def suffix_positions(visible: TokenMask, num_steps: int) -> Int[Tensor, "B T"]:
    """Positions of the action tokens: they go on where the visible prefix ends."""
    steps = torch.arange(num_steps, device=visible.device)
    return visible.long().sum(dim=-1, keepdim=True) + steps


def image_blocks(token_type_ids: Int[Tensor, "B L"] | None, like: TokenMask) -> Int[Tensor, "B L"]:
    """Number of the image that a token belongs to, -1 for text; a run of image tokens is one."""
    if token_type_ids is None:
        return torch.full_like(like, -1, dtype=torch.long)
    is_image = token_type_ids == 1
    starts = is_image & ~torch.nn.functional.pad(is_image, (1, 0))[:, :-1]
    return torch.where(is_image, starts.long().cumsum(dim=-1) - 1, -1)


def prefix_visibility(
    visible: TokenMask, blocks: Int[Tensor, "B L"], window: int | None
) -> Bool[Tensor, "B 1 L L"]:
    """Which prefix token (rows) sees which (columns).

    Text is causal, an image is bidirectional within itself; a sliding layer sees only the last
    ``window`` of these. Every token sees itself, so that a row of padding has a softmax.
    """
    index = torch.arange(visible.shape[1], device=visible.device)
    distance = index[:, None] - index[None, :]
    same_image = (blocks[:, :, None] == blocks[:, None, :]) & (blocks[:, :, None] >= 0)
    seen = (distance >= 0)[None] | same_image
    if window is not None:
        seen = seen & (distance < window)[None]
    seen = seen & visible[:, None, :]
    return (seen | (distance == 0)[None])[:, None]


def suffix_visibility(visible: TokenMask, num_steps: int) -> Bool[Tensor, "B 1 1 L_plus_T"]:
    """Every action token sees the whole visible prefix and every action token."""
    steps = visible.new_ones(visible.shape[0], num_steps)
    return torch.cat([visible, steps], dim=1)[:, None, None, :]


def additive(visible: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """The additive form of a boolean mask: 0 where seen."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, MASKED if dtype != torch.float16 else torch.finfo(dtype).min)


def make_suffix_attn_mask(  # noqa: PLR0917 - public signature
    input_ids: Tokens,
    prefix_len: int,
    suffix_len: int,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    pad_token_id: int = 0,
    invisible_prefix_token_ids: Sequence[int] = (),
) -> Float[Tensor, "B 1 T L_plus_T"]:
    """Additive suffix mask from token ids alone (public helper; the model has a mask at hand)."""
    ids = input_ids[:batch_size, :prefix_len].to(device)
    hidden = torch.tensor([pad_token_id, *invisible_prefix_token_ids], device=device)
    seen = suffix_visibility(~torch.isin(ids, hidden), suffix_len)
    return additive(seen, dtype).expand(-1, -1, suffix_len, -1)
