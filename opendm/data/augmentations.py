"""Image pipelines, on torchvision's transforms: what training varies and inference does not."""

from typing import Final

import torch
from PIL import Image
from torchvision.transforms import v2

# Strengths of the published training pipeline.
CROP_SCALE: Final = 0.95
ROTATION_DEGREES: Final = 2.0
BRIGHTNESS: Final = 0.3
CONTRAST: Final = 0.4
SATURATION: Final = 0.3


class PadToSquare(torch.nn.Module):
    """Centre a picture on a black square of its longer side."""

    def forward(self, image: Image.Image) -> Image.Image:
        """Return the square picture."""
        width, height = image.size
        if width == height:
            return image
        side = max(width, height)
        square = Image.new("RGB", (side, side))
        square.paste(image, ((side - width) // 2, (side - height) // 2))
        return square


class TransformPipeline:
    """Pad to a square and resize to the checkpoint's image size."""

    def __init__(self, image_size: int = 448) -> None:
        self.image_size = image_size
        self.transform = v2.Compose(self.steps())

    def steps(self) -> list[torch.nn.Module]:
        """The transforms in order."""
        return [PadToSquare(), v2.Resize((self.image_size, self.image_size))]

    def __call__(self, image: Image.Image) -> Image.Image:
        return self.transform(image)


class NoAugmentationPipeline(TransformPipeline):
    """The pipeline of inference, and of benchmarks that train without augmentation."""


class TrainingTransformPipeline(TransformPipeline):
    """Crop, turn and colour each view at random, each with probability ``p``.

    The randomness is torch's global generator, which the training loop seeds per sample.
    """

    def __init__(self, image_size: int = 448, p: float = 0.5) -> None:
        self.p = p
        super().__init__(image_size)

    def steps(self) -> list[torch.nn.Module]:
        """The transforms in order."""
        size = (self.image_size, self.image_size)
        crop = v2.RandomResizedCrop(size, scale=(CROP_SCALE, CROP_SCALE), ratio=(1.0, 1.0))
        return [
            *super().steps(),
            v2.RandomApply([crop], p=self.p),
            v2.RandomApply([v2.RandomRotation(ROTATION_DEGREES)], p=self.p),
            v2.RandomApply([colour_jitter()], p=self.p),
        ]


class ColourTransformPipeline(TransformPipeline):
    """Colour each view at random, half of the time; nothing in it moves.

    For pictures of a fixed camera in which a position must be read to a pixel.
    """

    def steps(self) -> list[torch.nn.Module]:
        """The transforms in order."""
        return [*super().steps(), v2.RandomApply([colour_jitter()], p=0.5)]


def colour_jitter() -> v2.ColorJitter:
    """Brightness, contrast and saturation at the published strengths."""
    return v2.ColorJitter(brightness=BRIGHTNESS, contrast=CONTRAST, saturation=SATURATION)
