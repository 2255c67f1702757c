"""``run.json``: what a run was started with, in its output folder and in every checkpoint."""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from opendm.exp.dm05_exp import DM05Exp
    from opendm.trainer.engine import Engine

RUN_FILE: Final = "run.json"
REGISTRATION: Final = "registration"
"""Key of what the datasets' registrations say, without their folders."""
REGISTERED_FIELDS: Final = (
    "image_keys", "image_prompts", "state_desc", "robot_type", "speed", "control_mode", "fps",
    "columns", "action_mode", "episodes", "angle_dims",
)  # fmt: skip
REPORTED_PACKAGES: Final = ("opendm", "torch", "torchvision", "transformers", "accelerate", "numpy")


def run_record(exp: "DM05Exp", engine: "Engine", world_size: int) -> dict[str, Any]:
    """Resolved configuration, versions, engine and dataset, as JSON holds them.

    Of the service's token it says only whether there is one.
    """
    record = {
        "config": config_record(exp),
        REGISTRATION: _registration(exp),
        "versions": {name: version(name) for name in REPORTED_PACKAGES}
        | {"python": platform.python_version()},
        "engine": {
            "name": engine.name,
            "world_size": world_size,
            "device": engine.device.type,
            "compute_dtype": str(engine.compute_dtype).removeprefix("torch.")
            if engine.compute_dtype
            else "float32",
        },
        "dataset_fingerprint": exp.data_config.fingerprint(),
    }
    return _as_json(record)


def config_record(exp: "DM05Exp") -> dict[str, Any]:
    """All fields of an experiment as JSON holds them; of the token only whether there is one."""
    config = asdict(exp)
    config["inference_config"]["token"] = exp.inference_config.token is not None
    return _as_json(config)


def _registration(exp: "DM05Exp") -> dict[str, dict[str, Any]]:
    """What the registrations say, by the datasets' places in the configuration."""
    infos = [part._dataset_info() for part in exp.data_config.parts()]  # noqa: SLF001 - public hook
    return {
        str(number): {key: info[key] for key in REGISTERED_FIELDS if info.get(key) is not None}
        for number, info in enumerate(infos)
    }


def write_run_file(record: Mapping[str, Any], folder: Path) -> None:
    """Write ``run.json`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RUN_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def text_hash(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=_json_value))


def _json_value(value: object) -> object:
    return value.value if isinstance(value, Enum) else str(value)
