"""Image pipelines, on torchvision's transforms: what training varies and inference does not.

Pixels are those of Pillow's 8-bit resampling and blending, which released policies were trained on.
torch's resampling of 8-bit tensors is faster and differs by a step of 1/255 here and there.
"""

from typing import Any, Final

import torch
from PIL import Image, ImageEnhance, ImageStat
from torchvision.transforms import v2

# Strengths of the published training pipeline.
CROP_SCALE: Final = 0.95
ROTATION_DEGREES: Final = 2.0
BRIGHTNESS: Final = 0.3
CONTRAST: Final = 0.4
SATURATION: Final = 0.3

# The numbers by which torchvision's ColorJitter names the steps that it shuffles.
BRIGHTNESS_STEP: Final = 0
CONTRAST_STEP: Final = 1
SATURATION_STEP: Final = 2

RAMP: Final = Image.frombytes("L", (256, 1), bytes(range(256)))
"""The lookup table that changes nothing."""


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


class ResizeToSquare(torch.nn.Module):
    """:class:`PadToSquare` and a bilinear resize, without resampling the bars of a wide picture."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.pad = PadToSquare()

    def forward(self, image: Image.Image) -> Image.Image:
        """Return the picture, ``size`` pixels wide and high."""
        square = (self.size, self.size)
        width, height = image.size
        if width <= height or image.mode != "RGB":
            return self.pad(image).resize(square, Image.Resampling.BILINEAR)
        # Pillow resamples across first and down then, so the bars can be added in between
        narrow = image.resize((self.size, height), Image.Resampling.BILINEAR)
        padded = Image.new("RGB", (self.size, width))
        padded.paste(narrow, (0, (width - height) // 2))
        return padded.resize(square, Image.Resampling.BILINEAR)


class ColourJitter(v2.ColorJitter):
    """torchvision's draws and Pillow's pixels; brightness and contrast through lookup tables."""

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """The picture in its new colours; what is no RGB picture goes torchvision's way."""
        if not isinstance(inpt, Image.Image) or inpt.mode != "RGB" or self.hue is not None:
            return super().transform(inpt, params)
        image, table = inpt, RAMP
        for step in params["fn_idx"].tolist():
            if step == BRIGHTNESS_STEP and self.brightness is not None:
                table = _blend(0, table, params["brightness_factor"])
            elif step == CONTRAST_STEP and self.contrast is not None:
                image = _look_up(image, table)
                grey = int(ImageStat.Stat(image.convert("L")).mean[0] + 0.5)
                table = _blend(grey, RAMP, params["contrast_factor"])
            elif step == SATURATION_STEP and self.saturation is not None:
                image, table = _look_up(image, table), RAMP
                image = ImageEnhance.Color(image).enhance(params["saturation_factor"])
        return _look_up(image, table)


def _blend(grey: int, table: Image.Image, factor: float) -> Image.Image:
    """A lookup table after one more blend, made by Pillow so that it rounds as Pillow does."""
    return Image.blend(Image.new("L", table.size, grey), table, factor)


def _look_up(image: Image.Image, table: Image.Image) -> Image.Image:
    return image if table is RAMP else image.point(table.tobytes() * 3)


class TransformPipeline:
    """Pad to a square and resize to the checkpoint's image size."""

    def __init__(self, image_size: int = 448) -> None:
        self.image_size = image_size
        self.transform = v2.Compose(self.steps())

    def steps(self) -> list[torch.nn.Module]:
        """The transforms in order."""
        return [ResizeToSquare(self.image_size)]

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


def colour_jitter() -> ColourJitter:
    """Brightness, contrast and saturation at the published strengths."""
    return ColourJitter(brightness=BRIGHTNESS, contrast=CONTRAST, saturation=SATURATION)
