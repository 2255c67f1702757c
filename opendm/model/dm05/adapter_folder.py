"""The folder of an adapter: PEFT's files beside a note of which base it belongs to.

A path alone does not say which weights an adapter was trained on: the note holds their SHA-256, and
that of the adapter's own files, which are compared wherever these are read.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

from opendm.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
BASE_FILE: Final = "base_model.json"
FULL_WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json")
"""What a full checkpoint has; named here for a process that imports no framework."""
BASE_KEY: Final = "base_model_name_or_path"
MOVED: Final = (
    "if it was moved, say where it is: --model-config.lora-config.base-model in training and "
    "serving, --base for `opendm merge`, base= in Python"
)
MODEL_CONFIG: Final = "config.json"
BIASES: Final = ("none", "all", "lora_only")
KNOWN: Final = frozenset({
    "peft_type", "peft_version", "task_type", "auto_mapping", "revision", "inference_mode",
    BASE_KEY, "r", "lora_alpha", "lora_dropout", "bias", "target_modules", "modules_to_save",
    "init_lora_weights", "megatron_core", "qalora_group_size", "layers_pattern", "loftq_config",
})  # fmt: skip
"""Options of PEFT that are read here, or mean nothing alone; every other one must be off."""
PLAIN_STARTS: Final = (True, False, None, "gaussian", "orthogonal")
"""First values of factors that leave the base as it is; pissa, olora and others change it."""


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """Which weights an adapter was trained on."""

    path: str
    """Where they were."""
    sha256: str
    """Of their safetensors files, in order of their names; what ``sha256sum`` says of one file."""
    config_sha256: str
    """Of their ``config.json``."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the adapter's own files, once written; see :func:`own_hashes`."""


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
    """Whether a folder holds an adapter instead of a full checkpoint.

    Raises:
        CheckpointError: it holds both, of which each could be meant.
    """
    note = Path(folder) / ADAPTER_CONFIG
    if not note.is_file():
        return False
    if full := full_weights(folder):
        raise CheckpointError(
            f"{folder} holds an adapter ({note.name}) and a full checkpoint ({full.name}), and "
            f"either could be meant; move the files of one into a folder of its own: an adapter's "
            f"are {ADAPTER_CONFIG}, {ADAPTER_WEIGHTS} and {BASE_FILE}"
        )
    return True


def full_weights(folder: "str | PathLike[str]") -> Path | None:
    """A file of a full checkpoint's weights in ``folder``, or None."""
    return next((p for name in FULL_WEIGHTS if (p := Path(folder) / name).is_file()), None)


def check_output_folder(folder: "str | PathLike[str]", *, use_lora: bool) -> None:
    """Refuse a folder that the final weights of a run would make one of both kinds.

    Args:
        folder: where a run writes; it need not exist.
        use_lora: whether that run trains an adapter.

    Raises:
        ConfigError: a file of the other kind is there.
    """
    note = Path(folder) / ADAPTER_CONFIG
    found = full_weights(folder) if use_lora else note if note.is_file() else None
    if found is not None:
        kinds = ("a full checkpoint", "an adapter")
        there, written = kinds if use_lora else reversed(kinds)
        raise ConfigError(
            f"--trainer-config.output-dir {folder} holds {there} ({found.name}), and this run "
            f"(--use-lora {use_lora}) writes {written}: nobody could tell which is meant; name "
            "another folder"
        )


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """``adapter_config.json``.

    Raises:
        CheckpointError: it cannot be read, is of a kind that OpenDM does not make, or was altered,
            as ``config.json`` beside it.
    """
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; is the copy complete?") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} has no peft_type 'LORA', which is what OpenDM loads")
    _check_values(config, path)
    check_own_file(folder, ADAPTER_CONFIG, _content_hash(config))
    check_own_file(folder, MODEL_CONFIG, _hash_if_there(folder / MODEL_CONFIG))
    return config


def _check_values(config: dict[str, Any], path: Path) -> None:
    names, saved = config.get("target_modules"), config.get("modules_to_save") or []
    rank, alpha = config.get("r"), config.get("lora_alpha")
    for key, is_right, allowed in (
        ("r", type(rank) is int and rank >= 1, "a whole number from 1"),
        ("lora_alpha", type(alpha) in (int, float) and alpha > 0, "a number above 0"),
        ("bias", config.get("bias", "none") in BIASES, ", ".join(BIASES)),
        ("target_modules", bool(names) and _are_names(names), "a list of names"),
        ("modules_to_save", _are_names(saved), "null or a list of names"),
        ("init_lora_weights", config.get("init_lora_weights") in PLAIN_STARTS,
         "true, false, gaussian, orthogonal"),
    ):  # fmt: skip
        if not is_right:
            raise CheckpointError(f"{path}: {key} is {config.get(key)!r}; OpenDM loads {allowed}")
    for key in sorted(config.keys() - KNOWN):
        if config[key]:
            raise CheckpointError(f"{path}: {key} is {config[key]!r}, which OpenDM cannot load")


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def write_adapter_config(folder: Path, adapter: Adapter) -> None:
    """Write ``adapter_config.json``."""
    _write_json(folder / ADAPTER_CONFIG, adapter.config)


def write_base_record(folder: Path, adapter: Adapter) -> None:
    """Write the note of the base, last: it has the hashes of the adapter's files."""
    _write_json(
        folder / BASE_FILE, asdict(replace(adapter.base, files=own_hashes(folder, adapter)))
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def own_hashes(folder: Path, adapter: Adapter) -> dict[str, str]:
    """SHA-256 of the files that say what an adapter computes.

    Of ``adapter_config.json`` it is the content's, without the base's path: that may be corrected.
    """
    return {
        ADAPTER_CONFIG: _content_hash(adapter.config),
        ADAPTER_WEIGHTS: file_hash(folder / ADAPTER_WEIGHTS),
        MODEL_CONFIG: file_hash(folder / MODEL_CONFIG),
    }


def check_own_file(adapter: Path, name: str, sha256: str | None) -> None:
    """Check one of an adapter's files against the note; without a note there is nothing to check.

    Args:
        adapter: folder of the adapter.
        name: of the file.
        sha256: what it is now; None where the file is missing.

    Raises:
        CheckpointError: it is another than was written.
    """
    record = read_base_record(adapter)
    if record is not None and record.files.get(name) != sha256:
        raise CheckpointError(
            f"{adapter / name} is not as it was written (its SHA-256 is not the one in "
            f"{BASE_FILE}): it was altered, exchanged or copied in part; copy the adapter again"
        )


def _content_hash(config: dict[str, Any]) -> str:
    content = {key: value for key, value in config.items() if key != BASE_KEY}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _hash_if_there(path: Path) -> str | None:
    return file_hash(path) if path.is_file() else None


def file_hash(*paths: Path) -> str:
    """SHA-256 over files, one after the other.

    Raises:
        CheckpointError: one cannot be read.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 24):
                    digest.update(block)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}; is the copy complete?"
            ) from error
    return digest.hexdigest()


def weights_hash(folder: "str | PathLike[str]") -> str:
    """SHA-256 over the safetensors files of a checkpoint, in order of their names."""
    from opendm.model.dm05.checkpoint_files import weight_files

    return file_hash(*sorted(weight_files(Path(folder))))


def read_base_record(adapter: Path) -> BaseRecord | None:
    """The note of the base; None where there is none, as in adapters of other programs.

    Raises:
        CheckpointError: it cannot be read, or OpenDM wrote one and it is gone.
    """
    path = adapter / BASE_FILE
    if not path.is_file():
        if not (adapter / MODEL_CONFIG).is_file():
            return None
        raise CheckpointError(
            f"{adapter} has a {MODEL_CONFIG}, as OpenDM's adapters, and no {BASE_FILE}: is the "
            f"copy complete? An adapter of another program is read without either; move its "
            f"{MODEL_CONFIG} away"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return BaseRecord(
            str(content["path"]),
            str(content["sha256"]),
            str(content["config_sha256"]),
            dict(content["files"]),
        )
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
    """Check that ``base`` holds the very weights and configuration that the adapter was trained on.

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
            "%s has no %s: whether %s is its base, and whether it was altered, cannot be checked",
            adapter, BASE_FILE, base,
        )  # fmt: skip
        return
    if file_hash(base / MODEL_CONFIG) != record.config_sha256:
        raise CheckpointError(
            f"{base} is not the base of the adapter {adapter}: its {MODEL_CONFIG} was altered "
            f"since training; bring the right base back, and {MOVED}"
        )
    found = sha256 or weights_hash(base)
    if found != record.sha256:
        raise CheckpointError(
            f"{base} is not the base of the adapter {adapter}: its weights have SHA-256 "
            f"{found[:12]}..., the adapter was trained on {record.sha256[:12]}... (then at "
            f"{record.path}). The weights there were replaced, altered or merged already; bring "
            f"the right base back, and {MOVED}"
        )
