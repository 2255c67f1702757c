"""The registry of datasets, filled by the catalogue files of this folder and of the user's own.

Every ``*.py`` of ``opendm/dataset`` and of the folders in ``OPENDM_DATA_PATH`` is imported once,
under a module name made from its full path, so that two files of one name cannot shadow each other.
"""

import difflib
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from opendm.constants.robot import ActionMode
from opendm.errors import ConfigError
from opendm.runtime import data_paths

CONVERSATION_DATA: Final[dict[str, dict[str, Any]]] = {}
"""Registered datasets: name to fields (``jsonl_dir``, ``image_dir``, ``image_keys``, ...)."""

REQUIRED_FIELDS: Final = ("jsonl_dir", "image_dir", "image_keys", "image_prompts")
OPTIONAL_FIELDS: Final = (
    "state_desc", "robot_type", "speed", "control_mode", "fps",
    "columns", "action_mode", "episodes", "angle_dims",
)  # fmt: skip
"""``columns``: which features of a LeRobot dataset are state, action and cameras. ``action_mode``:
"relative" or "absolute", where only one is right. ``episodes``: numbers of those that are used.
``angle_dims``: numbers of dimensions in radians, whose relative actions are at most half a turn."""

PROMPT_FIELDS: Final = ("robot_type", "control_mode", "speed", "image_prompts")
"""Fields whose words stand in every prompt."""
MARKER: Final = re.compile(r"<\w+>|\[multimodal\]")
"""What the special tokens of Gemma 3's vocabulary look like, such as ``<end_of_turn>``."""

_SKIPPED: Final = ("register.py", "__init__.py")
_imported: set[Path] = set()


def register_dataset(datasets: Mapping[str, Mapping[str, Any]], prefix: str = "") -> None:
    """Add datasets to the registry, as ``name`` or ``prefix_name``.

    Raises:
        ConfigError: a field is missing or unknown, or the name stands for something else already.
    """
    for short_name, fields in datasets.items():
        name = f"{prefix}_{short_name}" if prefix else short_name
        missing = [field for field in REQUIRED_FIELDS if field not in fields]
        unknown = [f for f in fields if f not in REQUIRED_FIELDS + OPTIONAL_FIELDS]
        if missing or unknown:
            raise ConfigError(
                f"dataset {name!r}: missing fields {missing}, unknown fields {unknown}; "
                f"required: {list(REQUIRED_FIELDS)}, optional: {list(OPTIONAL_FIELDS)}"
            )
        if len(fields["image_keys"]) != len(fields["image_prompts"]):
            raise ConfigError(
                f"dataset {name!r}: {len(fields['image_keys'])} image_keys but "
                f"{len(fields['image_prompts'])} image_prompts; give one prompt per camera"
            )
        _check_choices(name, fields)
        _check_words(name, fields)
        if CONVERSATION_DATA.get(name, fields) != fields:
            raise ConfigError(f"dataset {name!r} is registered twice with different fields")
        CONVERSATION_DATA[name] = dict(fields)


def _check_choices(name: str, fields: Mapping[str, Any]) -> None:
    mode, modes = fields.get("action_mode"), [member.value for member in ActionMode]
    if mode is not None and mode not in (*modes, *ActionMode):
        raise ConfigError(f"dataset {name!r}: action_mode {mode!r} is not one of {modes}")
    episodes = fields.get("episodes")
    if episodes is not None and not (episodes and all(type(n) is int for n in episodes)):
        raise ConfigError(
            f"dataset {name!r}: episodes is {episodes!r:.60}; give a list of episode numbers, or "
            "leave it out for all"
        )


def _check_words(name: str, fields: Mapping[str, Any]) -> None:
    for field in PROMPT_FIELDS:
        given = fields.get(field)
        for word in given if isinstance(given, list | tuple) else [given]:
            marker = MARKER.search(str(word))
            if marker:
                raise ConfigError(
                    f"dataset {name!r}: {field} holds {marker[0]!r}, which looks like a special "
                    "token of the prompt; write it without the brackets"
                )


def is_registered(name: str) -> bool:
    """Whether the catalogue has a dataset of this name."""
    import_catalogue()
    return name in CONVERSATION_DATA


def dataset_fields(name: str) -> dict[str, Any]:
    """A copy of a dataset's fields.

    Raises:
        ConfigError: nothing is registered under ``name``; the message has the nearest names.
    """
    import_catalogue()
    if name not in CONVERSATION_DATA:
        near = difflib.get_close_matches(name, CONVERSATION_DATA, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ConfigError(
            f"--data-config.dataset-name {name!r} is unknown; {hint}registered: "
            f"{', '.join(sorted(CONVERSATION_DATA))}; add your own with register_dataset() in a "
            "file of a folder named by OPENDM_DATA_PATH"
        )
    return dict(CONVERSATION_DATA[name])


def import_catalogue(folders: Iterable[str] | None = None) -> None:
    """Import every catalogue file that has not been imported yet.

    Raises:
        ConfigError: a folder does not exist or a file fails to import.
    """
    extra = data_paths() if folders is None else folders
    for folder in [Path(__file__).parent, *map(Path, extra)]:
        if not folder.is_dir():
            raise ConfigError(f"OPENDM_DATA_PATH names {str(folder)!r}, which is not a folder")
        for file in sorted(folder.glob("*.py")):
            if file.name not in _SKIPPED and not file.name.startswith("_"):
                _import_once(file.resolve())


def _import_once(file: Path) -> None:
    if file in _imported:
        return
    _imported.add(file)
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"opendm_catalogue_{file.stem}_{digest}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} is not a Python file that can be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{file} failed to import: {type(error).__name__}: {error}") from error
