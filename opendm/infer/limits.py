"""Limits of the service: what a request may hold, and how long it may take."""

from dataclasses import dataclass
from typing import Final

from opendm.errors import OpenDMError

MAX_JSON_SEPARATORS: Final = 10_000
"""Commas in a JSON body: parsed values take far more memory than their text."""
MAX_JSON_CONTAINERS: Final = 1_000
"""Opening brackets and braces in a JSON body."""
MAX_NUMBER_DIGITS: Final = 20
"""Longer integers are read as floating point numbers."""
MAX_STATE: Final = 1e6
"""Largest absolute value of a state, in any unit; float32 still resolves 0.06 there."""
MAX_WORD: Final = 64
"""Characters of robot_type, speed and control_mode."""
MAX_SEED: Final = 2**64 - 1
MAX_FORM_PARTS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request may hold, and how long it may take."""

    max_body_bytes: int = 16 * 2**20
    max_buffered_bytes: int = 256 * 2**20
    """Of all bodies that are being read or worked on at once."""
    max_image_pixels: int = 2048**2
    """Square of the longer side: pictures are padded to squares."""
    max_request_pixels: int = 3 * 2048**2
    """Of all pictures of a request, each counted as a square."""
    max_prompt_chars: int = 2_000
    body_timeout_s: float = 10.0


class RequestError(OpenDMError):
    """A request is wrong; the message may be shown to whoever sent it."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
