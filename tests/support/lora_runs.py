"""Short runs with ``--use-lora`` on every engine."""

from run_ranks import experiment, run_ranks

from opendm.exp.dm05_exp import run
from opendm.model.dm05.dm05_lora import DM05LoraConfig

ENGINES = {
    "single": (1, {}),
    "ddp": (2, {"trainer_config__fsdp1": False}),
    "fsdp1": (2, {}),
    "fsdp2": (2, {"trainer_config__fsdp_version": 2}),
}


def lora_run(base, folder, engine="single", *, lora=None, **changes):
    """Three steps of four samples; ``lora`` and ``changes`` replace settings."""
    world_size, how = ENGINES[engine]
    values = {
        "trainer_config__num_train_steps": 3,
        "trainer_config__per_device_train_batch_size": 4 // world_size,
        "model_config__lora_config": DM05LoraConfig(**{"r": 4} | (lora or {})),
    }
    exp = experiment(base, folder, **values | how | changes)
    exp.use_lora = True
    return exp


def exit_codes(exp, engine, tmp_path):
    world_size = ENGINES[engine][0]
    return {run(exp)} if world_size == 1 else set(run_ranks(exp, world_size, tmp_path))
