"""A training run: engine, statistics, model, data, loop, files. The story from top to bottom."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch import nn

import opendm
from opendm.constants.precision import BF16_MIXED_PRECISION_POLICY, FP32_MIXED_PRECISION_POLICY
from opendm.data.mixture import Mixture
from opendm.data.processor import load_processor
from opendm.data.read_once import read_once
from opendm.data.stat_file import check_unchanged
from opendm.errors import ConfigError, OpenDMError
from opendm.exp.checking import check_before_training
from opendm.exp.policy_layout import policy_layout
from opendm.exp.resume import find_checkpoint
from opendm.exp.run_file import (
    REGISTRATION,
    REPORTED_PACKAGES,
    config_record,
    run_record,
    text_hash,
    write_run_file,
)
from opendm.failure import phase
from opendm.model.dm05.dm05_lora import DM05LoraConfig
from opendm.model.dm05.lora import write_summary
from opendm.runtime import (
    Runtime,
    collective_timeout_s,
    enable_wandb,
    environment,
    flag_was_given,
)
from opendm.trainer.arguments import training_arguments
from opendm.trainer.checkpointing import Checkpoints
from opendm.trainer.engine import Engine, EngineName, fsdp_engine
from opendm.trainer.interrupt import StopRequest
from opendm.trainer.plan import RunPlan
from opendm.trainer.rank_agreement import (
    code_facts,
    compare,
    file_fact,
    flat_facts,
    parameter_facts,
)
from opendm.trainer.trainer import DMTrainer
from opendm.trainer.validation import held_out, validation_loss

if TYPE_CHECKING:
    from opendm.exp.dm05_exp import DM05Exp

logger = logging.getLogger(__name__)

T = TypeVar("T")

NORM_STATS_FILE: Final = "norm_stats.json"
SUMMARY_FILE: Final = "trainable_summary.json"
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
        with phase("loading", environment()), read_once():
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
        # First, so that it sees a file of other data before that is replaced.
        checked = on_rank_0(lambda: check_before_training(exp, runtime.world_size))
        logger.info("check of the data: %s", checked)
        stats_path = Path(on_rank_0(lambda: str(exp.data_config.compute_norm_stats(chunk_size))))
        statistics = on_rank_0(lambda: exp.data_config.read_norm_stats(chunk_size))
        layout = policy_layout(exp, stats_path)
    use_lora = bool(exp.use_lora)
    processor = load_processor(str(exp.model_config.processor_folder(use_lora=use_lora)))
    max_length = config.model_max_length
    dataset = exp.data_config.build_dataset(processor, exp.model_config.chunk_size, max_length)
    collator = exp.data_config.build_collator(processor, max_length)
    validate = validation(exp, processor, collator, engine, runtime)
    run = run_record(exp, engine, runtime.world_size)
    hashes = {
        "config": text_hash(json.dumps(run["config"], sort_keys=True)),
        "dataset": run["dataset_fingerprint"],
        "statistics": file_fact(stats_path),
    }
    compare_ranks(run, hashes)
    check_unchanged(stats_path, statistics)
    defaults = config_record(type(exp)())
    found = on_rank_0(lambda: str(find_checkpoint(config, run, hashes, defaults) or ""))
    resume_from = Path(found) if found else None
    model = build_model(exp, runtime, resume_from)
    on_rank_0(lambda: write_first(run, Path(config.output_dir)))

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
            resume_from=resume_from,
            keep_rates=config.accept_changes,
            save_only_model=config.save_only_model,
            stops_at_nonfinite=config.nonfinite == "stop",
            max_nonfinite_steps=config.max_nonfinite_steps,
            ema_decay=config.ema_decay,
            validate=validate,
            eval_steps=config.eval_steps,
            draw_order=dataset.draw_order if isinstance(dataset, Mixture) else None,
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


def build_model(exp: "DM05Exp", runtime: Runtime, resume_from: Path | None) -> Any:
    """The model to train, read by rank 0 alone; the engine gives the other ranks its weights.

    A run that goes on reads the weights that lie in its checkpoint: of the state, which comes
    later, frozen weights are no part.

    Raises:
        EngineError: ranks built another model than rank 0.
        OpenDMError: what rank 0 could not read or write, on every rank.
    """
    use_lora, sha256 = bool(exp.use_lora), None
    if use_lora:
        sha256 = on_rank_0(lambda: exp.model_config.checked_base_hash(resume_from))
    models: list[Any] = []

    def build() -> str:
        model = exp.model_config.build_model(
            use_lora=use_lora,
            read_from=resume_from,
            on_meta=not runtime.is_main,
            lora_seed=exp.trainer_config.seed,
            base_sha256=sha256,
        )
        if use_lora and runtime.is_main:
            write_summary(model, exp.model_config.lora_config, summary_path(exp))
        models.append(model)
        return ""

    if not runtime.is_main:
        build()
    on_rank_0(build)
    model = models[0]
    exp.optimizer_config.prepare_model(model)
    logger.info(
        "model: %s trainable of %s parameters; what no loss reads is frozen",
        f"{model.parameter_summary(only_trainable=True)['total']:,}",
        f"{model.parameter_summary()['total']:,}",
    )
    compare(parameter_facts(model), float(collective_timeout_s()))
    return model


def write_first(run: Mapping[str, Any], folder: Path) -> str:
    """Write the first file into the output folder.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        write_run_file(run, folder)
    except OSError as error:
        raise ConfigError(
            f"--trainer-config.output-dir {folder} cannot be written to: {error}; name another"
        ) from error
    return ""


def summary_path(exp: "DM05Exp") -> Path:
    """Where a LoRA run says what it trains: in its own folder, unless the flag names a place."""
    named = exp.model_config.lora_config.dump_trainable_path
    flag = "--model-config.lora-config.dump-trainable-path"
    if named == DM05LoraConfig().dump_trainable_path and not flag_was_given(flag):
        return Path(exp.trainer_config.output_dir) / SUMMARY_FILE
    return Path(named)


def compare_ranks(run: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
    """Abort before weights are read if ranks were not started alike.

    Raises:
        EngineError: names the first difference; the same line on every rank.
    """
    facts = flat_facts("configuration", run["config"])
    facts |= flat_facts(REGISTRATION, run[REGISTRATION])
    facts |= {f"hash of the {name}": value for name, value in hashes.items()}
    facts |= code_facts(PACKAGE, REPORTED_PACKAGES)
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
        frozen_as_loaded=bool(exp.use_lora),
    )


def on_rank_0(work: Callable[[], T]) -> T:
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
    result: T = outcome[0]
    return result
