"""Every transform of a sample, under one name."""

from opendm.data.transforms.actions import (
    ActionAbsolute,
    ActionRelative,
    ArrangeState,
    BuildAction,
    BuildActionChunk,
    PadAction,
)
from opendm.data.transforms.images import LoadHistory, LoadImages, PixelTransform
from opendm.data.transforms.normalization import Denormalize, Normalize
from opendm.data.transforms.pipeline import Pipeline, ToDevice
from opendm.data.transforms.prompt import ChatTokenization

__all__ = [
    "ActionAbsolute",
    "ActionRelative",
    "ArrangeState",
    "BuildAction",
    "BuildActionChunk",
    "ChatTokenization",
    "Denormalize",
    "LoadHistory",
    "LoadImages",
    "Normalize",
    "PadAction",
    "Pipeline",
    "PixelTransform",
    "ToDevice",
]
