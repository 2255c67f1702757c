"""The small checkpoint for a simulator's pictures, and what may vary in these."""

import numpy as np
import pytest
import torch
from PIL import Image

from opendm.data.augmentations import ColourTransformPipeline
from opendm.model.dm05.tiny import SIZES, build_processor, random_model, tiny_config

SIM = SIZES["sim"]


@pytest.fixture(scope="module")
def processor():
    words = ["Robot: Sawyer", "Corner image:", "Gripper image:"]
    return build_processor(["Press the button"], SIM.images, words, whole_numbers=SIM.whole_numbers)


def test_a_picture_of_96_pixels_takes_nine_tokens_and_moves_the_actions(processor):
    config = tiny_config(
        len(processor.tokenizer), chunk_size=16, images=SIM.images, mlp_ratio=SIM.mlp_ratio
    )
    model = random_model(config)
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Press"}]}]
    )
    actions = []
    for shade in (0, 255):
        image = Image.fromarray(np.full((96, 96, 3), shade, np.uint8))
        inputs = processor(text=text, images=[image], return_tensors="pt")
        assert inputs["pixel_values"].shape == (1, 3, 96, 96)
        assert (
            inputs["input_ids"] == model.config.vlm_config.image_token_id
        ).sum() == SIM.images.tokens
        noise = torch.zeros(1, 16, 32)
        actions.append(model.inference_action(**inputs, diffusion_steps=1, noise=noise))
    assert (actions[0] - actions[1]).abs().max() > 1e-3


def test_words_of_the_robot_and_numbers_are_whole_tokens(processor):
    def count(text):
        return len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    assert [count("Robot: Sawyer"), count("Gripper image:")] == [2, 2]
    assert {count(f" {number}") for number in range(256)} == {1}


def test_colours_vary_and_nothing_moves():
    pixels = np.full((96, 96, 3), 200, np.uint8)
    pixels[40:44, 70:74] = 20
    pipeline, looks = ColourTransformPipeline(96), set()
    torch.manual_seed(0)
    for _ in range(12):
        seen = np.asarray(pipeline(Image.fromarray(pixels))).astype(int)
        dark = seen.sum(axis=2) < (seen[0, 0].sum() + seen[41, 71].sum()) / 2
        assert np.array_equal(np.argwhere(dark)[[0, -1]], [[40, 70], [43, 73]])
        looks.add(seen.tobytes())
    assert len(looks) > 4
