"""The Action Expert: a narrow Gemma 3 stack that reads the VLM's keys and values layer by layer.

Its norms are adaptive: a time condition scales, shifts and gates each of them (AdaRMS, after
Peebles & Xie 2022, arXiv:2212.09748, with RMS in place of layer norm).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint
from transformers import Gemma3TextConfig
from transformers.models.gemma3 import modeling_gemma3

from opendm.constants.precision import BF16_MIXED_PRECISION_POLICY
from opendm.model.dm05.attention import ATTENTION, mask_for
from opendm.model.dm05.precision import conditioning_linear
from opendm.model.dm05.rotary import Rotate, rotate

Hidden = Float[Tensor, "B T hidden"]
Gate = Float[Tensor, "B 1 hidden"]
Condition = Float[Tensor, "B hidden"]


def adaptive_rms_norm(
    hidden: Hidden, modulation: Float[Tensor, "B hidden3"], eps: float
) -> tuple[Hidden, Gate]:
    """Normalised, scaled and shifted ``hidden``, and the gate of its branch.

    The square, scale and shift are taken in float32; both results have the dtype of ``hidden``.
    """
    scale, shift, gate = modulation.float()[:, None, :].chunk(3, dim=-1)
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + scale) + shift).to(hidden.dtype), gate.to(hidden.dtype)


def behind_prefix(
    prefix: Float[Tensor, "S K L E"], own: Float[Tensor, "B K T E"]
) -> Float[Tensor, "B K L_plus_T E"]:
    """Keys or values of S observations before those of their B / S draws each.

    The prefix is copied once, where keys are joined anyway; its gradient is the sum over draws.
    """
    own = own.unflatten(0, (prefix.shape[0], -1))
    shared = prefix.to(own.dtype)[:, None].expand(-1, own.shape[1], -1, -1, -1)
    return torch.cat([shared, own], dim=3).flatten(0, 1)


class ActionExpertLayer(modeling_gemma3.Gemma3DecoderLayer):
    """One layer; ``input_layernorm`` and ``pre_feedforward_layernorm`` lend only their eps."""

    rotate: Rotate = staticmethod(rotate)

    def forward(  # noqa: PLR0917 - checkpoint() passes them on by position
        self,
        hidden: Hidden,
        prefix_key: Tensor,
        prefix_value: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: "Tensor | BlockMask",
        modulations: tuple[Tensor, Tensor],
        backend: str,
    ) -> Hidden:
        """Attend to prefix and suffix at once, then the feed-forward network."""
        attention = self.self_attn
        normed, gate = adaptive_rms_norm(hidden, modulations[0], self.input_layernorm.eps)
        heads = (*normed.shape[:-1], -1, attention.head_dim)
        query = attention.q_norm(attention.q_proj(normed).view(heads).transpose(1, 2))
        key = attention.k_norm(attention.k_proj(normed).view(heads).transpose(1, 2))
        value = attention.v_proj(normed).view(heads).transpose(1, 2)
        query, key = self.rotate(query, key, *rotary)
        key, value = behind_prefix(prefix_key, key), behind_prefix(prefix_value, value)
        mixed = ATTENTION[backend](query, key, value, mask, attention.scaling)
        mixed = attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + self.post_attention_layernorm(mixed) * gate
        normed, gate = adaptive_rms_norm(hidden, modulations[1], self.pre_feedforward_layernorm.eps)
        return hidden + self.post_feedforward_layernorm(self.mlp(normed)) * gate


class DM05ActionExpert(nn.Module):
    """Layers, their time modulators and the final adaptive norm; no embedding and no head."""

    def __init__(self, config: Gemma3TextConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            ActionExpertLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = modeling_gemma3.Gemma3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = modeling_gemma3.Gemma3RotaryEmbedding(config)
        self.input_time_modulators = self._modulators(config.num_hidden_layers)
        self.mlp_time_modulators = self._modulators(config.num_hidden_layers)
        self.final_time_modulator = self._modulator()
        self.precision_policy = BF16_MIXED_PRECISION_POLICY
        self.attention_backend = "eager"
        self.use_checkpointing = False

    def _modulator(self) -> nn.Linear:
        return nn.Linear(self.config.hidden_size, 3 * self.config.hidden_size)

    def _modulators(self, count: int) -> nn.ModuleList:
        return nn.ModuleList(self._modulator() for _ in range(count))

    def set_action_attention_backend(self, backend: str) -> None:
        """Use ``eager``, ``sdpa`` or ``flex_attention`` from now on."""
        self.attention_backend = backend

    def unread_parameters(self) -> list[nn.Parameter]:
        """Norm weights that adaptive norms replace; they are in files and get no gradient."""
        norms = [self.norm]
        for layer in self.layers:
            norms += [layer.input_layernorm, layer.pre_feedforward_layernorm]
        return [norm.weight for norm in norms]

    def forward(
        self,
        *,
        suffix_embeds: Hidden,
        attention_mask: Float[Tensor, "B 1 #T keys"] | None = None,
        position_ids: Tensor,
        prefix_cache_keys: Sequence[Tensor],
        prefix_cache_values: Sequence[Tensor],
        adarms_cond: Condition,
    ) -> Hidden:
        """Hidden states of the action tokens.

        Args:
            suffix_embeds: embedded noisy actions.
            attention_mask: additive, 0 where seen; None sees everything. When it is longer than
                the keys, its last columns count.
            position_ids: ``[B, T]``, going on after the visible prefix.
            prefix_cache_keys: one ``[S, K, L, E]`` a layer, with rotary embedding applied; each of
                its S rows serves B / S consecutive rows of the suffix.
            prefix_cache_values: likewise.
            adarms_cond: the time condition.
        """
        num_steps = suffix_embeds.shape[1]
        num_keys = prefix_cache_keys[0].shape[2] + num_steps
        if attention_mask is None:
            attention_mask = suffix_embeds.new_zeros(suffix_embeds.shape[0], 1, 1, num_keys)
        visible = attention_mask[..., -num_keys:] == 0
        mask = mask_for(self.attention_backend, visible, num_steps)
        rotary = {
            kind: self.rotary_emb(suffix_embeds, position_ids, kind)
            for kind in set(self.config.layer_types)
        }
        hidden = suffix_embeds
        for index, layer in enumerate(self.layers):
            arguments = (
                hidden,
                prefix_cache_keys[index],
                prefix_cache_values[index],
                rotary[self.config.layer_types[index]],
                mask,
                (
                    self._condition(self.input_time_modulators[index], adarms_cond),
                    self._condition(self.mlp_time_modulators[index], adarms_cond),
                ),
                self.attention_backend,
            )
            if self.use_checkpointing and self.training and torch.is_grad_enabled():
                hidden = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                hidden = layer(*arguments)
        final = self._condition(self.final_time_modulator, adarms_cond)
        return adaptive_rms_norm(hidden, final, self.norm.eps)[0]

    def _condition(self, modulator: nn.Module, condition: Condition) -> Tensor:
        return conditioning_linear(condition, modulator, self.precision_policy)
