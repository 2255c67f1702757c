"""A checkpoint folder of a few million random weights, made without a network.

It is laid out as a released checkpoint (same files, same tensor names) and loaded by the same code;
what differs is sizes. The demo trains it, and tests use it wherever they need a model.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import nn
from transformers import Gemma3ImageProcessor, Gemma3Processor, PreTrainedTokenizerFast

from opendm.model.dm05.checkpoint_files import use_portable_attention
from opendm.model.dm05.configuration import DM05Config
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration

IMAGE_SIZE: Final = 112
PATCH_SIZE: Final = 14
TOKENS_PER_IMAGE: Final = 16
VOCAB_SIZE: Final = 768


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """Pictures as the tiny model sees them, in pixels, and what it makes of one."""

    picture: int = IMAGE_SIZE
    patch: int = PATCH_SIZE
    tokens: int = TOKENS_PER_IMAGE
    """Soft tokens of a picture: the square of a divisor of its patches per side."""


@dataclass(frozen=True, slots=True)
class TinySize:
    """What may differ between tiny models."""

    images: ImageSizes = ImageSizes()
    mlp_ratio: int = 4
    """Width of a feed-forward layer in units of the model's."""
    whole_numbers: bool = False
    """One token for a number up to 255, and for a word that the tokenizer was trained on, for
    shorter prompts; otherwise digits stand alone, as in Gemma."""


SIZES: Final = {
    "demo": TinySize(),
    "sim": TinySize(ImageSizes(picture=96, patch=16, tokens=9), mlp_ratio=2, whole_numbers=True),
}
"""``sim`` is for pictures of a simulator that are rendered at 96 pixels."""

# The first ids are those of released tokenizers (padding, end, begin, unknown, ..., history).
RESERVED: Final = (
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "[multimodal]", "<unused0>", "<unused1>",
    "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>",
)  # fmt: skip

# Gemma's turn format: the template trims text items and puts the image token where an image stands.
CHAT_TEMPLATE: Final = """{{ bos_token }}
{%- for message in messages -%}
  {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
  {{ '<start_of_turn>' + role + '\n' }}
  {%- if message['content'] is string -%}
    {{ message['content'] | trim }}
  {%- else -%}
    {%- for item in message['content'] -%}
      {%- if item['type'] == 'image' -%}
        {{ '<start_of_image>' }}
      {%- elif item['type'] == 'text' -%}
        {{ item['text'] | trim }}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<start_of_turn>model\n' }}
{%- endif -%}
"""


def train_tokenizer(
    texts: Iterable[str], *, whole_numbers: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-fallback BPE tokenizer in Gemma's manner, trained on ``texts``."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", "merged_with_next"),
            pre_tokenizers.Split(Regex(r"[\n.]"), "isolated")
            if whole_numbers
            else pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
    ])  # fmt: skip
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1 if whole_numbers else 0,
        special_tokens=[*RESERVED, *byte_tokens],
        initial_alphabet=[chr(code) for code in range(33, 127)] + ["\n", "▁"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="right",
        additional_special_tokens=["<unused0>", "<unused1>", "<start_of_turn>", "<end_of_turn>"],
        extra_special_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        clean_up_tokenization_spaces=False,
    )


def build_processor(
    prompts: Iterable[str],
    images: ImageSizes = ImageSizes(),
    more_text: Iterable[str] = (),
    *,
    whole_numbers: bool = False,
) -> Gemma3Processor:
    """The Gemma 3 processor of the tiny checkpoint, its tokenizer trained on the texts."""
    digits = " ".join(str(number) for number in range(256))
    layout = [f"Overall speed: 0.5\nTask: {prompt}.\nHead image: States: " for prompt in prompts]
    image_processor = Gemma3ImageProcessor(
        size={"height": images.picture, "width": images.picture}, do_pan_and_scan=False
    )
    return Gemma3Processor(
        image_processor=image_processor,
        tokenizer=train_tokenizer(
            [digits, "user\nmodel\n", *layout, *more_text], whole_numbers=whole_numbers
        ),
        chat_template=CHAT_TEMPLATE,
        image_seq_length=images.tokens,
    )


def tiny_config(
    vocab_size: int,
    *,
    chunk_size: int = 50,
    num_layers: int = 4,
    hidden_size: int = 128,
    images: ImageSizes = ImageSizes(),
    mlp_ratio: int = 4,
) -> DM05Config:
    """Sizes of the tiny model: every kind of layer of the released one, in miniature."""
    kinds = itertools.cycle(("sliding_attention", "full_attention"))
    text: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": mlp_ratio * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "vocab_size": vocab_size,
        "sliding_window": 48,
        "layer_types": list(itertools.islice(kinds, num_layers)),
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": hidden_size,
        "intermediate_size": mlp_ratio * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "image_size": images.picture,
        "patch_size": images.patch,
        "vision_use_head": False,
    }
    return DM05Config(
        vlm_config={
            "text_config": text,
            "vision_config": vision,
            "mm_tokens_per_image": images.tokens,
            "boi_token_index": RESERVED.index("<start_of_image>"),
            "eoi_token_index": RESERVED.index("<end_of_image>"),
            "image_token_index": RESERVED.index("<image_soft_token>"),
        },
        action_config=dict(text),
        chunk_size=chunk_size,
    )


def random_model(config: DM05Config, seed: int = 0) -> DM05ForConditionalGeneration:
    """The model with random weights that let every input reach the output.

    Hugging Face starts the image projection at zero, which would make images dead.
    """
    use_portable_attention(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DM05ForConditionalGeneration(config)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        model._init_modulators()  # noqa: SLF001 - same family of initialisers
        projector = model.model.vlm.model.multi_modal_projector
        rows = projector.mm_input_projection_weight.shape[0]
        nn.init.normal_(projector.mm_input_projection_weight, std=rows**-0.5)
        width = config.vlm_config.text_config.hidden_size
        nn.init.normal_(model.language_model.embed_tokens.weight, std=1.0 / math.sqrt(width))
    return model


def build_tiny_checkpoint(
    folder: Path,
    prompts: Iterable[str],
    *,
    chunk_size: int = 50,
    seed: int = 0,
    size: TinySize = SIZES["demo"],
    more_text: Iterable[str] = (),
) -> Path:
    """Write the tiny checkpoint into ``folder`` (float32 weights) and return the folder.

    ``more_text`` is what else the tokenizer shall know: whole words make shorter prompts.
    """
    processor = build_processor(prompts, size.images, more_text, whole_numbers=size.whole_numbers)
    config = tiny_config(
        len(processor.tokenizer),
        chunk_size=chunk_size,
        images=size.images,
        mlp_ratio=size.mlp_ratio,
    )
    model = random_model(config, seed)
    model.save_pretrained(folder, dtype=torch.float32)
    processor.save_pretrained(folder)
    return folder
