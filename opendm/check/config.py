"""``--check-config.*``: how closely ``opendm check`` looks."""

from dataclasses import dataclass


@dataclass
class DM05CheckConfig:
    """The check before training."""

    json_path: str = ""
    """File to write all findings to, as JSON; empty writes none."""
    model: bool = True
    """Put one batch through the model, in ``opendm check``."""
    decode: bool = False
    """Decode every picture and video, not only their headers."""
    strict: bool = False
    """Let warnings stop a run, too."""
