"""The prefix pass: images and text through the VLM, each layer's keys and values as outputs.

Keys and values are returned, not stored on the side: FSDP1 gathers a unit for its backward when a
gradient reaches the unit's *outputs*, and recomputation under activation checkpointing must not
write anywhere. Training and sampling share this path, so nothing here depends on a cache's window.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import Gemma3Config
from transformers.models.gemma3 import modeling_gemma3

from opendm.model.dm05.attention import ATTENTION, mask_for
from opendm.model.dm05.rotary import Rotate, rotate
from opendm.model.dm05.visibility import (
    image_blocks,
    prefix_positions,
    prefix_visibility,
    visible_tokens,
)
from opendm.pixels import scale_bytes

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the Action Expert reads of the VLM: per layer ``[B, K, L, E]`` keys and values."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    visible: Tensor
    """Which tokens exist, bool ``[B, L]``."""


class PrefixDecoderLayer(modeling_gemma3.Gemma3DecoderLayer):
    """A Gemma 3 layer that hands out its keys and values.

    Called with ``backend``, it returns ``(hidden, key, value)``, or ``(key, value)`` alone when
    nothing reads the hidden states any more. Called without, it is the stock layer.
    """

    rotate: Rotate = staticmethod(rotate)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: "Tensor | BlockMask | None" = None,
        *args: object,
        backend: str | None = None,
        keys_only: bool = False,
        **kwargs: object,
    ) -> "tuple[Tensor, ...] | Tensor":
        """See the class; ``attention_mask`` has the form that ``backend`` reads."""
        if backend is None:
            return super().forward(
                hidden_states, position_embeddings, attention_mask, *args, **kwargs
            )
        attention = self.self_attn
        normed = self.input_layernorm(hidden_states)
        heads = (*normed.shape[:-1], -1, attention.head_dim)
        key = attention.k_norm(attention.k_proj(normed).view(heads).transpose(1, 2))
        value = attention.v_proj(normed).view(heads).transpose(1, 2)
        cos, sin = position_embeddings
        if keys_only:
            _, key = self.rotate(key, key, cos, sin)
            return key, value
        query = attention.q_norm(attention.q_proj(normed).view(heads).transpose(1, 2))
        query, key = self.rotate(query, key, cos, sin)
        mixed = ATTENTION[backend](query, key, value, attention_mask, attention.scaling)
        mixed = attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden_states = hidden_states + self.post_attention_layernorm(mixed)
        widened = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return hidden_states + self.post_feedforward_layernorm(widened), key, value


class DM05VLM(modeling_gemma3.Gemma3ForConditionalGeneration):
    """Gemma 3 with layers that hand out keys and values, and a vocabulary head only on demand."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {}  # the embedding and a head are two tensors

    def __init__(self, config: Gemma3Config, *, use_lm_head: bool) -> None:
        super().__init__(config)
        text = config.text_config
        self.model.language_model.layers = nn.ModuleList(
            PrefixDecoderLayer(text, index) for index in range(text.num_hidden_layers)
        )
        if not use_lm_head:
            self.lm_head = None

    def unread_parameters(self) -> list[nn.Parameter]:
        """Parameters behind the last layer's keys and values; no action depends on them."""
        language = self.model.language_model
        last = language.layers[-1]
        behind: list[nn.Module] = [
            last.self_attn.q_proj,
            last.self_attn.q_norm,
            last.self_attn.o_proj,
            last.mlp,
            last.post_attention_layernorm,
            last.pre_feedforward_layernorm,
            last.post_feedforward_layernorm,
            language.norm,
        ]
        if self.lm_head is not None:
            behind.append(self.lm_head)
        return [parameter for module in behind for parameter in module.parameters()]


def run_prefix(
    vlm: DM05VLM,
    embeddings: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    *,
    backend: str,
) -> Prefix:
    """Run the text layers over ``embeddings`` ``[B, L, hidden]`` and collect keys and values."""
    language = vlm.model.language_model
    config = language.config
    visible = visible_tokens(input_ids, attention_mask, config.pad_token_id)
    blocks = image_blocks(token_type_ids, visible)
    positions = prefix_positions(visible)
    length = visible.shape[1]
    masks, rotary = {}, {}
    for kind in set(config.layer_types):
        window = config.sliding_window if kind == "sliding_attention" else None
        masks[kind] = mask_for(backend, prefix_visibility(visible, blocks, window), length)
        rotary[kind] = language.rotary_emb(embeddings, positions, kind)

    hidden = embeddings
    collected: list[KeyValue] = []
    for index, layer in enumerate(language.layers):
        kind = config.layer_types[index]
        is_last = index == len(language.layers) - 1
        outputs = layer(hidden, rotary[kind], masks[kind], backend=backend, keys_only=is_last)
        if not is_last:
            hidden = outputs[0]
        collected.append((outputs[-2], outputs[-1]))
    keys, values = zip(*collected, strict=True)
    return Prefix(keys=keys, values=values, visible=visible)


def encode_images(vlm: DM05VLM, pixel_values: Tensor) -> Tensor:
    """Soft tokens of images: ``[V, 3, height, width]`` to ``[V, tokens per image, hidden]``.

    Pixels are float in [-1, 1], or uint8.
    """
    if pixel_values.dtype == torch.uint8:
        pixel_values = scale_bytes(pixel_values)
    weight = vlm.model.multi_modal_projector.mm_input_projection_weight
    outputs = vlm.model.vision_tower(pixel_values=pixel_values.to(weight.dtype))
    return vlm.model.multi_modal_projector(outputs.last_hidden_state)


def pool_history(tokens: Tensor, tokens_per_frame: int) -> Tensor:
    """Average a history frame's square grid of soft tokens to a coarser one."""
    frames, count, width = tokens.shape
    side, pooled = int(count**0.5), int(tokens_per_frame**0.5)
    grid = tokens.transpose(1, 2).reshape(frames, width, side, side)
    grid = torch.nn.functional.adaptive_avg_pool2d(grid, pooled)
    return grid.flatten(2).transpose(1, 2)
