"""Image pipelines, on torchvision's transforms: what training varies and inference does not.

Pixels are those of Pillow's 8-bit resampling and blending, which released policies were trained on.
torch's resampling of 8-bit tensors is faster and differs by a step of 1/255 here and there.
"""

import math
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
        width, height = image.size
        if width <= height or image.mode != "RGB":
            return self.pad(image).resize((self.size, self.size), Image.Resampling.BILINEAR)
        return resize_between_bars(image, (width - height) // 2, width, self.size)


class Sometimes(torch.nn.Module):
    """A step that is taken with probability ``p``; torchvision's ``RandomApply``."""

    def __init__(self, step: torch.nn.Module, p: float) -> None:
        super().__init__()
        self.step = step
        self.p = p

    def forward(self, image: Image.Image) -> Image.Image:
        """Return the changed picture, or the same."""
        return image if torch.rand(1) >= self.p else self.step(image)


class RandomCrop(torch.nn.Module):
    """A square of ``scale`` of a square picture's area, in its size again.

    Draws and pixels of torchvision's ``RandomResizedCrop``, without resampling black bars across.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, image: Image.Image) -> Image.Image:
        """Return the picture, as large as before."""
        size = image.width
        scale = torch.empty(1).uniform_(self.scale, self.scale).item()
        torch.empty(1).uniform_(0, 0)  # torchvision draws the ratio of the sides too
        side = round(math.sqrt(size * size * scale))
        top, left = (int(torch.randint(0, size - side + 1, size=(1,)).item()) for _ in range(2))
        cropped = image.crop((left, top, left + side, top + side))
        bounds = cropped.getbbox() if image.mode == "RGB" else None  # None where all is black
        if bounds is None or bounds[3] - bounds[1] == side:
            return cropped.resize((size, size), Image.Resampling.BILINEAR)
        inner = cropped.crop((0, bounds[1], side, bounds[3]))
        return resize_between_bars(inner, bounds[1], side, size)


class RandomRotation(torch.nn.Module):
    """Turn by up to ``degrees`` either way; draws and pixels of torchvision's."""

    def __init__(self, degrees: float) -> None:
        super().__init__()
        self.degrees = degrees

    def forward(self, image: Image.Image) -> Image.Image:
        """Return the turned picture, black where nothing was."""
        return image.rotate(torch.empty(1).uniform_(-self.degrees, self.degrees).item())


def resize_between_bars(inner: Image.Image, top: int, side: int, size: int) -> Image.Image:
    """The bilinear resize of a square picture with black bars, to ``size`` pixels wide and high.

    Pillow resamples a square across first and down then, each time to 8 bits, so the bars can be
    added in between; of the rows that it makes then, many are black and need not be made.

    Args:
        inner: RGB, what lies between the bars.
        top: height of the upper bar.
        side: of the whole picture.
        size: of the result.
    """
    narrow = inner.resize((size, inner.height), Image.Resampling.BILINEAR)
    padded = narrow.crop((0, -top, size, side - top))  # black where nothing was
    start, stop = _rows_to_make(top, top + inner.height, side, size)
    if stop - start == size:
        return padded.resize((size, size), Image.Resampling.BILINEAR)
    box = (0, start * side // size, size, stop * side // size)
    rows = padded.resize((size, stop - start), Image.Resampling.BILINEAR, box)
    return rows.crop((0, -start, size, size - start))


def _rows_to_make(top: int, bottom: int, side: int, size: int) -> tuple[int, int]:
    """Rows of the result that hold all that is not black.

    They start and stop where a whole row of the picture does: there the filter's weights, which
    Pillow rounds to 22 bits, are those of the whole picture.
    """
    scale = side / size
    reach = max(scale, 1.0) + 1.0
    step = size // math.gcd(size, side)
    start = math.floor((top - reach) / scale - 0.5) // step * step
    stop = -(-math.ceil((bottom + reach) / scale + 0.5) // step) * step
    return max(start, 0), min(stop, size)


class ColourJitter(torch.nn.Module):
    """torchvision's draws and Pillow's pixels; brightness and contrast through lookup tables.

    Args:
        strengths: arguments of torchvision's ``ColorJitter``.
    """

    def __init__(self, **strengths: Any) -> None:
        super().__init__()
        self.plain = v2.ColorJitter(**strengths)

    def forward(self, image: Image.Image) -> Image.Image:
        """The picture in its new colours; what is no RGB picture goes torchvision's way."""
        if image.mode != "RGB" or self.plain.hue is not None:
            return self.plain(image)
        drawn, table = self.plain.make_params([]), RAMP
        for step in drawn["fn_idx"].tolist():
            if step == BRIGHTNESS_STEP and self.plain.brightness is not None:
                table = _blend(0, table, drawn["brightness_factor"])
            elif step == CONTRAST_STEP and self.plain.contrast is not None:
                image = _look_up(image, table)
                grey = int(ImageStat.Stat(image.convert("L")).mean[0] + 0.5)
                table = _blend(grey, RAMP, drawn["contrast_factor"])
            elif step == SATURATION_STEP and self.plain.saturation is not None:
                image, table = _look_up(image, table), RAMP
                image = ImageEnhance.Color(image).enhance(drawn["saturation_factor"])
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
        varied = (RandomCrop(CROP_SCALE), RandomRotation(ROTATION_DEGREES), colour_jitter())
        return [*super().steps(), *(Sometimes(step, self.p) for step in varied)]


class ColourTransformPipeline(TransformPipeline):
    """Colour each view at random, half of the time; nothing in it moves.

    For pictures of a fixed camera in which a position must be read to a pixel.
    """

    def steps(self) -> list[torch.nn.Module]:
        """The transforms in order."""
        return [*super().steps(), Sometimes(colour_jitter(), p=0.5)]


def colour_jitter() -> ColourJitter:
    """Brightness, contrast and saturation at the published strengths."""
    return ColourJitter(brightness=BRIGHTNESS, contrast=CONTRAST, saturation=SATURATION)
