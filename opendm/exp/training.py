"""A training run: engine, statistics, model, data, loop, files. The story from top to bottom."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
import transformers
from torch import nn

import opendm
from opendm.constants.precision import BF16_MIXED_PRECISION_POLICY, FP32_MIXED_PRECISION_POLICY
from opendm.constants.robot import desc_value
from opendm.data.normalize import NormStatsFile
from opendm.data.processor import load_processor
from opendm.data.transforms.prompt import PROMPT_LAYOUT_VERSION
from opendm.errors import DataError, OpenDMError
from opendm.exp.resume import find_checkpoint
from opendm.exp.run_file import REPORTED_PACKAGES, run_record, text_hash, write_run_file
from opendm.failure import phase
from opendm.infer.layout import PolicyLayout
from opendm.runtime import Runtime, collective_timeout_s, enable_wandb, environment
from opendm.trainer.arguments import training_arguments
from opendm.trainer.checkpointing import Checkpoints
from opendm.trainer.engine import Engine, EngineName, fsdp_engine
from opendm.trainer.interrupt import StopRequest
from opendm.trainer.rank_agreement import (
    code_facts,
    compare,
    file_fact,
    flat_facts,
    parameter_facts,
)
from opendm.trainer.trainer import DMTrainer, RunPlan
from opendm.trainer.validation import held_out, validation_loss

if TYPE_CHECKING:
    from opendm.exp.dm05_exp import DM05Exp

logger = logging.getLogger(__name__)

NORM_STATS_FILE: Final = "norm_stats.json"
PACKAGE: Final = Path(opendm.__file__).parent
VALIDATION_SEED: Final = 0
"""Of noise and times of held-out samples: the same in all runs, so that losses compare."""


def train(exp: "DM05Exp") -> None:
    """Train ``exp`` from its checkpoint, or from where it stopped, to the final weights.

    Raises:
        Interrupted: a signal stopped the run; what it had reached is saved.
    """
    runtime = Runtime.from_env()
    with StopRequest(announce=runtime.world_size == 1) as stop:
        with phase("loading", environment()):
            trainer = build_trainer(exp, runtime, stop)
        with phase("training", environment()):
            trainer.run()
    if dist.is_initialized():
        dist.destroy_process_group()


def build_trainer(exp: "DM05Exp", runtime: Runtime, stop: StopRequest) -> DMTrainer:
    """Statistics, data, model and engine of a run, and the checkpoint that it continues."""
    config = exp.trainer_config
    if config.wandb_project:
        enable_wandb(config.wandb_project)
    transformers.logging.set_verbosity_error()
    arguments = training_arguments(config, exp.optimizer_config, world_size=runtime.world_size)
    engine = choose_engine(exp, runtime, arguments.device)

    with phase("statistics", environment()):
        chunk_size = exp.model_config.chunk_size
        stats_path = Path(on_rank_0(lambda: str(exp.data_config.compute_norm_stats(chunk_size))))
    processor = load_processor(str(exp.model_config.model_name_or_path))
    max_length = config.model_max_length
    dataset = exp.data_config.build_dataset(processor, exp.model_config.chunk_size, max_length)
    collator = exp.data_config.build_collator(processor, max_length)
    validate = validation(exp, processor, collator, engine, runtime)
    model = exp.model_config.build_model(use_lora=bool(exp.use_lora))
    exp.optimizer_config.prepare_model(model)
    logger.info(
        "model: %s trainable of %s parameters; what no loss reads is frozen",
        f"{model.parameter_summary(only_trainable=True)['total']:,}",
        f"{model.parameter_summary()['total']:,}",
    )

    run = run_record(exp, engine, runtime.world_size)
    hashes = {
        "config": text_hash(json.dumps(run["config"], sort_keys=True)),
        "dataset": run["dataset_fingerprint"],
        "statistics": file_fact(stats_path),
    }
    compare_ranks(run, hashes, model)
    found = on_rank_0(lambda: str(find_checkpoint(config, run, hashes) or ""))
    if runtime.is_main:
        write_run_file(run, Path(config.output_dir))
    layout, statistics = policy_layout(exp, stats_path), stats_path.read_bytes()

    def save_artifacts(folder: Path) -> None:
        processor.save_pretrained(folder)
        (folder / NORM_STATS_FILE).write_bytes(statistics)
        layout.save(folder)
        write_run_file(run, folder)

    return DMTrainer(
        model=model,
        args=arguments,
        engine=engine,
        plan=RunPlan(
            checkpoints=Checkpoints(Path(config.output_dir), config.save_total_limit, hashes),
            resume_from=Path(found) if found else None,
            keep_rates=config.accept_changes,
            save_only_model=config.save_only_model,
            stops_at_nonfinite=config.nonfinite == "stop",
            max_nonfinite_steps=config.max_nonfinite_steps,
            ema_decay=config.ema_decay,
            validate=validate,
            eval_steps=config.eval_steps,
        ),
        stop=stop,
        train_dataset=dataset,
        data_collator=collator,
        make_optimizer=exp.optimizer_config.build_optimizer,
        save_artifacts=save_artifacts,
        export_dtype=getattr(torch, exp.model_config.export_dtype),
    )


def validation(
    exp: "DM05Exp", processor: Any, collator: Any, engine: Engine, runtime: Runtime
) -> Callable[[nn.Module], float] | None:
    """The loss on held-out episodes, where the run evaluates."""
    config = exp.trainer_config
    if not config.eval_steps:
        return None
    dataset = exp.data_config.build_val_dataset(
        processor, exp.model_config.chunk_size, config.model_max_length
    )
    samples = held_out(
        dataset,
        collator,
        seed=VALIDATION_SEED,
        batch_size=config.per_device_train_batch_size,
        rank=runtime.rank,
        world_size=runtime.world_size,
        num_workers=config.dataloader_num_workers,
    )
    return lambda model: validation_loss(model, samples, engine)


def compare_ranks(run: Mapping[str, Any], hashes: Mapping[str, str], model: nn.Module) -> None:
    """Abort at once if ranks were not started alike.

    Raises:
        EngineError: names the first difference; the same line on every rank.
    """
    facts = flat_facts("configuration", run["config"])
    facts |= {f"hash of the {name}": value for name, value in hashes.items()}
    facts |= code_facts(PACKAGE, REPORTED_PACKAGES) | parameter_facts(model)
    compare(facts, float(collective_timeout_s()))


def choose_engine(exp: "DM05Exp", runtime: Runtime, device: torch.device) -> Engine:
    """The engine that the flags and the number of processes ask for."""
    trainer, policy = exp.trainer_config, exp.model_config.precision_policy
    name: EngineName = "single"
    if runtime.world_size > 1:
        name = fsdp_engine(trainer.fsdp_version) if trainer.fsdp1 else "ddp"
    half = trainer.bf16 or policy == FP32_MIXED_PRECISION_POLICY
    return Engine(
        name=name,
        device=torch.device("cpu") if device.type == "cpu" else device,
        compute_dtype=torch.bfloat16 if half else None,
        shard_in_compute_dtype=policy == BF16_MIXED_PRECISION_POLICY,
        strategy=trainer.fsdp_sharding_strategy,
        wrap_preset=trainer.fsdp_wrap,
        ranks_per_node=runtime.ranks_per_node,
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
