"""A pipeline is a list of transforms; a transform takes a sample and returns it changed."""

from collections.abc import Sequence

import numpy as np
import torch

from opendm.data.dataset import Sample, Transform


class Pipeline:
    """Apply transforms one after the other."""

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = list(transforms)

    def __call__(self, sample: Sample) -> Sample:
        for transform in self.transforms:
            sample = transform(sample)
        return sample

    def __repr__(self) -> str:
        return f"Pipeline([{', '.join(map(repr, self.transforms))}])"


class ToDevice:
    """Move a sample's tensors to a device; arrays become tensors."""

    def __init__(self, device: "str | torch.device") -> None:
        self.device = torch.device(device)

    def __call__(self, sample: Sample) -> Sample:
        return {key: self._move(value) for key, value in sample.items()}

    def _move(self, value: object) -> object:
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        return value.to(self.device) if isinstance(value, torch.Tensor) else value
