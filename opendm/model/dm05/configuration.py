"""``DM05Config``: what ``config.json`` of a checkpoint says about the network."""

from typing import Any

from transformers import AutoConfig, Gemma3Config, Gemma3TextConfig

from opendm.constants.precision import BF16_MIXED_PRECISION_POLICY
from opendm.errors import CheckpointError
from opendm.model.base import DMBaseConfig

# The Action Expert attends to the keys of the text model layer by layer, so these must agree.
SHARED_FIELDS = (
    "num_hidden_layers",
    "layer_types",
    "max_position_embeddings",
    "rope_parameters",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "query_pre_attn_scalar",
)


class DM05Config(DMBaseConfig):
    """Sizes of the vision-language model (VLM) and of the Action Expert.

    Args:
        vlm_config: Gemma 3 multimodal configuration, or its dictionary.
        action_config: Gemma 3 text configuration of the Action Expert, or its dictionary.
        action_dim: width of the padded action vector.
        chunk_size: action steps of one chunk.
        tie_word_embeddings: kept for the file format; the embedding always keeps its own values.
        use_lm_head: whether to instantiate the vocabulary head, which no action needs.
    """

    model_type = "dm05"
    sub_configs = {"vlm_config": Gemma3Config, "action_config": Gemma3TextConfig}  # noqa: RUF012

    def __init__(
        self,
        vlm_config: Gemma3Config | dict[str, Any] | None = None,
        action_config: Gemma3TextConfig | dict[str, Any] | None = None,
        action_dim: int = 32,
        chunk_size: int = 50,
        tie_word_embeddings: bool = True,  # noqa: FBT001, FBT002 - public signature
        **kwargs: Any,
    ) -> None:
        self.vlm_config = (
            Gemma3Config(**vlm_config)
            if isinstance(vlm_config, dict)
            else vlm_config or Gemma3Config()
        )
        self.action_config = (
            Gemma3TextConfig(**action_config)
            if isinstance(action_config, dict)
            else action_config or Gemma3TextConfig()
        )
        self.action_dim = action_dim
        self.chunk_size = chunk_size
        self.precision_policy = kwargs.pop("precision_policy", BF16_MIXED_PRECISION_POLICY)
        self.use_lm_head = kwargs.pop("use_lm_head", False)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    def get_text_config(self, *_args: Any, **_kwargs: Any) -> Gemma3TextConfig:
        """The text model's part; Hugging Face's helpers ask for it."""
        return self.vlm_config.text_config


def validate_action_config_compatible(
    action_config: Gemma3TextConfig, language_config: Gemma3TextConfig
) -> None:
    """Check that the Action Expert can read the text model's keys.

    Raises:
        CheckpointError: names every field that differs, with both values.
    """
    differing = [
        f"{name}: {expert!r} (action expert) != {text!r} (text model)"
        for name in SHARED_FIELDS
        if (expert := action_config.to_dict().get(name))
        != (text := language_config.to_dict().get(name))
    ]
    if differing:
        raise CheckpointError(
            "the action expert does not fit the text model; give both the same "
            + "; ".join(differing)
        )


AutoConfig.register("dm05", DM05Config)
