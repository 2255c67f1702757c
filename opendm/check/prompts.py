"""Tasks against the token limit, and the cameras that are there against those expected."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from PIL import Image

from opendm.check.problem import Problem
from opendm.constants.robot import HISTORY_PAD_TOKEN, HISTORY_TOKEN
from opendm.data.processor import image_size
from opendm.data.transforms.prompt import ChatTokenization
from opendm.errors import DataError

NO_LIMIT: Final = 1 << 30
EXACT: Final = 8
"""Longest tasks that are encoded whole; the others are estimated from their own tokens."""
NUM_BINS: Final = 8
"""Bars of the histogram."""


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What of a prompt is the same for all tasks."""

    image_prompts: Sequence[str]
    state_size: int
    n_bins: int
    max_length: int
    meta: Mapping[str, Any]
    """Robot type, control mode and speed of the registration."""
    add_state: bool = True
    is_history: bool = False


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """Tokens of the prompts of a dataset, for the longest states."""

    lengths: dict[str, int]
    """By task."""
    without_task: int
    """Tokens of a prompt but for its task."""
    limit: int

    @property
    def longest(self) -> str:
        """The task of the longest prompt."""
        return max(self.lengths, key=lambda task: (self.lengths[task], task))

    def histogram(self) -> list[tuple[int, int, int]]:
        """Bars as (first, last, number of tasks)."""
        values = np.array(list(self.lengths.values()))
        low = int(values.min())
        step = -(-(int(values.max()) - low + 1) // NUM_BINS)
        counts = np.bincount((values - low) // step)
        return [
            (low + step * bar, low + step * (bar + 1) - 1, int(count))
            for bar, count in enumerate(counts)
            if count
        ]


def measure_tokens(tasks: Sequence[str], processor: Any, shape: PromptShape) -> TokenLengths:
    """Prompt lengths of the different tasks, with as many digits in the states as there can be.

    Raises:
        DataError: a task holds a reserved token.
    """
    encode = ChatTokenization(
        processor,
        shape.n_bins,
        NO_LIMIT,
        shape.image_prompts,
        add_state=shape.add_state,
        is_history=shape.is_history,
    )
    size = image_size(processor)
    view = Image.new("RGB", (size, size))

    def whole(task: str) -> int:
        sample = {
            "prompt": task,
            "images": [view] * len(shape.image_prompts),
            "state": np.ones(shape.state_size),
            "meta_data": dict(shape.meta),
        }
        return len(encode(sample)["input_ids"])

    own = {
        task: len(ids)
        for task, ids in zip(
            tasks, processor.tokenizer(list(tasks), add_special_tokens=False)["input_ids"],
            strict=True,
        )
    }  # fmt: skip
    ranked = sorted(own, key=lambda task: own[task])
    exact = {task: whole(task) for task in {*ranked[:1], *ranked[-EXACT:]}}
    rest = exact[ranked[0]] - own[ranked[0]]
    lengths = {task: exact.get(task, own[task] + rest) for task in tasks}
    return TokenLengths(lengths, rest, shape.max_length)


def check_prompts(
    places: Mapping[str, str], processor: Any, shape: PromptShape
) -> tuple[list[Problem], TokenLengths | None]:
    """Findings about the tasks, and the lengths of those that can be encoded.

    Args:
        places: task to ``file:line`` of its first frame.
        processor: of the checkpoint.
        shape: the rest of the prompt.
    """
    reserved = {HISTORY_TOKEN, HISTORY_PAD_TOKEN, *processor.tokenizer.all_special_tokens}
    problems, tasks = [], []
    for task, where in places.items():
        found = sorted(token for token in reserved if token in task)
        if found:
            reason = f"holds the reserved token {found[0]!r}; remove it"
            problems.append(Problem(where, "prompt", reason, code="reserved_token"))
        else:
            tasks.append(task)
    if not tasks:
        return problems, None
    try:
        tokens = measure_tokens(tasks, processor, shape)
    except DataError as error:
        return [*problems, Problem(places[tasks[0]], "prompt", str(error), code="prompt")], None
    long = [task for task in tasks if tokens.lengths[task] > shape.max_length]
    for task in long:
        reason = (
            f"makes {tokens.lengths[task]} tokens, the limit is {shape.max_length}; the task is "
            "shortened, pictures and states are not. Raise --trainer-config.model-max-length"
        )
        problems.append(Problem(places[task], "prompt", reason, "warning", "prompt_tokens"))
    if tokens.without_task >= shape.max_length:
        reason = (
            f"is too long: pictures and state alone need {tokens.without_task} tokens, the limit "
            f"is {shape.max_length}; give fewer cameras or a higher limit"
        )
        problems.append(
            Problem("--trainer-config.model-max-length", "prompt", reason, code="prompt_limit")
        )
    return problems, tokens


def check_cameras(
    expected: Sequence[str], found: Mapping[str, int], num_records: int, where: str
) -> Iterator[Problem]:
    """Cameras that no record has, and cameras that nobody asked for.

    Args:
        expected: the registration's image keys.
        found: fields that refer to pictures, and in how many records.
        num_records: of the dataset.
        where: the dataset's name.
    """
    free = [key for key in found if key not in expected]
    for key in expected:
        if num_records and not found.get(key):
            near = difflib.get_close_matches(key, free, n=1, cutoff=0.0)
            hint = f"; is it {near[0]!r}? Write that into image_keys" if near else ""
            reason = f"is in none of {num_records} records; they have {sorted(found)}{hint}"
            yield Problem(where, key, reason, code="camera_unknown")
    for key in free:
        reason = f"refers to pictures in {found[key]} records and is not in image_keys; not used"
        yield Problem(where, key, reason, "warning", "camera_unused")
