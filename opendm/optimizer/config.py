"""``DM05OptimizerConfig``: the flags of the optimizer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from opendm.errors import ConfigError
from opendm.flags import choice_flag
from opendm.optimizer.selection import is_default_muon_parameter, mark_muon_parameters

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass
class DM05OptimizerConfig:
    """Rates, moments and decay."""

    optim: Annotated[str, choice_flag("adamw", "muon_adamw")] = "adamw"
    """adamw, or muon_adamw: Muon for the Action Expert's matrices, AdamW for the rest."""
    base_lr: float = 2.5e-5
    """Learning rate after warm-up."""
    weight_decay: float = 1e-10
    """Decoupled weight decay of every trainable parameter."""
    warmup_steps: int = 1000
    """Optimizer steps over which the rate rises linearly from zero."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.95
    """Decay of AdamW's second moment."""
    adam_epsilon: float = 1e-8
    """Added to the root of AdamW's second moment."""
    muon_momentum: float = 0.95
    """Momentum of Muon."""
    muon_nesterov: bool = True
    """Nesterov's form of that momentum."""
    muon_ns_steps: int = 5
    """Newton-Schulz iterations of one orthogonalisation."""
    muon_lr_scale: float = 1.0
    """Multiplies the learning rate of Muon's matrices."""
    muon_moonlight_coefficient: float = 0.2
    """Matches the size of Muon's update to AdamW's (Liu et al. 2025, arXiv:2502.16982)."""

    def validate(self) -> None:
        """Check every value.

        Raises:
            ConfigError: names the flag, what was given and what is allowed.
        """
        for flag, value, allowed in (
            ("base-lr", self.base_lr, 0 < self.base_lr < float("inf")),
            ("weight-decay", self.weight_decay, 0 <= self.weight_decay < float("inf")),
            ("warmup-steps", self.warmup_steps, self.warmup_steps >= 0),
            ("adam-beta1", self.adam_beta1, 0 <= self.adam_beta1 < 1),
            ("adam-beta2", self.adam_beta2, 0 <= self.adam_beta2 < 1),
            ("adam-epsilon", self.adam_epsilon, 0 < self.adam_epsilon < float("inf")),
            ("muon-momentum", self.muon_momentum, 0 <= self.muon_momentum < 1),
            ("muon-ns-steps", self.muon_ns_steps, self.muon_ns_steps >= 1),
            ("muon-lr-scale", self.muon_lr_scale, 0 < self.muon_lr_scale < float("inf")),
            ("muon-moonlight-coefficient", self.muon_moonlight_coefficient,
             0 < self.muon_moonlight_coefficient < float("inf")),
        ):  # fmt: skip
            if not allowed:
                raise ConfigError(f"--optimizer-config.{flag} {value} is out of range; rates, "
                                  "scales and epsilon are positive, betas and momentum in [0, 1), "
                                  "steps 1 or more")  # fmt: skip

    def should_use_muon(self, name: str, param: "nn.Parameter") -> bool:
        """Hook: whether Muon gets this parameter; ``param`` has the whole shape."""
        return is_default_muon_parameter(name, param)

    def prepare_model(self, model: "nn.Module") -> None:
        """Hook: called before the model is sharded. Marks what Muon gets."""
        if self.optim == "muon_adamw":
            mark_muon_parameters(model, self.should_use_muon)

    def build_optimizer(self, model: "nn.Module") -> "Optimizer":
        """The optimizer of a model that is wrapped by its engine."""
        import torch

        from opendm.optimizer.muon_adamw import MuonAdamW

        betas = (self.adam_beta1, self.adam_beta2)
        if self.optim == "adamw":
            return torch.optim.AdamW(
                [p for p in model.parameters() if p.requires_grad],
                lr=self.base_lr,
                betas=betas,
                eps=self.adam_epsilon,
                weight_decay=self.weight_decay,
                fused=True,  # as the Trainer's own; a loop takes a tenth of a small model's step
            )
        return MuonAdamW(
            model,
            lr=self.base_lr,
            betas=betas,
            eps=self.adam_epsilon,
            weight_decay=self.weight_decay,
            muon_momentum=self.muon_momentum,
            muon_nesterov=self.muon_nesterov,
            muon_ns_steps=self.muon_ns_steps,
            muon_lr_scale=self.muon_lr_scale,
            muon_moonlight_coefficient=self.muon_moonlight_coefficient,
            predicate=self.should_use_muon,
        )
