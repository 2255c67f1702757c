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
    manifest: str = ""
    """Compare all files with this manifest (see write-manifest, or of sha256sum)."""
    write_manifest: str = ""
    """Write size and SHA-256 of all files into this one, if no error was found."""
    strict: bool = False
    """Let warnings stop a run, too."""
