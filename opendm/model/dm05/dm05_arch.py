"""The network as a whole: prefix pass, suffix pass, training loss and sampling."""

import logging
import warnings
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer
from transformers.utils.generic import ModelOutput

from opendm.constants.precision import FP32_MIXED_PRECISION_POLICY
from opendm.model.base import DMPreTrainedModel
from opendm.model.dm05 import checkpoint_files, lora_files
from opendm.model.dm05.action_expert import DM05ActionExpert
from opendm.model.dm05.adapter_folder import Adapter
from opendm.model.dm05.attention import Machine, resolve_backend
from opendm.model.dm05.configuration import DM05Config
from opendm.model.dm05.flow_matching import (
    draw_noise_and_time,
    masked_flow_matching_loss,
    noisy_actions,
    real_dimensions,
    sampling_times,
    training_time,
    velocity_target,
)
from opendm.model.dm05.network import DM05Model
from opendm.model.dm05.precision import (
    check_policy,
)
from opendm.shapes import Actions, Loss, Time

logger = logging.getLogger(__name__)

NUM_WRAPPED_VLM_LAYERS = 24
"""The published FSDP preset wraps the last 24 VLM layers (all, where there are fewer)."""

__all__ = [
    "DM05ActionExpert",
    "DM05Config",
    "DM05ForConditionalGeneration",
    "DM05Model",
    "DM05Output",
]


@dataclass
class DM05Output(ModelOutput):
    """Losses of a batch; ``fm_loss`` is the flow-matching part of ``loss`` (all of it today)."""

    loss: Tensor | None = None
    fm_loss: Tensor | None = None
    per_sample_loss: Loss | None = None


class DM05ForConditionalGeneration(DMPreTrainedModel, GenerationMixin):
    """DM0.5 as trained, saved and served."""

    config_class = DM05Config
    accepts_loss_kwargs = False
    main_input_name = "input_ids"

    def __init__(self, config: DM05Config) -> None:
        super().__init__(config)
        self.model = DM05Model(config)
        self.carried_tensors: dict[str, Tensor] = {}
        self.adapter: Adapter | None = None
        self.num_noise_samples = 1
        """Draws of noise and time per observation in training; a runtime option, in no file."""
        self.set_precision_policy(config.precision_policy)
        self.post_init()
        self._init_modulators()

    def _init_modulators(self) -> None:
        expert = self.model.action_expert
        modulators = [
            *expert.input_time_modulators,
            *expert.mlp_time_modulators,
            expert.final_time_modulator,
        ]
        for modulator in modulators:
            nn.init.normal_(modulator.weight, std=self.config.action_config.initializer_range)
            nn.init.zeros_(modulator.bias)

    # Training and sampling

    def forward(  # noqa: PLR0917 - public signature
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Int[Tensor, "B L"] | None = None,
        past_key_values: Any = None,
        pixel_values: Tensor | None = None,
        token_type_ids: Int[Tensor, "B L"] | None = None,
        cache_position: Any = None,
        action: Actions | None = None,
        action_mask: Tensor | None = None,
        history_pixel_values: Tensor | None = None,
        history_mask: Tensor | None = None,
        *,
        noise: Actions | None = None,
        time: Time | None = None,
        sample_seed: Int[Tensor, " B"] | None = None,
        **_kwargs: Any,
    ) -> DM05Output:
        """Flow-matching loss of a batch.

        Args:
            input_ids: prefix tokens, padded on the right.
            attention_mask: 1 where a token exists.
            past_key_values: accepted and ignored.
            pixel_values: all views of the batch in order, ``[V, 3, height, width]``, in [-1, 1]
                or uint8.
            token_type_ids: 1 on image tokens.
            cache_position: accepted and ignored.
            action: normalised actions ``[B, T, A]``.
            action_mask: true on real elements; padded dimensions and repeated tail steps are false.
            history_pixel_values: all history frames of the batch.
            history_mask: true on history tokens.
            noise: end point of the flow; drawn when absent.
            time: one per sample, 1 is noise; drawn when absent.
                Where neither is given, training mode averages over ``num_noise_samples`` draws of
                both; evaluation takes the first alone, so that its losses compare between runs.
            sample_seed: what noise and time are drawn from, so that a sample's draw depends on
                neither rank nor batch; without it they come from torch's global generator.
        """
        del past_key_values, cache_position
        if action is None:
            raise ValueError("forward() computes the training loss and needs `action` [B, T, A]")
        if self.precision_policy == FP32_MIXED_PRECISION_POLICY:
            action = action.float()
        num_draws = self.num_noise_samples if self.training and noise is time is None else 1
        if action_mask is not None:
            action_mask = action_mask.bool().expand_as(action).repeat_interleave(num_draws, dim=0)
        action = action.repeat_interleave(num_draws, dim=0)
        noise, time = self._noise_and_time(action, noise, time, sample_seed, num_draws)
        prefix = self.model.prefix(
            input_ids,
            attention_mask,
            token_type_ids,
            pixel_values,
            history_pixel_values,
            history_mask,
        )
        x_t = noisy_actions(action, noise, time)
        if action_mask is not None:
            x_t = torch.where(real_dimensions(action_mask), x_t, 0.0)
        velocity = self.model.velocity(x_t, time, prefix)
        target = velocity_target(action, noise)
        per_draw = masked_flow_matching_loss(velocity, target, action_mask)
        per_sample = per_draw.unflatten(0, (-1, num_draws)).mean(dim=1)
        loss = per_sample.mean()
        return DM05Output(loss=loss, fm_loss=loss.detach(), per_sample_loss=per_sample.detach())

    @torch.no_grad()
    def inference_action(  # noqa: PLR0917 - public signature
        self,
        input_ids: Int[Tensor, "B L"],
        attention_mask: Int[Tensor, "B L"] | None = None,
        pixel_values: Tensor | None = None,
        token_type_ids: Int[Tensor, "B L"] | None = None,
        states: Any = None,
        image_masks: Any = None,
        diffusion_steps: int = 10,
        past_key_values: Any = None,
        action_mask: Tensor | None = None,
        history_pixel_values: Tensor | None = None,
        history_mask: Tensor | None = None,
        *,
        noise: Actions | None = None,
        generator: torch.Generator | None = None,
        **_kwargs: Any,
    ) -> Actions:
        """Integrate the velocity from noise to an action chunk ``[B, chunk_size, action_dim]``.

        ``noise`` fixes the start; otherwise it is drawn from ``generator`` (on the generator's
        device). The mask is applied before each step, so masked dimensions hold no meaning.
        """
        del states, image_masks, past_key_values
        prefix = self.model.prefix(
            input_ids,
            attention_mask,
            token_type_ids,
            pixel_values,
            history_pixel_values,
            history_mask,
        )
        x = self._initial_noise(input_ids.shape[0], noise, generator)
        for time in sampling_times(diffusion_steps):
            if action_mask is not None:
                x = x * action_mask
            times = torch.full((x.shape[0],), time, dtype=torch.float64, device=x.device)
            x = x - self.model.velocity(x, times, prefix) / diffusion_steps
        return x

    def _initial_noise(
        self, batch: int, noise: Actions | None, generator: torch.Generator | None
    ) -> Actions:
        weight = self.model.action_in_proj.weight
        if noise is None:
            device = weight.device if generator is None else generator.device
            shape = (batch, self.config.chunk_size, self.config.action_dim)
            noise = torch.randn(shape, generator=generator, device=device)
        return noise.to(weight.device, weight.dtype)

    def _noise_and_time(
        self,
        action: Actions,
        noise: Actions | None,
        time: Time | None,
        sample_seed: Tensor | None,
        num_draws: int,
    ) -> tuple[Actions, Time]:
        batch, num_steps, action_dim = action.shape
        if sample_seed is not None and (noise is None or time is None):
            drawn_noise, drawn_time = draw_noise_and_time(
                sample_seed, num_steps, action_dim, num_draws
            )
            noise = drawn_noise if noise is None else noise
            time = drawn_time if time is None else time
        noise = torch.randn_like(action, dtype=torch.float32) if noise is None else noise
        time = training_time(torch.rand(batch, device=action.device)) if time is None else time
        return noise.to(action.device, action.dtype), time.to(action.device)

    # Runtime options

    def set_precision_policy(self, name: str) -> None:
        """Choose ``bf16_mixed`` or ``fp32_mixed`` for every part of the network."""
        check_policy(name)
        self.precision_policy = name
        self.config.precision_policy = name
        self.model.precision_policy = name
        self.model.action_expert.precision_policy = name

    def set_attention_implementation(
        self,
        *,
        llm_attn_implementation: str,
        vision_attn_implementation: str,
        action_attn_implementation: str,
        bf16: bool,
        training: bool = True,
        device: str | None = None,
        named: frozenset[str] = frozenset(),
    ) -> dict[str, str]:
        """Set the three attention backends, each replaced by sdpa where it cannot run.

        ``named`` holds the sites (``llm``, ``vision``, ``action``) that the user chose, which is
        what a fallback warns about. Returns what each site uses.
        """
        machine = Machine(
            device=device or self.device.type,
            training=training,
            half_precision=bf16 or self.precision_policy == FP32_MIXED_PRECISION_POLICY,
        )
        chosen = {
            "llm": resolve_backend("llm", llm_attn_implementation, machine, named="llm" in named),
            "vision": resolve_backend(
                "vision", vision_attn_implementation, machine, named="vision" in named
            ),
            "action": resolve_backend(
                "action", action_attn_implementation, machine, named="action" in named
            ),
        }
        self.model.llm_backend = chosen["llm"]
        self.model.action_expert.set_action_attention_backend(chosen["action"])
        self.visual.set_attn_implementation(chosen["vision"])
        return chosen

    def enable_gradient_checkpointing(
        self, *, vlm_gradient_checkpointing: bool, ae_gradient_checkpointing: bool
    ) -> None:
        """Recompute activations in the backward pass, per layer, on either tower."""
        if vlm_gradient_checkpointing:
            with warnings.catch_warnings():
                # the newer name does not exist yet at the lowest supported transformers
                warnings.simplefilter("ignore", FutureWarning)
                for tower in (self.language_model, self.visual):
                    tower.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.action_expert.use_checkpointing = ae_gradient_checkpointing

    def freeze_vlm_embedding(self) -> None:
        """Keep the token embedding as it is."""
        self.language_model.embed_tokens.requires_grad_(False)  # noqa: FBT003

    def fsdp_wrap_modules(self, preset: str = "published") -> list[nn.Module]:
        """FSDP units below the root.

        ``published`` is the whole Action Expert and the last VLM layers; ``per_layer`` is every
        layer of the VLM, of the vision tower and of the Action Expert.
        """
        layers = list(self.language_model.layers)
        if preset == "published":
            return [self.model.action_expert, *layers[-NUM_WRAPPED_VLM_LAYERS:]]
        vision = [m for m in self.visual.modules() if isinstance(m, SiglipEncoderLayer)]
        return [*vision, *layers, *self.model.action_expert.layers]

    # Parts

    @property
    def visual(self) -> nn.Module:
        """The SigLIP vision tower."""
        return self.model.vlm.model.vision_tower

    @property
    def language_model(self) -> nn.Module:
        """The Gemma 3 text model."""
        return self.model.vlm.model.language_model

    @property
    def lm_head(self) -> nn.Linear | None:
        """The vocabulary head, where the configuration asks for one."""
        return self.model.vlm.lm_head

    def embed_language_tokens(self, input_ids: Int[Tensor, "B L"]) -> Tensor:
        """Scaled token embeddings."""
        return self.language_model.embed_tokens(input_ids)

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding; Hugging Face's helpers ask for it."""
        return self.language_model.embed_tokens

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Text generation is the VLM's."""
        return self.model.vlm.prepare_inputs_for_generation(*args, **kwargs)

    def parameter_summary(self, *, only_trainable: bool = False) -> dict[str, int]:
        """Number of parameters of each child of ``model``, and ``total``."""
        summary = {
            name: sum(
                p.numel() for p in child.parameters() if p.requires_grad or not only_trainable
            )
            for name, child in self.model.named_children()
        }
        return summary | {"total": sum(summary.values())}

    # Files

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: "str | PathLike[str]",
        *_args: Any,
        config: DM05Config | None = None,
        dtype: torch.dtype | None = None,
        torch_dtype: torch.dtype | None = None,
        **_kwargs: Any,
    ) -> "DM05ForConditionalGeneration":
        """Load a checkpoint folder; every tensor must have a place and every place a tensor.

        Args:
            pretrained_model_name_or_path: a folder with ``config.json`` and safetensors files.
            config: replaces the folder's configuration.
            dtype: dtype of the weights; the file's when absent.
            torch_dtype: the older name of ``dtype``.

        Raises:
            CheckpointError: the folder or a file is missing, or tensors do not fit.
        """
        return checkpoint_files.load(
            cls, pretrained_model_name_or_path, config=config, dtype=dtype or torch_dtype
        )

    def save_pretrained(
        self,
        save_directory: "str | PathLike[str]",
        *_args: Any,
        state_dict: dict[str, Tensor] | None = None,
        dtype: torch.dtype | None = None,
        **_kwargs: Any,
    ) -> None:
        """Write ``config.json`` and one ``model.safetensors`` with the released tensor names.

        A model with an adapter writes the adapter instead, in PEFT's form and in float32.
        """
        if self.adapter is None:
            checkpoint_files.save(self, save_directory, state_dict=state_dict, dtype=dtype)
            return
        folder = checkpoint_files.write_config(self, save_directory, dtype or self.dtype)
        lora_files.write_adapter(folder, self.adapter, state_dict or self.state_dict())

    @property
    def exported_names(self) -> frozenset[str] | None:
        """The weights that ``save_pretrained`` writes; None for all of them."""
        return None if self.adapter is None else self.adapter.names


AutoModelForCausalLM.register(DM05Config, DM05ForConditionalGeneration)
