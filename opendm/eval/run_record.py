"""What a training run left beside its checkpoints: metrics, settings, versions."""

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = ("torch", "transformers", "numpy")


def read_run(checkpoint: Path) -> tuple[list[dict[str, int | float | None]], dict[str, str]]:
    """Metrics and settings of the run that wrote a checkpoint, as far as they are there."""
    places = (checkpoint, checkpoint.resolve().parent)
    metrics = next((p for d in places if (p := d / "metrics.jsonl").is_file()), None)
    run = next((p for d in places if (p := d / "run.json").is_file()), None)
    training = [] if metrics is None else _metric_lines(metrics)
    settings = {} if run is None else flatten(_parsed(run.read_text(encoding="utf-8")) or {})
    return training, settings


def _metric_lines(path: Path) -> list[dict[str, int | float | None]]:
    lines = [_parsed(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {key: value if isinstance(value, int | float) else None for key, value in line.items()}
        for line in lines
        if isinstance(line, dict) and "step" in line
    ]


def _parsed(text: str) -> Any:
    """A JSON value; None for a line that a stopped run left unfinished."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def flatten(values: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as ``a.b.c``: text."""
    if not isinstance(values, dict):
        return {prefix: values if isinstance(values, str) else json.dumps(values)}
    flat: dict[str, str] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in PACKAGES
    }
