"""The image pipelines: draws and pixels are those of torchvision's transforms on Pillow."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from opendm.data.augmentations import (
    ColourJitter,
    ColourTransformPipeline,
    NoAugmentationPipeline,
    PadToSquare,
    TrainingTransformPipeline,
    TransformPipeline,
    _rows_to_make,
    resize_between_bars,
)

SIZES = [(640, 480), (480, 640), (448, 448), (333, 517), (517, 333), (40, 30), (31, 31), (500, 499)]
JITTER = {"brightness": 0.3, "contrast": 0.4, "saturation": 0.3}


def picture(size, seed=0, mode="RGB"):
    """Half noise, which finds every rounding, and half smooth, as pictures are."""
    rng = np.random.default_rng(seed)
    width, height = size
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    coarse = Image.fromarray(noise[: height // 8 + 2, : width // 8 + 2])
    smooth = np.array(coarse.resize(size, Image.Resampling.BICUBIC))
    smooth[::2, : width // 2] = noise[::2, : width // 2]
    return Image.fromarray(smooth).convert(mode)


def plain_pipeline(size, p=None, jitter=None):
    """The published pipeline in torchvision's own transforms."""
    steps = [PadToSquare(), v2.Resize((size, size))]
    if p is not None:
        crop = v2.RandomResizedCrop((size, size), scale=(0.95, 0.95), ratio=(1.0, 1.0))
        varied = (crop, v2.RandomRotation(2.0), v2.ColorJitter(**JITTER))
        steps += [v2.RandomApply([step], p=p) for step in varied]
    if jitter is not None:
        steps.append(v2.RandomApply([v2.ColorJitter(**JITTER)], p=jitter))
    return v2.Compose(steps)


def run(pipeline, image, seed):
    torch.manual_seed(seed)
    done = pipeline(image)
    return done, torch.get_rng_state()


def assert_same(ours, plain, image, seed):
    (found, after), (expected, plain_after) = run(ours, image, seed), run(plain, image, seed)
    assert found.mode == expected.mode
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    assert torch.equal(after, plain_after)


@pytest.mark.parametrize("size", SIZES)
def test_training_pixels_and_draws_are_those_of_torchvision(size):
    image = picture(size)
    before = np.array(image)
    for target, seeds in ((112, 12), (448, 3)):
        for p in (0.5, 1.0):
            ours, plain = TrainingTransformPipeline(target, p), plain_pipeline(target, p)
            for seed in range(seeds):
                assert_same(ours, plain, image, seed)
    np.testing.assert_array_equal(before, np.asarray(image))


@pytest.mark.parametrize("size", [*SIZES, (1280, 720), (16, 9), (3, 1), (1, 3)])
def test_inference_pixels_are_those_of_torchvision(size):
    for target in (33, 112, 448):
        for ours in (NoAugmentationPipeline(target), TransformPipeline(target)):
            assert_same(ours, plain_pipeline(target), picture(size, seed=target), 0)


@pytest.mark.parametrize("size", [33, 56, 448])
def test_what_lies_between_bars_is_resized_as_in_the_whole_picture(size):
    cut = 0
    for side in [*range(size // 2, 4 * size, size - 1), 640, 1280]:
        for top, bottom in ((0, side), (side // 8, side - side // 8), (side - 1, side)):
            inner = picture((side, bottom - top), seed=side)
            whole = Image.new("RGB", (side, side))
            whole.paste(inner, (0, top))
            expected = whole.resize((size, size), Image.Resampling.BILINEAR)
            found = resize_between_bars(inner, top, side, size)
            np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
            start, stop = _rows_to_make(top, bottom, side, size)
            cut += stop - start < size
    assert cut


@pytest.mark.parametrize("rows", [(0, 0), (0, 1), (63, 64), (0, 3), (9, 50), (1, 63)])
def test_black_rows_anywhere_crop_as_torchvision_crops_them(rows):
    image = Image.new("RGB", (64, 64))
    image.paste(picture((64, rows[1] - rows[0])) if rows[1] else image, (0, rows[0]))
    for seed in range(8):
        pair = TrainingTransformPipeline(64, 1.0), plain_pipeline(64, 1.0)
        assert_same(*pair, image, seed)


@pytest.mark.parametrize("mode", ["L", "RGBA"])
@pytest.mark.parametrize("size", [(40, 30), (30, 30)])
def test_pictures_that_are_not_rgb_are_treated_as_before(mode, size):
    image = picture(size, mode=mode)
    if mode == "RGBA":
        image.putalpha(picture(size, seed=1, mode="L"))
    for seed in range(6):
        assert_same(ColourTransformPipeline(32), plain_pipeline(32, jitter=0.5), image, seed)


@pytest.mark.parametrize("options", [
    JITTER, {"brightness": 3.0}, {"contrast": 3.0}, {"saturation": 3.0}, {"hue": 0.2, **JITTER},
    {"brightness": (0.0, 0.0)}, {"contrast": (0.0, 0.0)}, {"contrast": 0.4, "brightness": 0.3},
])  # fmt: skip
def test_colours_are_those_of_torchvision_in_every_order(options):
    image = picture((50, 40))
    orders = set()
    for seed in range(60):
        assert_same(ColourJitter(**options), v2.ColorJitter(**options), image, seed)
        torch.manual_seed(seed)
        orders.add(tuple(i for i in torch.randperm(4).tolist() if i < 3))
    assert len(orders) == 6


def test_own_steps_may_follow_in_a_subclass():
    class Own(TransformPipeline):
        def steps(self):
            return [*super().steps(), v2.RandomHorizontalFlip(1.0), v2.GaussianBlur(3)]

    image = picture((60, 40))
    after = [v2.RandomHorizontalFlip(1.0), v2.GaussianBlur(3)]
    assert_same(Own(32), v2.Compose([plain_pipeline(32), *after]), image, 0)
