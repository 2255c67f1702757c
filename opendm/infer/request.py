"""Requests of both routes, checked field by field: from bytes to an observation and a seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from PIL import Image

from opendm.infer.layout import PolicyLayout
from opendm.infer.limits import MAX_SEED, MAX_STATE, MAX_WORD, Limits, RequestError
from opendm.infer.observation import Observation
from opendm.infer.pictures import PictureReader, picture_bytes
from opendm.infer.strict_json import json_type, parse_object, parse_value

OBSERVATION_FIELDS: Final = (
    "prompt", "state", "images", "history_images", "robot_type", "speed", "control_mode",
)  # fmt: skip
WORDS: Final = ("robot_type", "speed", "control_mode")
FORM_FIELDS: Final = ("states", "text", "image", "history_images", *WORDS)


@dataclass(frozen=True, slots=True)
class Contract:
    """What requests are held against."""

    layout: PolicyLayout
    num_steps: int
    max_history_images: int
    shrink: Callable[[Image.Image], Image.Image]
    """What is kept of a picture while its request waits."""
    reserved: frozenset[str] = frozenset()
    """Tokens of the checkpoint that no text of a request may hold."""
    limits: Limits = field(default_factory=Limits)
    seed: int | None = None
    """Of every request's noise, whatever it asks for; None leaves it to the requests."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One observation to act on."""

    observation: Observation
    seed: int | None
    """Of the noise; None means a fresh one."""


def parse_infer(body: bytes, contract: Contract) -> Request:
    """A request of ``/v1/infer``.

    Raises:
        RequestError: something is wrong with it; the message names the field.
    """
    root = parse_object(body)
    _check_names(root, ("observation", "sampling"), "")
    fields = root.get("observation")
    if not isinstance(fields, dict):
        given = json_type(fields) if "observation" in root else "missing"
        raise RequestError(f"observation is {given}; expected an object")
    _check_names(fields, OBSERVATION_FIELDS, "observation.")
    images, history = fields.get("images"), fields.get("history_images", [])
    if not isinstance(images, dict):
        raise RequestError("observation.images is missing or not an object of base64 pictures")
    if not isinstance(history, list):
        raise RequestError("observation.history_images is not an array of base64 pictures")
    wanted = [str(number) for number in range(1, len(images) + 1)]
    if sorted(images) != sorted(wanted):
        raise RequestError(
            f"observation.images has keys {_shown(images)}; expected '1', '2', ... in one run"
        )
    seed = _sampling(root.get("sampling", {}), contract)
    words = {name: fields.get(name) for name in ("prompt", *WORDS)}
    files = [picture_bytes(images[key], f"observation.images[{key!r}]") for key in wanted]
    past = [picture_bytes(one, f"history_images[{i}]") for i, one in enumerate(history)]
    return Request(_observation(words, fields.get("state"), files, past, contract), seed)


def parse_form(
    texts: Mapping[str, str],
    images: Sequence[bytes],
    history: Sequence[bytes],
    contract: Contract,
) -> Request:
    """A request of ``/process_frame``, whose form is split into its parts already.

    Raises:
        RequestError: something is wrong with it; the message names the field.
    """
    if "states" not in texts:
        raise RequestError("the form has no field 'states'; expected a JSON array of numbers")
    words = {name: texts.get(name) for name in WORDS}
    words["prompt"] = texts.get("text")
    return Request(_observation(words, texts["states"], images, history, contract), contract.seed)


def _observation(
    words: Mapping[str, Any],
    state: Any,
    images: Sequence[bytes],
    history: Sequence[bytes],
    contract: Contract,
) -> Observation:
    limits = contract.limits
    prompt = "" if words["prompt"] is None else words["prompt"]
    check_text(prompt, "prompt", limits.max_prompt_chars, reserved=contract.reserved)
    for name in WORDS:
        if words[name] is not None:
            check_text(words[name], name, MAX_WORD, allowed="", reserved=contract.reserved)
    robots = contract.layout.robot_types()
    if words["robot_type"] is not None and words["robot_type"] not in robots:
        raise RequestError(f"robot_type is unknown; allowed: {robots}")
    layout = contract.layout.for_robot(words["robot_type"])
    size = None if layout.state_desc is None else len(layout.state_desc)
    numbers = check_state(state, size)
    if len(images) != len(layout.image_keys):
        raise RequestError(
            f"{len(images)} images; the policy needs {len(layout.image_keys)}: "
            f"{layout.image_prompts}"
        )
    if history and not layout.is_history:
        raise RequestError("history_images: this checkpoint was trained without history")
    if len(history) > contract.max_history_images:
        raise RequestError(
            f"{len(history)} history_images; at most {contract.max_history_images} are taken"
        )
    reader = PictureReader(limits)
    views = [
        contract.shrink(reader.read(file, f"image {i}")) for i, file in enumerate(images, start=1)
    ]
    past = [
        contract.shrink(reader.read(file, f"history image {i}"))
        for i, file in enumerate(history, start=1)
    ]
    return Observation(
        state=numbers,
        images=dict(zip(layout.image_keys, views, strict=True)),
        prompt=prompt,
        robot_type=words["robot_type"],
        speed=words["speed"],
        control_mode=words["control_mode"],
        history_images=past,
    )


def check_text(
    value: Any,
    name: str,
    max_chars: int,
    *,
    allowed: str = "\n\t",
    reserved: frozenset[str] = frozenset(),
) -> None:
    """Refuse what is no text that can stand in a prompt.

    Raises:
        RequestError: not a string, too long, or with control characters, half a surrogate pair or
            a reserved token.
    """
    if not isinstance(value, str):
        raise RequestError(f"{name} is a JSON {json_type(value)}; expected a string")
    if len(value) > max_chars:
        raise RequestError(f"{name} has {len(value)} characters, the limit is {max_chars}")
    for index, char in enumerate(value):
        if (ord(char) < 32 or 0x7F <= ord(char) < 0xA0) and char not in allowed:
            raise RequestError(f"{name} has a control character at {index}")
        if 0xD800 <= ord(char) < 0xE000:
            raise RequestError(f"{name} has half a surrogate pair at {index}")
    if found := [token for token in reserved if token in value]:
        raise RequestError(f"{name} holds the reserved token {min(found)!r}")


def check_state(value: Any, size: int | None) -> list[float]:
    """The numbers of a state, from an array or from JSON text of one.

    Raises:
        RequestError: another form or length, or a value that is no usable number; names its index.
    """
    expected = "numbers" if size is None else f"{size} numbers"
    if isinstance(value, str):
        value = parse_value(value.encode("utf-8", "surrogatepass"))
    if not isinstance(value, list):
        given = "missing" if value is None else f"a JSON {json_type(value)}"
        raise RequestError(f"state is {given}; expected an array of {expected}")
    if not value or (size is not None and len(value) != size):
        raise RequestError(f"state has {len(value)} values; expected {expected}")
    for index, number in enumerate(value):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise RequestError(f"state[{index}] is a JSON {json_type(number)}; expected a number")
        if not math.isfinite(number) or abs(number) > MAX_STATE:
            raise RequestError(
                f"state[{index}] is not finite or beyond {MAX_STATE:.0e}; expected a plain number"
            )
    return [float(number) for number in value]


def _sampling(fields: Any, contract: Contract) -> int | None:
    if not isinstance(fields, dict):
        raise RequestError(f"sampling is a JSON {json_type(fields)}; expected an object")
    _check_names(fields, ("num_steps", "seed"), "sampling.")
    steps = fields.get("num_steps", contract.num_steps)
    if type(steps) is not int or steps != contract.num_steps:
        raise RequestError(
            f"sampling.num_steps must be the integer {contract.num_steps} on this service"
        )
    seed = fields.get("seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed <= MAX_SEED):
        raise RequestError(f"sampling.seed must be an integer from 0 to {MAX_SEED}")
    return seed if contract.seed is None else contract.seed


def _check_names(fields: Mapping[str, Any], allowed: Sequence[str], prefix: str) -> None:
    unknown = [name for name in fields if name not in allowed]
    if unknown:
        raise RequestError(
            f"unknown field {_shown([prefix + unknown[0]])}; allowed: {', '.join(allowed)}"
        )


def _shown(names: "Sequence[str] | Mapping[str, Any]") -> str:
    """A few names, short and without control characters."""
    return ", ".join(f"{name[:40]!a}" for name in list(names)[:4])
