"""Which checkpoint a run continues, and whether it may: what of its configuration has changed."""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opendm.data.mixture_weights import parse_entries
from opendm.errors import CheckpointError, ConfigError
from opendm.exp.run_file import REGISTRATION, RUN_FILE
from opendm.trainer.checkpoint_folder import newest_healthy
from opendm.trainer.manifest import verify
from opendm.trainer.train_state import STATE_FOLDER

if TYPE_CHECKING:
    from opendm.trainer.config import DM05TrainerConfig

logger = logging.getLogger(__name__)

LEFT_BY_A_RUN: Final = ("checkpoint-*", ".checkpoint-*", "metrics.jsonl", "nonfinite.json")

FREE: Final = (
    "task", "logger_level", "inference_config.*", "check_config.*",
    "trainer_config.output_dir", "trainer_config.save_*", "trainer_config.logging_steps",
    "trainer_config.dataloader_*", "trainer_config.wandb_project", "trainer_config.resume",
    "trainer_config.overwrite", "trainer_config.accept_changes", "trainer_config.nonfinite",
    "trainer_config.max_nonfinite_steps", "trainer_config.eval_steps",
    "model_config.lora_config.base_model", "model_config.lora_config.dump_trainable_path",
    "data_config.norm_stats_root", "data_config.index_root", "data_config.verify_index",
    "data_config.jsonl_dir", "data_config.image_dir",
)  # fmt: skip
"""Change nothing that is learnt; that a folder holds the same data is compared by its hash."""
LAYOUT: Final = (
    "trainer_config.fsdp*", "trainer_config.per_device_train_batch_size",
    "trainer_config.gradient_accumulation_steps", "model_config.*_gradient_checkpointing",
)  # fmt: skip
"""How the same work is cut; allowed while the samples of a step stay the same."""
SCHEDULE: Final = (
    "optimizer_config.base_lr", "optimizer_config.warmup_steps", "optimizer_config.weight_decay",
    "optimizer_config.adam_*", "optimizer_config.muon_*", "trainer_config.num_train_steps",
    "trainer_config.lr_scheduler_*", "trainer_config.ema_decay",
)  # fmt: skip
"""Rates and schedules: allowed where the user says so."""


@dataclass
class Changes:
    """Differences between two configurations, as ``name: before -> now``."""

    schedule: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


def compare(
    saved: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Changes:
    """What of a configuration has changed, but for what may.

    Args:
        saved: of the checkpoint.
        now: of this run.
        defaults: of the experiment: what a field stands for that is newer than the checkpoint.
    """
    before, after = _flat(saved), _flat(now)
    newer = {name: value for name, value in _flat(defaults or {}).items() if name in after}
    before = newer | before
    changes = Changes()
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name) or _matches(name, FREE + LAYOUT):
            continue
        line = f"{name}: {before.get(name)} -> {after.get(name)}"
        (changes.schedule if _matches(name, SCHEDULE) else changes.other).append(line)
    return changes


def check_same_run(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    folder: str,
    *,
    accept_changes: bool,
    defaults: Mapping[str, Any] | None = None,
) -> list[str]:
    """Differences of rates and schedules that were accepted.

    Raises:
        ConfigError: the checkpoint is of another configuration, or of other rates and nobody said
            that these may change.
    """
    changes = compare(saved, now, defaults)
    if changes.other:
        raise ConfigError(
            f"{folder} was trained with another configuration: {'; '.join(changes.other)}. Name "
            "another --trainer-config.output-dir, or --trainer-config.overwrite to start anew"
        )
    if changes.schedule and not accept_changes:
        raise ConfigError(
            f"{folder} was trained with other rates: {'; '.join(changes.schedule)}. Say "
            "--trainer-config.accept-changes to continue with the new ones"
        )
    return changes.schedule


def compared_parts(
    saved: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What :func:`check_same_run` compares of two contents of ``run.json``.

    The registrations are compared where both have them. Where they are equal, a dataset that is
    named by its folder may have moved: that its data is the same is compared by its hash.
    """
    before, after = dict(saved["config"]), dict(now["config"])
    if REGISTRATION not in saved:
        return before, after
    if saved[REGISTRATION] == now[REGISTRATION]:
        return _without_places(before), _without_places(after)
    before[REGISTRATION], after[REGISTRATION] = saved[REGISTRATION], now[REGISTRATION]
    return before, after


def _without_places(config: Mapping[str, Any]) -> dict[str, Any]:
    data = dict(config["data_config"])
    data["dataset_name"] = _without_place(data["dataset_name"])
    if data.get("datasets"):
        entries = parse_entries(data["datasets"])
        data["datasets"] = [[_without_place(entry.name), entry.weight] for entry in entries]
    return {**config, "data_config": data}


def _without_place(name: str) -> str:
    """A registered name as it is, for each folder the same word."""
    return "a folder" if "/" in name or Path(name).is_dir() else name


def find_checkpoint(
    config: "DM05TrainerConfig",
    run: Mapping[str, Any],
    hashes: Mapping[str, str],
    defaults: Mapping[str, Any] | None = None,
) -> Path | None:
    """The checkpoint to continue; None to begin at step 0.

    Args:
        config: ``resume``, ``overwrite``, ``accept_changes`` and the output folder.
        run: content of ``run.json`` of the present run.
        hashes: of dataset and statistics, as in a manifest.
        defaults: the experiment's, for fields that are newer than the checkpoint.

    Raises:
        ConfigError: the output folder holds another run, or nothing healthy.
        CheckpointError: the named checkpoint does not verify, or cannot be continued.
    """
    output_dir = Path(config.output_dir)
    if config.overwrite and config.resume not in ("auto", "never"):
        raise ConfigError(
            "--trainer-config.overwrite removes what is in the output folder, and "
            f"--trainer-config.resume {config.resume} would continue it; give one of the two"
        )
    if config.overwrite:
        _remove_earlier_run(output_dir)
    folder = checkpoint_to_continue(config)
    if folder is None:
        _refuse_earlier_run(output_dir)
        return None
    manifest = verify(folder)
    if config.resume != "auto":
        _refuse_newer(output_dir, manifest.step)
    if not (folder / STATE_FOLDER).is_dir():
        raise CheckpointError(
            f"{folder} holds weights and no state (--trainer-config.save-only-model); give it as "
            "--model-config.model-name-or-path, or --trainer-config.overwrite to start anew"
        )
    saved = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    before, after = compared_parts(saved, run)
    changed = check_same_run(
        before, after, str(folder), accept_changes=config.accept_changes, defaults=defaults
    )
    for line in changed:
        logger.warning("changed since %s: %s", folder, line)
    _check_same_data(manifest.hashes, hashes, folder)
    _check_same_step_size(saved, run, folder)
    return folder


def checkpoint_to_continue(config: "DM05TrainerConfig") -> Path | None:
    """The checkpoint that the flags of a run ask for; None to begin at step 0."""
    if config.overwrite or config.resume == "never":
        return None
    if config.resume != "auto":
        return Path(config.resume)
    newest = newest_healthy(Path(config.output_dir), logger.warning)
    return None if newest is None else newest[1]


def _refuse_earlier_run(output_dir: Path) -> None:
    found = sorted(output_dir.glob("checkpoint-*"))
    if found:
        raise ConfigError(
            f"--trainer-config.output-dir {output_dir} holds {found[-1].name} of an earlier run, "
            "which is not continued (resume is never, or no checkpoint there is healthy); name "
            "another folder, or --trainer-config.overwrite to remove it"
        )


def _refuse_newer(output_dir: Path, step: int) -> None:
    newest = newest_healthy(output_dir, logger.warning)
    if newest is not None and newest[0] > step:
        raise ConfigError(
            f"--trainer-config.output-dir {output_dir} holds {newest[1].name}, which is newer than "
            f"the checkpoint of step {step} to continue; remove it, or name another folder"
        )


def _remove_earlier_run(output_dir: Path) -> None:
    for path in [p for pattern in LEFT_BY_A_RUN for p in output_dir.glob(pattern)]:
        logger.warning("removing %s", path)
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_same_data(saved: Mapping[str, str], now: Mapping[str, str], folder: Path) -> None:
    changed = [key for key in ("dataset", "statistics") if saved.get(key) != now.get(key)]
    if changed:
        raise ConfigError(
            f"{folder} was trained on another {' and other '.join(changed)}; bring them back, or "
            "start anew in another --trainer-config.output-dir"
        )


def samples_per_step(run: Mapping[str, Any]) -> int:
    """Samples of one optimizer step over all ranks."""
    trainer = run["config"]["trainer_config"]
    return int(
        trainer["per_device_train_batch_size"]
        * trainer["gradient_accumulation_steps"]
        * run["engine"]["world_size"]
    )


def _check_same_step_size(saved: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    before, after = samples_per_step(saved), samples_per_step(now)
    if before != after:
        raise ConfigError(
            f"{folder} was trained with {before} samples a step, and this run has {after} (batch x "
            "accumulation x processes); change --trainer-config.per-device-train-batch-size or "
            "--trainer-config.gradient-accumulation-steps so that they agree"
        )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and key != "lr_scheduler_kwargs":
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value
    return flat
