"""How large a picture may be: looked up in its header, before a pixel is decoded."""

from typing import Final

MAX_PIXELS: Final = 50_000_000
"""8K video has 33 million."""
MAX_SIDE: Final = 10_000
"""Pictures are padded to squares: a picture of 1 x 50,000 pixels would take 7.5 GB."""


def size_fault(width: int, height: int) -> str | None:
    """What is wrong with a size in pixels, to stand behind the file's name; None if nothing is."""
    if width * height <= MAX_PIXELS and max(width, height) <= MAX_SIDE:
        return None
    return (
        f"has {width} x {height} pixels; at most {MAX_PIXELS} are read, and {MAX_SIDE} along a "
        "side, so make it smaller"
    )
