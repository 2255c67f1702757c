"""The prompt: a user message of text and pictures, as token ids and pixels."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from opendm.constants.robot import (
    HISTORY_PAD_TOKEN,
    HISTORY_TOKEN,
    HISTORY_TOKEN_ID,
    HISTORY_TOKENS_PER_IMAGE,
)
from opendm.data.dataset import Sample
from opendm.data.norm_stats_job import robot_name
from opendm.data.transforms.prompt_encoding import encode_messages, encode_pictures
from opendm.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

PROMPT_LAYOUT_VERSION: Final = 1
"""Raised whenever the same inputs give other tokens."""

DEFAULT_SPEED: Final = "0.5"
SENTENCE_ENDS: Final = (".", "!", "?", "。", "！", "？")  # fmt: skip
EEF_SHORT: Final = ("eef", "ee")
SPARE_TOKENS: Final = 16
"""Tokens that a shortening removes beyond what is too much."""

Messages = list[dict[str, Any]]


def discretize_state(state: np.ndarray, n_bins: int) -> list[int]:
    """Bins 0 .. n_bins-1 of normalised values, computed in float32.

    Raises:
        DataError: a value is not finite.
    """
    values = np.asarray(state, dtype=np.float32).reshape(-1)
    if not np.isfinite(values).all():
        raise DataError(f"the normalised state {values.tolist()} is not finite; check the state")
    scaled = (np.clip(values, -1, 1) + np.float32(1)) / np.float32(2) * np.float32(n_bins - 1)
    return np.clip(np.floor(scaled), 0, n_bins - 1).astype(np.int64).tolist()


def task_sentence(prompt: str) -> str:
    """The task with a period, unless it ends in a sentence's mark already."""
    return prompt if prompt.rstrip().endswith(SENTENCE_ENDS) else f"{prompt}."


def history_text(valid: int, slots: int) -> str:
    """Placeholders of a history with ``valid`` pictures in ``slots`` slots."""
    empty = HISTORY_PAD_TOKEN * (HISTORY_TOKENS_PER_IMAGE * (slots - valid))
    return "History images: " + empty + (HISTORY_TOKEN * HISTORY_TOKENS_PER_IMAGE + "\n") * valid


def build_messages(
    prompt: str,
    images: Sequence[Image.Image],
    image_prompts: Sequence[str],
    *,
    robot_type: str | None = None,
    control_mode: str | None = None,
    speed: str | None = None,
    state_bins: Sequence[int] | None = None,
    num_history: int | None = None,
    max_history_images: int = 32,
) -> Messages:
    """The message of a request.

    Args:
        prompt: the task.
        images: the current views.
        image_prompts: one label per view.
        robot_type: written when given.
        control_mode: written when given; ``eef`` and ``ee`` as ``end effector``.
        speed: written always, ``0.5`` when not given.
        state_bins: written last when given.
        num_history: pictures in the history; None for a prompt without history.
        max_history_images: slots of the history.
    """
    text = f"Robot: {robot_type}\n" if robot_type else ""
    if control_mode:
        is_short = control_mode.lower() in EEF_SHORT
        text += f"Control mode: {'end effector' if is_short else control_mode}\n"
    text += f"Overall speed: {speed or DEFAULT_SPEED}\nTask: {task_sentence(prompt)}\n"
    if num_history is not None:
        text += history_text(num_history, max_history_images)
    content: list[dict[str, Any]] = []
    for image, label in zip(images, image_prompts, strict=True):
        content.append({"type": "text", "text": f"{text}{label} image: "})
        content.append({"type": "image", "image": image})
        text = ""
    if text:
        content.append({"type": "text", "text": text})
    if state_bins is not None:
        content.append({"type": "text", "text": "States: " + " ".join(map(str, state_bins))})
    return [{"role": "user", "content": content}]


class ChatTokenization:
    """Make the model's inputs of one sample: a new dict of token ids, pixels and targets.

    The task is shortened where the prompt has more than ``max_length`` tokens; pictures, states and
    the generation prompt are never cut.

    Args:
        processor: of the checkpoint.
        n_bins: bins of a state value.
        max_length: most tokens of a prompt.
        image_prompts: one label per view; ``Camera 1``, ``Camera 2``, ... when not given.
        add_state: whether the state is part of the prompt.
        is_history: whether the prompt has history slots.
        max_history_images: their number.
        enable_logging: log the text of every prompt.
        as_bytes: leave pixels uint8 where the processor would only scale them to [-1, 1]; the
            model does, and a batch is a quarter as large on its way.
    """

    def __init__(  # noqa: PLR0917 - public signature
        self,
        processor: Any,
        n_bins: int = 256,
        max_length: int = 1024,
        image_prompts: Sequence[str] | None = None,
        add_state: bool = True,  # noqa: FBT001, FBT002 - public signature
        is_history: bool = False,  # noqa: FBT001, FBT002 - public signature
        max_history_images: int = 32,
        enable_logging: bool = False,  # noqa: FBT001, FBT002 - public signature
        *,
        as_bytes: bool = False,
    ) -> None:
        if n_bins < 2:
            raise ConfigError(f"--data-config.n-bins {n_bins} is too small; give 2 or more")
        self.processor = processor
        self.n_bins = n_bins
        self.max_length = max_length
        self.image_prompts = None if image_prompts is None else tuple(image_prompts)
        self.add_state = add_state
        self.is_history = is_history
        self.max_history_images = max_history_images
        self.enable_logging = enable_logging
        self.as_bytes = as_bytes
        special = processor.tokenizer.all_special_tokens
        self.reserved = sorted({HISTORY_TOKEN, HISTORY_PAD_TOKEN, *special})

    def __call__(self, sample: Sample) -> Sample:
        """The inputs; ``history_*`` are None without history, ``action*`` where not given."""
        history = list(sample.get("history_images") or ()) if self.is_history else []
        fields = self._message_fields(sample, len(history))
        inputs = self._encode_within_limit(fields)
        ids = inputs["input_ids"][0]
        is_history_token = ids == HISTORY_TOKEN_ID
        token_types = inputs["token_type_ids"][0].clone()
        token_types[is_history_token] = 1
        return {
            "action": _tensor(sample.get("action")),
            "action_mask": _tensor(sample.get("action_mask")),
            "input_ids": ids,
            "attention_mask": inputs["attention_mask"][0],
            "token_type_ids": token_types,
            "pixel_values": inputs.get("pixel_values"),
            "history_pixel_values": (
                encode_pictures(self.processor.image_processor, history, as_bytes=self.as_bytes)
                if history
                else None
            ),
            "history_mask": is_history_token if self.is_history else None,
        }

    def _message_fields(self, sample: Sample, num_history: int) -> dict[str, Any]:
        """Arguments of :func:`build_messages`.

        Raises:
            DataError: the sample lacks something, or has too much of it.
        """
        images = sample["images"]
        labels = self.image_prompts or [f"Camera {i}" for i in range(1, len(images) + 1)]
        if len(labels) != len(images):
            raise DataError(
                f"{len(images)} images for {len(labels)} image_prompts {list(labels)}; give one "
                "image per prompt"
            )
        if num_history > self.max_history_images:
            raise DataError(
                f"{num_history} history images for {self.max_history_images} slots; give the "
                "newest ones only"
            )
        meta = sample["meta_data"]
        if not isinstance(meta.get("speed") or "", str):
            raise DataError(f"speed is {meta['speed']!r}; expected a string such as '0.5'")
        return {
            "prompt": self._check_prompt(sample.get("prompt")),
            "images": images,
            "image_prompts": labels,
            "robot_type": robot_name(meta.get("robot_type")),
            "control_mode": meta.get("control_mode"),
            "speed": meta.get("speed"),
            "state_bins": self._state_bins(sample),
            "num_history": num_history if self.is_history else None,
            "max_history_images": self.max_history_images,
        }

    def _state_bins(self, sample: Sample) -> list[int] | None:
        return discretize_state(sample["state"], self.n_bins) if self.add_state else None

    def _check_prompt(self, prompt: object) -> str:
        if not isinstance(prompt, str):
            raise DataError(f"prompt is {prompt!r:.60}; expected the task as a string")
        for token in self.reserved:
            if token in prompt:
                raise DataError(f"prompt holds the reserved token {token!r}; remove it: {prompt!r}")
        return prompt

    def _encode(self, fields: dict[str, Any]) -> Mapping[str, torch.Tensor]:
        messages = build_messages(**fields)
        if self.enable_logging:
            texts = [item.get("text", "<image>") for item in messages[0]["content"]]
            logger.info("prompt: %r", "".join(texts))
        return encode_messages(self.processor, messages, fields["images"], as_bytes=self.as_bytes)

    def _encode_within_limit(self, fields: dict[str, Any]) -> Mapping[str, torch.Tensor]:
        """Encode, shortening the task as long as the prompt is too long.

        Raises:
            DataError: everything but the task is too long already.
        """
        inputs = self._encode(fields)
        length = inputs["input_ids"].shape[1]
        if length <= self.max_length:
            return inputs
        tokenizer = self.processor.tokenizer
        task_ids = tokenizer(fields["prompt"], add_special_tokens=False)["input_ids"]
        while length > self.max_length:
            if len(task_ids) <= 1:
                raise DataError(
                    f"the prompt has {length} tokens without its task, the limit is "
                    f"{self.max_length}; raise --trainer-config.model-max-length, or use fewer "
                    "images"
                )
            keep = max(1, len(task_ids) - (length - self.max_length) - SPARE_TOKENS)
            task_ids = task_ids[:keep]
            text = tokenizer.decode(task_ids, skip_special_tokens=True).rstrip("\ufffd")
            inputs = self._encode({**fields, "prompt": text})
            length = inputs["input_ids"].shape[1]
        return inputs


def _tensor(values: "np.ndarray | torch.Tensor | None") -> torch.Tensor | None:
    return None if values is None else torch.as_tensor(values)
