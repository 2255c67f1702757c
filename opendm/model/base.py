"""What every OpenDM model shares with Hugging Face's classes."""

from typing import no_type_check

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm


@no_type_check  # transformers makes it a dataclass whose signature lacks what it accepts
class DMBaseConfig(PretrainedConfig):
    """Base of the configurations that a checkpoint's ``config.json`` holds."""

    model_type = "opendm"


class DMPreTrainedModel(PreTrainedModel):
    """Base of the models; weights of their own layers start as Gemma 3 starts them."""

    config_class = DMBaseConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ("past_key_values",)
    _supports_sdpa = True
    _supports_flex_attn = True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Gemma3RMSNorm):
            nn.init.zeros_(module.weight)  # Gemma's norm multiplies by 1 + weight
        else:
            super()._init_weights(module)
