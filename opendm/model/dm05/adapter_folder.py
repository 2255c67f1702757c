"""The folder of an adapter: PEFT's files beside a note of which base it belongs to.

A path alone does not say which weights an adapter was trained on: the note holds their SHA-256.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

from opendm.errors import CheckpointError

logger = logging.getLogger(__name__)

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
BASE_FILE: Final = "base_model.json"
BASE_KEY: Final = "base_model_name_or_path"
MOVED: Final = (
    "if it was moved, say where it is: --model-config.lora-config.base-model in training, --base "
    "for `opendm merge`, base= in Python"
)
UNUSUAL: Final = {
    "use_dora": False, "use_rslora": False, "fan_in_fan_out": False, "rank_pattern": {},
    "alpha_pattern": {}, "target_parameters": None, "exclude_modules": None,
    "layers_to_transform": None, "trainable_token_indices": None, "lora_bias": False,
}  # fmt: skip
"""Options of PEFT that change what an adapter means, and what they are where they do not."""


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """Which weights an adapter was trained on."""

    path: str
    """Where they were."""
    sha256: str
    """Of their safetensors files, in order of their names; what ``sha256sum`` says of one file."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter that a model carries."""

    config: dict[str, Any]
    """Content of ``adapter_config.json``."""
    base: BaseRecord
    names: frozenset[str]
    """Parameters of the model that the adapter's file holds."""
    unread: frozenset[str]
    """Those among them that no loss depends on; they keep their first values."""


def is_adapter(folder: "str | PathLike[str]") -> bool:
    """Whether a folder holds an adapter instead of a full checkpoint."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """``adapter_config.json``.

    Raises:
        CheckpointError: it cannot be read, or is of a kind that OpenDM does not make.
    """
    path = folder / ADAPTER_CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; is the copy complete?") from error
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path} has peft_type {config.get('peft_type')!r}; OpenDM loads 'LORA'"
        )
    for key, usual in UNUSUAL.items():
        if config.get(key) and config[key] != usual:
            raise CheckpointError(f"{path}: {key} is {config[key]!r}, which OpenDM cannot load")
    for key in ("r", "lora_alpha", "target_modules"):
        if not config.get(key):
            raise CheckpointError(f"{path}: key {key!r} is missing or empty")
    if not isinstance(config["target_modules"], list):
        raise CheckpointError(f"{path}: target_modules must be a list of names")
    return config


def write_adapter_config(folder: Path, adapter: Adapter) -> None:
    """Write ``adapter_config.json`` and the note of the base."""
    for name, content in ((ADAPTER_CONFIG, adapter.config), (BASE_FILE, asdict(adapter.base))):
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def weights_hash(folder: "str | PathLike[str]") -> str:
    """SHA-256 over the safetensors files of a checkpoint, in order of their names."""
    from opendm.model.dm05.checkpoint_files import weight_files

    digest = hashlib.sha256()
    for path in sorted(weight_files(Path(folder))):
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def read_base_record(adapter: Path) -> BaseRecord | None:
    """The note of the base; None where there is none, as in adapters of other programs.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = adapter / BASE_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return BaseRecord(str(content["path"]), str(content["sha256"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}; is the copy complete?") from error


def find_base(adapter: Path, moved_to: "str | PathLike[str] | None" = None) -> Path:
    """The folder of an adapter's base; whether it is the right one, ``check_base`` says.

    Args:
        adapter: folder of the adapter.
        moved_to: where the base is now, if the user says so.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    named = moved_to or read_adapter_config(adapter).get(BASE_KEY)
    if not named:
        raise CheckpointError(
            f"{adapter / ADAPTER_CONFIG} names no base ({BASE_KEY}); give it: {MOVED}"
        )
    folder = Path(named)
    if is_adapter(folder):
        raise CheckpointError(f"{folder} is itself an adapter; the base is a full checkpoint")
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"the base {str(folder)!r} of the adapter {adapter} is not a checkpoint folder; {MOVED}"
        )
    return folder


def check_base(adapter: Path, base: Path, sha256: str | None = None) -> None:
    """Check that ``base`` holds the very weights that the adapter was trained on.

    Args:
        adapter: folder of the adapter.
        base: folder of the base.
        sha256: ``weights_hash`` of the base, where it is known already.

    Raises:
        CheckpointError: it does not.
    """
    record = read_base_record(adapter)
    if record is None:
        logger.warning(
            "%s has no %s: whether %s is its base cannot be checked", adapter, BASE_FILE, base
        )
        return
    found = sha256 or weights_hash(base)
    if found != record.sha256:
        raise CheckpointError(
            f"{base} is not the base of the adapter {adapter}: its weights have SHA-256 "
            f"{found[:12]}..., the adapter was trained on {record.sha256[:12]}... (then at "
            f"{record.path}). The weights there were replaced, altered or merged already; bring "
            f"the right base back, and {MOVED}"
        )
