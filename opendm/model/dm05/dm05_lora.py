"""``DM05LoraConfig``: the flags of low-rank adaptation."""

from dataclasses import dataclass, field


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
    """Layers with adapters; all-linear is every linear layer but the vocabulary head."""
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
    """Where the summary of trainable parameters goes."""
