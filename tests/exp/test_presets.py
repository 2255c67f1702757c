"""The presets of ``playground/``: published values, and two steps on a set of their shape."""

import json
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest
from robot_sets import write_robot_set

from opendm.constants.robot import ActionMode
from opendm.dataset.register import dataset_fields
from opendm.exp.dm05_exp import run

REPOSITORY = Path(__file__).parents[2]


class Preset(NamedTuple):
    """What a file of the playground must hold."""

    exp: str
    num_images: int
    state_dim: int
    action_dim: int
    dataset: str
    chunk_size: int
    base_lr: float
    warmup_steps: int
    batch_size: int
    num_steps: int
    save_steps: int
    optim: str


PRESETS = {
    "dm05_libero": Preset(
        "LiberoExp", 2, 8, 7, "libero_pi0_all",
        10, 2.5e-05, 1000, 8, 80_000, 10_000, "adamw",
    ),
    "dm05_libero_lora": Preset(
        "LiberoLoraExp", 2, 8, 7, "libero_pi0_all",
        10, 5e-4, 500, 4, 50_000, 10_000, "adamw",
    ),
    "dm05_robotwin2": Preset(
        "RoboTwin2Exp", 3, 14, 14, "robotwin2_generalist",
        50, 4e-5, 1000, 32, 100_000, 10_000, "muon_adamw",
    ),
    "dm05_so101_lora": Preset(
        "So101LoraExp", 2, 6, 6, "so101_pick_cube",
        50, 1e-4, 1000, 8, 10_000, 1000, "adamw",
    ),
    "dm05_vla_arena": Preset(
        "VlaArenaExp", 2, 7, 7, "vla_arena_eef_L0_L",
        20, 2e-5, 1000, 8, 60_000, 5000, "muon_adamw",
    ),
}  # fmt: skip
LORA = {"dm05_libero_lora", "dm05_so101_lora"}


def preset(name):
    return runpy.run_path(str(REPOSITORY / "playground" / f"{name}.py"))[PRESETS[name].exp]()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_hyper_parameters(name):
    exp, wanted = preset(name), PRESETS[name]
    assert exp.data_config.dataset_name == wanted.dataset
    assert exp.model_config.chunk_size == wanted.chunk_size
    assert exp.optimizer_config.base_lr == wanted.base_lr
    assert exp.optimizer_config.warmup_steps == wanted.warmup_steps
    assert exp.optimizer_config.optim == wanted.optim
    trainer = exp.trainer_config
    assert trainer.per_device_train_batch_size == wanted.batch_size
    assert (trainer.num_train_steps, trainer.save_steps) == (wanted.num_steps, wanted.save_steps)
    assert exp.inference_config.output_action_dim == wanted.action_dim
    assert exp.data_config.action_mode is (
        ActionMode.RELATIVE if name == "dm05_so101_lora" else ActionMode.ABSOLUTE
    )
    assert exp.data_config.add_state is (name in {"dm05_robotwin2", "dm05_so101_lora"})
    assert exp.data_config.augment is False
    assert bool(exp.use_lora) is (name in LORA)
    assert (trainer.fsdp1, trainer.save_only_model) == (name not in LORA, name in LORA)
    fields = dataset_fields(wanted.dataset)
    assert len(fields["image_keys"]) == wanted.num_images
    assert fields["image_prompts"] == exp.inference_config.image_prompts


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains_two_steps_on_a_set_of_its_shape(name, tiny_checkpoint, tmp_path):
    exp, shape = preset(name), PRESETS[name]
    folder = write_robot_set(
        tmp_path / "set",
        num_images=shape.num_images,
        state_dim=shape.state_dim,
        action_dim=shape.action_dim,
    )
    exp.data_config.jsonl_dir = exp.data_config.image_dir = str(folder)
    exp.data_config.norm_stats_root = str(tmp_path / "stats")
    exp.model_config.model_name_or_path = str(tiny_checkpoint)
    trainer = exp.trainer_config
    trainer.output_dir = str(tmp_path / "run")
    trainer.num_train_steps, trainer.per_device_train_batch_size = 2, 2
    trainer.dataloader_num_workers = 0
    assert run(exp) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
