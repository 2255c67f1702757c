"""``DM05ModelConfig``: the flags of the model, and how they become one."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from opendm.constants.precision import (
    BF16_MIXED_PRECISION_POLICY,
    COMPUTE_DTYPE,
    FP32_MIXED_PRECISION_POLICY,
    MODEL_DTYPE,
    PRECISION_POLICIES,
)
from opendm.errors import CheckpointError, ConfigError
from opendm.flags import choice_flag
from opendm.model.dm05.adapter_folder import check_base, find_base, is_adapter, weights_hash
from opendm.model.dm05.dm05_lora import DM05LoraConfig
from opendm.runtime import flag_was_given

if TYPE_CHECKING:
    from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration

_TEXT = choice_flag("auto", "eager", "sdpa", "flex_attention")
_VISION = choice_flag("auto", "eager", "sdpa", "flash_attention_2")


@dataclass
class DM05ModelConfig:
    """Which checkpoint, and how it runs."""

    model_name_or_path: str | None = "./checkpoints/DM05"
    """Folder of the checkpoint to start from."""
    chunk_size: int = 50
    """Action steps of one chunk; part of the name of the statistics file."""
    precision_policy: Annotated[str, choice_flag(*PRECISION_POLICIES)] = BF16_MIXED_PRECISION_POLICY
    """bf16_mixed, or fp32_mixed: float32 weights and time conditioning, bfloat16 products."""
    bf16: bool = True
    """Load weights in bfloat16 under bf16_mixed; off loads float32."""
    llm_attn_implementation: Annotated[str, _TEXT] = "flex_attention"
    """Attention of the Gemma text layers."""
    vision_attn_implementation: Annotated[str, _VISION] = "flash_attention_2"
    """Attention of the vision tower."""
    action_attn_implementation: Annotated[str, _TEXT] = "sdpa"
    """Attention of the Action Expert."""
    liger_kernel: bool = True
    """Use Liger kernels on CUDA."""
    freeze_vlm_embedding: bool = True
    """Keep the token embedding as it is."""
    vlm_gradient_checkpointing: bool = True
    """Recompute activations of text model and vision tower in the backward pass."""
    ae_gradient_checkpointing: bool = True
    """Recompute activations of the Action Expert in the backward pass."""
    num_noise_samples: int = 1
    """Draws of noise and time per observation in training; they share one pass over the prefix."""
    lora_config: DM05LoraConfig = field(default_factory=DM05LoraConfig)
    """Low-rank adaptation."""

    @property
    def export_dtype(self) -> str:
        """Dtype of the weights in files, by torch's name."""
        half = self.bf16 and self.precision_policy == BF16_MIXED_PRECISION_POLICY
        return COMPUTE_DTYPE if half else MODEL_DTYPE

    def validate(self, *, use_lora: bool = False) -> None:
        """Check sizes, names and that the checkpoint exists.

        Args:
            use_lora: whether adapters train; only then may the checkpoint be an adapter.

        Raises:
            ConfigError: names the flag, what was given and what is allowed.
        """
        if self.chunk_size < 1:
            raise ConfigError(
                f"--model-config.chunk-size {self.chunk_size} is too small; give at least 1"
            )
        if self.num_noise_samples < 1:
            raise ConfigError(
                f"--model-config.num-noise-samples {self.num_noise_samples} is too small; give at "
                "least 1"
            )
        if self.precision_policy not in PRECISION_POLICIES:
            raise ConfigError(
                f"--model-config.precision-policy {self.precision_policy!r} is unknown; allowed: "
                f"{', '.join(PRECISION_POLICIES)}"
            )
        if use_lora:
            self.lora_config.validate()
        elif is_adapter(self.model_name_or_path or ""):
            raise ConfigError(
                f"--model-config.model-name-or-path {self.model_name_or_path} is a LoRA adapter; "
                "--use-lora True goes on training it, and `opendm merge --adapter "
                f"{self.model_name_or_path} --output FOLDER` makes a full checkpoint of it"
            )
        folder = self.base_folder(use_lora=use_lora)
        if not self.model_name_or_path or not (folder / "config.json").is_file():
            raise self._no_checkpoint(use_lora=use_lora)

    def _no_checkpoint(self, *, use_lora: bool) -> CheckpointError:
        moved_to = self.lora_config.base_model
        if use_lora and moved_to:
            return CheckpointError(
                f"--model-config.lora-config.base-model {moved_to!r} is not a checkpoint folder "
                "(no config.json there); name the folder where the adapter's base is now"
            )
        moved = (
            "; if the base of this run's adapter was moved, say where it is: "
            "--model-config.lora-config.base-model"
        )
        return CheckpointError(
            f"--model-config.model-name-or-path {self.model_name_or_path!r} is not a "
            "checkpoint folder (no config.json there); download a released checkpoint, or "
            f"make a tiny one with `opendm tiny-checkpoint`{moved if use_lora else ''}"
        )

    def base_folder(self, *, use_lora: bool) -> Path:
        """Folder of the full checkpoint: ``model_name_or_path``, or the base of that adapter.

        Raises:
            CheckpointError: the base of an adapter is not where it was.
        """
        folder, moved_to = Path(self.model_name_or_path or ""), self.lora_config.base_model
        if not use_lora:
            return folder
        return find_base(folder, moved_to) if is_adapter(folder) else Path(moved_to or folder)

    def processor_folder(self, *, use_lora: bool) -> Path:
        """Folder of the processor: the adapter's own where it has one."""
        folder = Path(self.model_name_or_path or "")
        has_own = (folder / "tokenizer_config.json").is_file()
        return folder if has_own else self.base_folder(use_lora=use_lora)

    def checked_base_hash(self, resume_from: Path | None) -> str:
        """SHA-256 of an adapter's base, which is the one that the adapters to go on with name.

        Raises:
            CheckpointError: it is another.
            ConfigError: a base is named where no adapter is there to prove it.
        """
        base = self.base_folder(use_lora=True)
        given = [Path(self.model_name_or_path or ""), *([resume_from] if resume_from else [])]
        adapters = [folder for folder in given if is_adapter(folder)]
        if self.lora_config.base_model and not adapters:
            raise ConfigError(
                f"--model-config.lora-config.base-model {self.lora_config.base_model} says where "
                "the base of an adapter is now, and this run starts a new adapter on "
                f"--model-config.model-name-or-path {self.model_name_or_path}; leave it out, and "
                "name the checkpoint to start from in --model-config.model-name-or-path"
            )
        sha256 = weights_hash(base)
        for adapter in adapters:
            check_base(adapter, base, sha256)
        return sha256

    def build_model(
        self,
        *,
        use_lora: bool = False,
        read_from: Path | None = None,
        on_meta: bool = False,
        lora_seed: int = 0,
        base_sha256: str | None = None,
    ) -> "DM05ForConditionalGeneration":
        """Load the checkpoint and apply every option of this block, for training.

        Args:
            use_lora: train low-rank adapters.
            read_from: folder of the weights, where it is not ``model_name_or_path``.
            on_meta: read no weights; they stay on the meta device, for another rank's to come.
            lora_seed: of an adapter's first values.
            base_sha256: hash of an adapter's base, where it is known and checked already.

        Raises:
            CheckpointError: a folder cannot be read, or the base is not the adapter's.
        """
        import torch

        from opendm.model.dm05 import checkpoint_files
        from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
        from opendm.model.dm05.liger import use_liger_kernels
        from opendm.model.dm05.precision import configure_fp32_precision_runtime

        if use_lora and base_sha256 is None:
            base_sha256 = self.checked_base_hash(read_from)
        base = self.base_folder(use_lora=use_lora)
        config = checkpoint_files.load_config(base)
        config.chunk_size = self.chunk_size
        dtype = getattr(torch, self.export_dtype)
        if on_meta:
            model = checkpoint_files.skeleton(DM05ForConditionalGeneration, config, dtype)
        else:
            folder = base if use_lora else read_from or base
            model = DM05ForConditionalGeneration.from_pretrained(folder, config=config, dtype=dtype)
        model.num_noise_samples = self.num_noise_samples
        model.set_precision_policy(self.precision_policy)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model.set_attention_implementation(
            llm_attn_implementation=self.llm_attn_implementation,
            vision_attn_implementation=self.vision_attn_implementation,
            action_attn_implementation=self.action_attn_implementation,
            bf16=self.bf16,
            device=device,
            named=self._named_backends(),
        )
        model.enable_gradient_checkpointing(
            vlm_gradient_checkpointing=self.vlm_gradient_checkpointing,
            ae_gradient_checkpointing=self.ae_gradient_checkpointing,
        )
        if self.freeze_vlm_embedding:
            model.freeze_vlm_embedding()
        if self.liger_kernel:
            named = flag_was_given("--model-config.liger-kernel")
            use_liger_kernels(model, device, named=named)
        if self.precision_policy == FP32_MIXED_PRECISION_POLICY:
            configure_fp32_precision_runtime()
        if use_lora:
            start = read_from or Path(str(self.model_name_or_path))
            self._add_adapter(model, base, start, lora_seed, base_sha256, on_meta=on_meta)
        return model

    def _add_adapter(
        self,
        model: "DM05ForConditionalGeneration",
        base: Path,
        start: Path,
        seed: int,
        base_sha256: str | None,
        *,
        on_meta: bool,
    ) -> None:
        """Put a new adapter in, or the one in ``start`` where that holds one."""
        from opendm.model.dm05 import lora

        lora.add_adapter(model, self.lora_config, base, seed=seed, base_sha256=base_sha256)
        if is_adapter(start):
            lora.check_same_adapter(model, start)
            if not on_meta:
                lora.load_adapter(model, start)

    def _named_backends(self) -> frozenset[str]:
        defaults = {item.name: item.default for item in fields(DM05ModelConfig)}
        values = {
            "llm": ("llm_attn_implementation", self.llm_attn_implementation),
            "vision": ("vision_attn_implementation", self.vision_attn_implementation),
            "action": ("action_attn_implementation", self.action_attn_implementation),
        }
        return frozenset(
            site
            for site, (name, value) in values.items()
            if value != defaults[name] or flag_was_given(f"--model-config.{name}")
        )
