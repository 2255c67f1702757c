"""What the training loop needs of a model."""

from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class TrainableModel(Protocol):
    """A module that names its FSDP units and writes itself."""

    @property
    def exported_names(self) -> frozenset[str] | None:
        """The weights that ``save_pretrained`` wants; None for all, a set for an adapter's."""

    def fsdp_wrap_modules(self, preset: str = "published") -> list[nn.Module]:
        """Modules that become FSDP units of their own, by the preset's name."""

    def save_pretrained(
        self, save_directory: Path, *, state_dict: dict[str, Tensor], dtype: torch.dtype
    ) -> None:
        """Write configuration and the given weights."""
