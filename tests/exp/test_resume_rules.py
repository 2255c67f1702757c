"""Which changes of a configuration a run may be continued with."""

import pytest

from opendm.errors import ConfigError
from opendm.exp.resume import check_same_run, compare

SAVED = {
    "task": "train",
    "model_config": {"chunk_size": 50, "vlm_gradient_checkpointing": True},
    "optimizer_config": {"optim": "adamw", "base_lr": 1e-4, "warmup_steps": 10},
    "trainer_config": {
        "output_dir": "a", "seed": 1, "num_train_steps": 100, "save_steps": 5, "fsdp1": True,
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    },
    "data_config": {"dataset_name": "demo"},
}  # fmt: skip


def changed(section, **values):
    return {**SAVED, section: {**SAVED[section], **values}}


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("trainer_config", {"output_dir": "b"}),
        ("trainer_config", {"save_steps": 7, "dataloader_num_workers": 3, "resume": "never"}),
        ("trainer_config", {"fsdp1": False, "fsdp_version": 2}),
        ("model_config", {"vlm_gradient_checkpointing": False}),
    ],
)
def test_what_changes_no_number_is_free(section, values):
    assert check_same_run(SAVED, changed(section, **values), "x", accept_changes=False) == []


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("optimizer_config", {"base_lr": 2e-4}),
        ("trainer_config", {"num_train_steps": 200}),
        ("trainer_config", {"lr_scheduler_kwargs": {"min_lr_rate": 0.2}}),
    ],
)
def test_rates_need_a_word_and_are_listed(section, values):
    now = changed(section, **values)
    with pytest.raises(ConfigError, match="accept-changes") as refused:
        check_same_run(SAVED, now, "x", accept_changes=False)
    (line,) = check_same_run(SAVED, now, "x", accept_changes=True)
    assert line in str(refused.value)
    assert line.startswith(f"{section}.{next(iter(values))}: ")
    assert " -> " in line


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("model_config", {"chunk_size": 25}),
        ("optimizer_config", {"optim": "muon_adamw"}),
        ("trainer_config", {"seed": 2}),
        ("data_config", {"dataset_name": "other"}),
        ("data_config", {"val_episodes": 3}),
    ],
)
def test_another_run_is_refused_with_the_difference(section, values):
    now = changed(section, **values)
    name = f"{section}.{next(iter(values))}"
    with pytest.raises(ConfigError, match=name):
        check_same_run(SAVED, now, "x", accept_changes=True)
    assert len(compare(SAVED, now).other) == 1
