"""A training run: engine, statistics, model, data, loop, files. The story from top to bottom."""

import json
import logging
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
import transformers

from opendm.constants.precision import BF16_MIXED_PRECISION_POLICY, FP32_MIXED_PRECISION_POLICY
from opendm.constants.robot import desc_value
from opendm.data.episodes import fingerprint
from opendm.data.normalize import NormStatsFile
from opendm.data.processor import load_processor
from opendm.data.transforms.prompt import PROMPT_LAYOUT_VERSION
from opendm.errors import DataError, OpenDMError
from opendm.infer.layout import PolicyLayout
from opendm.runtime import Runtime, enable_wandb
from opendm.trainer.arguments import training_arguments
from opendm.trainer.engine import Engine, EngineName
from opendm.trainer.trainer import DMTrainer

if TYPE_CHECKING:
    from opendm.exp.dm05_exp import DM05Exp

logger = logging.getLogger(__name__)

RUN_FILE: Final = "run.json"
NORM_STATS_FILE: Final = "norm_stats.json"
REPORTED_PACKAGES: Final = ("opendm", "torch", "torchvision", "transformers", "accelerate", "numpy")


def train(exp: "DM05Exp") -> None:
    """Train ``exp`` from its checkpoint to the final weights in the output folder."""
    runtime = Runtime.from_env()
    trainer_config = exp.trainer_config
    if trainer_config.wandb_project:
        enable_wandb(trainer_config.wandb_project)
    transformers.logging.set_verbosity_error()
    arguments = training_arguments(
        trainer_config, exp.optimizer_config, world_size=runtime.world_size
    )
    engine = choose_engine(exp, runtime, arguments.device)

    stats_path = on_rank_0(
        lambda: str(exp.data_config.compute_norm_stats(exp.model_config.chunk_size))
    )
    processor = load_processor(str(exp.model_config.model_name_or_path))
    max_length = trainer_config.model_max_length
    dataset = exp.data_config.build_dataset(processor, exp.model_config.chunk_size, max_length)
    collator = exp.data_config.build_collator(processor, max_length)
    model = exp.model_config.build_model(use_lora=bool(exp.use_lora))
    exp.optimizer_config.prepare_model(model)
    logger.info(
        "model: %s trainable of %s parameters; what no loss reads is frozen",
        f"{model.parameter_summary(only_trainable=True)['total']:,}",
        f"{model.parameter_summary()['total']:,}",
    )

    layout = policy_layout(exp, Path(stats_path))

    def save_artifacts(folder: Path) -> None:
        processor.save_pretrained(folder)
        shutil.copyfile(stats_path, folder / NORM_STATS_FILE)
        layout.save(folder)

    trainer = DMTrainer(
        model=model,
        args=arguments,
        engine=engine,
        train_dataset=dataset,
        data_collator=collator,
        make_optimizer=exp.optimizer_config.build_optimizer,
        save_artifacts=save_artifacts,
        export_dtype=getattr(torch, exp.model_config.export_dtype),
    )
    if runtime.is_main:
        write_run_file(exp, engine)
    try:
        trainer.train()
        trainer.save_model()
    finally:
        trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_engine(exp: "DM05Exp", runtime: Runtime, device: torch.device) -> Engine:
    """The engine that the flags and the number of processes ask for."""
    name: EngineName = "single"
    if runtime.world_size > 1:
        name = "fsdp1" if exp.trainer_config.fsdp1 else "ddp"
    policy = exp.model_config.precision_policy
    half = exp.trainer_config.bf16 or policy == FP32_MIXED_PRECISION_POLICY
    return Engine(
        name=name,
        device=torch.device("cpu") if device.type == "cpu" else device,
        compute_dtype=torch.bfloat16 if half else None,
        shard_in_compute_dtype=policy == BF16_MIXED_PRECISION_POLICY,
    )


def on_rank_0(work: Callable[[], str]) -> str:
    """Run ``work`` on rank 0 and give every rank its result, or its error.

    Raises:
        OpenDMError: what ``work`` raised, on every rank.
    """
    outcome: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except OpenDMError as error:
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def policy_layout(exp: "DM05Exp", stats_path: Path) -> PolicyLayout:
    """What a policy must know of training to run it backwards."""
    data = exp.data_config
    info = data._dataset_info()  # noqa: SLF001 - the public hook of data configurations
    profile = NormStatsFile.load(stats_path).select(info.get("robot_type"))
    if "action" not in profile:
        raise DataError(f"{stats_path} has no statistics of the action")
    desc = info.get("state_desc")
    return PolicyLayout(
        dataset_name=data.dataset_name,
        image_keys=list(info["image_keys"]),
        image_prompts=list(info["image_prompts"]),
        action_mode=data.action_mode.value,
        state_desc=None if desc is None else [desc_value(part) for part in desc],
        robot_type=info.get("robot_type"),
        speed=info.get("speed"),
        control_mode=info.get("control_mode"),
        n_bins=data.n_bins,
        add_state=data.add_state,
        action_dim=len(profile["action"].mean),
        chunk_size=exp.model_config.chunk_size,
        max_length=exp.trainer_config.model_max_length,
        prompt_layout=PROMPT_LAYOUT_VERSION,
    )


def write_run_file(exp: "DM05Exp", engine: Engine) -> None:
    """Write ``run.json``: resolved configuration, versions, engine, dataset fingerprint."""
    info = exp.data_config._dataset_info()  # noqa: SLF001 - the public hook
    content = {
        "config": asdict(exp),
        "versions": {name: version(name) for name in REPORTED_PACKAGES}
        | {"python": platform.python_version()},
        "engine": {
            "name": engine.name,
            "world_size": Runtime.from_env().world_size,
            "device": engine.device.type,
            "compute_dtype": str(engine.compute_dtype or torch.float32)[6:],
        },
        "dataset_fingerprint": fingerprint(info["jsonl_dir"]),
    }
    path = Path(exp.trainer_config.output_dir) / RUN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, default=_json_value) + "\n", encoding="utf-8")


def _json_value(value: object) -> object:
    return value.value if isinstance(value, Enum) else str(value)
