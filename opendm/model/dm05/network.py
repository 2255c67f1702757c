"""``DM05Model``: the VLM, the Action Expert, and the velocity field that both make."""

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Int
from torch import Tensor, nn

from opendm.constants.robot import HISTORY_PAD_TOKEN_ID, HISTORY_TOKENS_PER_IMAGE
from opendm.model.base import DMPreTrainedModel
from opendm.model.dm05.action_expert import DM05ActionExpert
from opendm.model.dm05.configuration import DM05Config, validate_action_config_compatible
from opendm.model.dm05.flow_matching import MAX_PERIOD, MIN_PERIOD, posemb_sincos
from opendm.model.dm05.precision import conditioning_linear, linear_fp32, residual_dtype
from opendm.model.dm05.prefix import DM05VLM, Prefix, encode_images, pool_history, run_prefix
from opendm.model.dm05.visibility import additive, suffix_positions, suffix_visibility
from opendm.shapes import Actions, Time


class DM05Model(DMPreTrainedModel):
    """VLM, Action Expert and the projections between actions and hidden states."""

    config_class = DM05Config
    base_model_prefix = ""

    def __init__(self, config: DM05Config) -> None:
        super().__init__(config)
        validate_action_config_compatible(config.action_config, config.vlm_config.text_config)
        hidden = config.action_config.hidden_size
        self.vlm = DM05VLM(config.vlm_config, use_lm_head=config.use_lm_head)
        self.action_expert = DM05ActionExpert(config.action_config)
        self.action_in_proj = nn.Linear(config.action_dim, hidden)
        self.action_out_proj = nn.Linear(hidden, config.action_dim)
        self.time_mlp_in = nn.Linear(hidden, hidden)
        self.time_mlp_out = nn.Linear(hidden, hidden)
        self.precision_policy = config.precision_policy
        self.llm_backend = "eager"
        self.post_init()
        for parameter in self.unread_parameters():
            parameter.requires_grad_(False)  # noqa: FBT003 - torch's signature

    def unread_parameters(self) -> list[nn.Parameter]:
        """Parameters that no loss depends on: kept in files, never trained."""
        return self.vlm.unread_parameters() + self.action_expert.unread_parameters()

    def embed_prefix(
        self,
        input_ids: Int[Tensor, "B L"],
        pixel_values: Tensor | None,
        history_pixel_values: Tensor | None = None,
        history_mask: Tensor | None = None,
    ) -> Tensor:
        """Token embeddings ``[B, L, hidden]`` with image tokens in their places."""
        embeddings = self._embed_tokens(input_ids)
        padding = (input_ids == HISTORY_PAD_TOKEN_ID)[..., None]
        embeddings = embeddings.masked_fill(padding, 0.0)
        if pixel_values is not None:
            images = encode_images(self.vlm, pixel_values).to(embeddings.dtype)
            places = (input_ids == self.vlm.config.image_token_id)[..., None]
            embeddings = embeddings.masked_scatter(places, images)
        if history_pixel_values is not None and history_mask is not None:
            frames = encode_images(self.vlm, history_pixel_values).to(embeddings.dtype)
            frames = pool_history(frames, HISTORY_TOKENS_PER_IMAGE)
            embeddings = embeddings.masked_scatter(history_mask[..., None], frames)
        return embeddings

    def _embed_tokens(self, input_ids: Int[Tensor, "B L"]) -> Tensor:
        """Scaled rows of the table, ``[B, L, hidden]``.

        The scale is rounded to the residual stream's dtype, not to the table's: a table that is
        stored in float32 to be trained embeds as the exported bfloat16 one will.
        """
        language = self.vlm.model.language_model
        table = language.embed_tokens
        # not the table's dtype: it is frozen, and stays bfloat16 where trained weights are float32
        like = language.layers[0].self_attn.k_proj.weight
        dtype = residual_dtype(like, self.precision_policy)
        rows = F.embedding(input_ids, table.weight, table.padding_idx)
        return rows.to(dtype) * table.embed_scale.to(dtype)

    def prefix(  # noqa: PLR0917 - the order of forward()
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        pixel_values: Tensor | None,
        history_pixel_values: Tensor | None = None,
        history_mask: Tensor | None = None,
    ) -> Prefix:
        """Keys and values of images and text, computed once per observation."""
        embeddings = self.embed_prefix(input_ids, pixel_values, history_pixel_values, history_mask)
        return run_prefix(
            self.vlm,
            embeddings,
            input_ids,
            attention_mask,
            token_type_ids,
            backend=self.llm_backend,
        )

    def time_condition(self, time: Time) -> Tensor:
        """The condition ``[B, hidden]`` that modulates every norm of the Action Expert."""
        policy = self.precision_policy
        embedding = posemb_sincos(time, self.time_mlp_in.in_features, MIN_PERIOD, MAX_PERIOD)
        inner = F.silu(conditioning_linear(embedding, self.time_mlp_in, policy))
        return F.silu(conditioning_linear(inner, self.time_mlp_out, policy))

    def velocity(self, x_t: Actions, time: Time, prefix: Prefix) -> Actions:
        """The field that the sampler integrates, float32.

        ``x_t`` has one row or several consecutive ones per observation of the prefix.
        """
        expert_weight = self.action_expert.layers[0].self_attn.q_proj.weight
        embeds = linear_fp32(x_t, self.action_in_proj)
        embeds = embeds.to(residual_dtype(expert_weight, self.precision_policy))
        num_steps = x_t.shape[1]
        num_draws = x_t.shape[0] // prefix.visible.shape[0]
        visible = prefix.visible.repeat_interleave(num_draws, dim=0)
        hidden = self.action_expert(
            suffix_embeds=embeds,
            attention_mask=additive(suffix_visibility(visible, num_steps), torch.float32),
            position_ids=suffix_positions(visible, num_steps),
            prefix_cache_keys=prefix.keys,
            prefix_cache_values=prefix.values,
            adarms_cond=self.time_condition(time),
        )
        return linear_fp32(hidden, self.action_out_proj)
