"""``DM05LoraConfig``: the flags of low-rank adaptation, and the public functions."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opendm.errors import ConfigError
from opendm.model.dm05.adapter_folder import BIASES

if TYPE_CHECKING:
    from os import PathLike

    from torch import nn

    from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration


@dataclass
class DM05LoraConfig:
    """Which layers get adapters, and how large they are."""

    style: str = "openvla_e1_alllinear_time_mod"
    """Name of the preset, recorded in the summary."""
    r: int = 32
    """Rank of an adapter."""
    lora_alpha: int = 16
    """Scale of an adapter's output, over r."""
    lora_dropout: float = 0.0
    """Dropout before an adapter."""
    bias: str = "none"
    """Which biases train: none, all or lora_only."""
    target_modules: str = "all-linear"
    """Layers with adapters, by name, with commas; all-linear is every one but the head."""
    modules_to_save: list[str] = field(
        default_factory=lambda: [
            "action_in_proj",
            "action_out_proj",
            "time_mlp_in",
            "time_mlp_out",
            "dm05_time_modulators",
        ]
    )
    """Modules that train in full; dm05_time_modulators stands for every time modulator."""
    dump_trainable_path: str = (
        "user_checkpoints/dm05_sft/trainable_summaries/dm05_lora_libero_pi0_all.json"
    )
    """Summary of what trains; unless named, trainable_summary.json in the output folder."""
    base_model: str | None = None
    """Where the base of an adapter lies, if it was moved; its hash is checked."""

    def validate(self) -> None:
        """Check every value.

        Raises:
            ConfigError: names the flag, what was given and what is allowed.
        """
        for flag, value, is_allowed, allowed in (
            ("r", self.r, self.r >= 1, "1 or more"),
            ("lora-alpha", self.lora_alpha, self.lora_alpha >= 1, "1 or more"),
            ("lora-dropout", self.lora_dropout, 0 <= self.lora_dropout < 1, "[0, 1)"),
            ("bias", self.bias, self.bias in BIASES, ", ".join(BIASES)),
            ("target-modules", self.target_modules, bool(self.target_modules.strip(", ")),
             "all-linear, or names of layers with commas between them"),
        ):  # fmt: skip
            if not is_allowed:
                raise ConfigError(
                    f"--model-config.lora-config.{flag} {value!r} is out of range; allowed: "
                    f"{allowed}"
                )


def apply_lora_to_dm05_model(
    model: "DM05ForConditionalGeneration",
    lora_config: DM05LoraConfig,
    base_model_name_or_path: "str | PathLike[str]",
    *,
    seed: int = 0,
    base_sha256: str | None = None,
) -> "DM05ForConditionalGeneration":
    """Freeze ``model`` and put trainable adapters into it; see :func:`lora.add_adapter`."""
    from opendm.model.dm05.lora import add_adapter

    return add_adapter(
        model, lora_config, base_model_name_or_path, seed=seed, base_sha256=base_sha256
    )


def load_dm05_model_for_inference(
    model_name_or_path: "str | PathLike[str]",
    config_overrides: dict[str, Any] | None = None,
    **from_pretrained_kwargs: Any,
) -> "DM05ForConditionalGeneration":
    """A full checkpoint, or an adapter merged into its base; see :mod:`lora_merge`."""
    from opendm.model.dm05.lora_merge import load_for_inference

    return load_for_inference(model_name_or_path, config_overrides, **from_pretrained_kwargs)


def unwrap_dm05_model(model: "nn.Module") -> "DM05ForConditionalGeneration":
    """The model inside what DDP, FSDP and PEFT put around it."""
    from opendm.model.dm05.lora import unwrap

    return unwrap(model)
