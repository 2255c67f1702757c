"""The processor's chat encoding of one message, without the work that a plain Gemma 3 one repeats.

Three things are saved: pictures that have the model's size already are not prepared for resizing;
the text is split into tokens without its hundreds of equal image tokens, which are put in
afterwards; and nothing is counted twice. What is not recognised goes through the processor.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from opendm.pixels import HALF

if TYPE_CHECKING:
    from transformers import Gemma3Processor, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

Inputs = Mapping[str, torch.Tensor]
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How a picture stands in the text."""

    placeholder: str
    """What the chat template writes."""
    short: str
    """The text of a picture, without its image tokens."""
    begin_id: int
    image_id: int
    count: int
    """Image tokens, which stand behind the begin token."""
    reserved: tuple[str, ...]
    """Texts that only a picture may hold."""


_tokens_of: "WeakKeyDictionary[Any, ImageTokens | None]" = WeakKeyDictionary()
"""Of processors that have encoded a prompt in this process; None for those that encode them all."""


def encode_messages(
    processor: Any, messages: Messages, images: Sequence[Image.Image], *, as_bytes: bool = False
) -> Inputs:
    """``processor.apply_chat_template`` with a generation prompt, as tensors of one row.

    The first prompt of a process is encoded by the processor too; where the results differ, there
    is one warning and the processor encodes all others.

    Args:
        processor: of the checkpoint.
        messages: one conversation.
        images: its pictures, in their order.
        as_bytes: leave the pixels as they are, uint8, where all that the processor would do is
            to scale them; the model then does it.
    """
    if not images or not _is_plain(processor, images):
        return _encode_slowly(processor, messages)
    make_pixels = stack_pixels if as_bytes else scale_pixels
    if processor in _tokens_of:
        tokens = _tokens_of[processor]
        if tokens is None:
            return _encode_slowly(processor, messages)
        found = _encode_fast(processor, messages, tokens, len(images))
        if found is None:
            found = dict(_encode_slowly(processor, messages))
        return {**found, "pixel_values": make_pixels(images)}
    expected = dict(_encode_slowly(processor, messages))
    tokens = image_tokens(processor)
    found = None if tokens is None else _encode_fast(processor, messages, tokens, len(images))
    if found is not None:
        found = {**found, "pixel_values": scale_pixels(images)}
    if found is not None and not _is_equal(found, expected):
        logger.warning(
            "the processor encodes a prompt otherwise than is usual for Gemma 3; it will encode "
            "all prompts itself, which takes some 10 ms more per sample"
        )
        tokens = None
    _tokens_of[processor] = tokens
    if tokens is not None:
        expected["pixel_values"] = make_pixels(images)
    return expected


def encode_pictures(
    image_processor: Any, images: Sequence[Image.Image], *, as_bytes: bool = False
) -> Float[Tensor, "images 3 height width"] | UInt8[Tensor, "images 3 height width"]:
    """The pixels as the image processor gives them, in [-1, 1], or uint8 to be scaled to it."""
    if _only_scales(image_processor, images):
        return stack_pixels(images) if as_bytes else scale_pixels(images)
    return image_processor(list(images), return_tensors="pt")["pixel_values"]


def scale_pixels(images: Sequence[Image.Image]) -> Float[Tensor, "images 3 height width"]:
    """Pixels of RGB pictures of one size, 0 .. 255 as -1 .. 1."""
    width, height = images[0].size
    pixels = torch.empty((len(images), 3, height, width))
    for planes, image in zip(pixels.numpy(), images, strict=True):
        for channel, band in enumerate(image.split()):
            planes[channel] = np.asarray(band)
            planes[channel] -= HALF
            planes[channel] /= HALF
    return pixels


def stack_pixels(images: Sequence[Image.Image]) -> UInt8[Tensor, "images 3 height width"]:
    """Pixels of RGB pictures of one size; in memory the channels are last, as Pillow gives them."""
    width, height = images[0].size
    pixels = torch.empty((len(images), height, width, 3), dtype=torch.uint8)
    for rows, image in zip(pixels.numpy(), images, strict=True):
        rows[:] = np.asarray(image)
    return pixels.permute(0, 3, 1, 2)


def _encode_slowly(processor: Any, messages: Messages) -> Inputs:
    return processor.apply_chat_template(
        messages,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )


def _encode_fast(
    processor: "Gemma3Processor", messages: Messages, tokens: ImageTokens, num_images: int
) -> Inputs | None:
    """The tokens, or None where the text holds a picture's tokens that belong to no picture."""
    tokenizer = processor.tokenizer
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if text.count(tokens.placeholder) != num_images or any(t in text for t in tokens.reserved):
        return None
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    short = text.replace(tokens.placeholder, tokens.short)
    short_ids = _split(tokenizer, short, add_special_tokens=not has_bos)
    whole_ids = np.array(_insert_image_tokens(short_ids, tokens), dtype=np.int64)
    ids = torch.from_numpy(whole_ids)[None]  # torch.tensor takes four times as long for a list
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == tokens.image_id).long(),
    }


def _split(
    tokenizer: "PreTrainedTokenizerFast", text: str, *, add_special_tokens: bool
) -> list[int]:
    """``tokenizer(text)["input_ids"]``, without the layers that only prepare the splitter.

    They set what it then keeps: a length to cut or fill to, and whether special tokens are text.
    """
    splitter = tokenizer.backend_tokenizer
    if splitter.truncation or splitter.padding or splitter.encode_special_tokens:
        return tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    return splitter.encode(text, add_special_tokens=add_special_tokens).ids


def image_tokens(processor: "Gemma3Processor") -> ImageTokens | None:
    """The tokens of a picture; None where they are not added tokens that nothing else touches.

    A tokenizer cuts the text at added tokens before anything else, so the text on either side of
    them has the same tokens whatever stands between them.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = processor.tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    begin, image, end = tokenizer.boi_token, tokenizer.image_token, tokenizer.eoi_token
    whole, count = processor.full_image_sequence, processor.image_seq_length
    if f"{begin}{image * count}{end}" not in whole or whole.count(image) != count:
        return None
    added = tokenizer.added_tokens_decoder
    begin_id, image_id, end_id = tokenizer.convert_tokens_to_ids([begin, image, end])
    for number in (begin_id, image_id, end_id):
        token = added.get(number)
        if token is None or token.normalized or token.lstrip or token.rstrip or token.single_word:
            return None
    return ImageTokens(begin, whole.replace(image, ""), begin_id, image_id, count, (image, end))


def _insert_image_tokens(ids: Sequence[int], tokens: ImageTokens) -> list[int]:
    run = [tokens.image_id] * tokens.count
    whole: list[int] = []
    for number in ids:
        whole.append(number)
        if number == tokens.begin_id:
            whole += run
    return whole


def _is_plain(processor: Any, images: Sequence[Image.Image]) -> bool:
    from transformers import Gemma3Processor

    return type(processor) is Gemma3Processor and _only_scales(processor.image_processor, images)


def _only_scales(image_processor: Any, images: Sequence[Image.Image]) -> bool:
    """Whether all that happens to these pictures is that 0 .. 255 become -1 .. 1."""
    from transformers import Gemma3ImageProcessor

    if type(image_processor) is not Gemma3ImageProcessor or image_processor.do_pan_and_scan:
        return False
    moments = [*image_processor.image_mean, *image_processor.image_std]
    if not (image_processor.do_rescale and image_processor.do_normalize and moments == [0.5] * 6):
        return False
    size = (image_processor.size["width"], image_processor.size["height"])
    return image_processor.rescale_factor == 1 / 255 and all(
        isinstance(image, Image.Image) and image.mode == "RGB" and image.size == size
        for image in images
    )


def _is_equal(found: Inputs, expected: Inputs) -> bool:
    return set(found) == set(expected) and all(
        found[key].dtype == expected[key].dtype and torch.equal(found[key], expected[key])
        for key in found
    )
