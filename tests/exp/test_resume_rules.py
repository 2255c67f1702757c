"""Which changes of a configuration a run may be continued with."""

import pytest

from opendm.errors import ConfigError
from opendm.exp.dm05_exp import DM05Exp
from opendm.exp.resume import check_same_run, compare, compared_parts
from opendm.exp.run_file import config_record

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


NEWER = {
    "data_config": ("augment", "datasets", "mixture_by", "verify_index"),
    "model_config": ("num_noise_samples",),
    "inference_config": ("token",),
}


def older_record():
    """What a run wrote before some fields, and the registration, were recorded."""
    saved = config_record(DM05Exp())
    for section, names in NEWER.items():
        for name in names:
            del saved[section][name]
    return saved


def test_a_field_that_is_newer_than_the_checkpoint_is_compared_with_its_default():
    defaults = config_record(DM05Exp())
    assert compare(older_record(), defaults, defaults).other == []
    exp = DM05Exp()
    exp.data_config.augment = False
    assert compare(older_record(), config_record(exp), defaults).other == [
        "data_config.augment: True -> False"
    ]


def test_the_default_is_that_of_the_experiment():
    class Own(DM05Exp):
        def __init__(self):
            super().__init__()
            self.data_config.augment = False

    now = config_record(Own())
    assert compare(older_record(), now, config_record(Own())).other == []


def record(registration=None, **data):
    run = {"config": changed("data_config", **data)}
    return run if registration is None else {**run, "registration": {"0": registration}}


def other_than(saved, now):
    return compare(*compared_parts(saved, now)).other


def test_another_registration_is_another_run_and_a_record_without_one_is_not():
    front, top = {"image_prompts": ["Front"]}, {"image_prompts": ["Top"], "fps": 30}
    assert other_than(record(front), record(front)) == []
    assert other_than(record(front), record(top)) == [
        "registration.0.fps: None -> 30",
        "registration.0.image_prompts: ['Front'] -> ['Top']",
    ]
    assert other_than(record(), record(top)) == []


def test_a_folder_may_move_and_a_registered_name_may_not_change():
    front = {"image_prompts": ["Front"]}
    old, new = record(front, dataset_name="/old/d"), record(front, dataset_name="/new/e")
    assert other_than(old, new) == []
    assert other_than(old, record({}, dataset_name="/new/e")) != []
    assert other_than(record(dataset_name="/old/d"), new) == [
        "data_config.dataset_name: /old/d -> /new/e"
    ]
    assert other_than(record(front), record(front, dataset_name="other")) != []


def test_folders_of_a_mixture_may_move_and_their_weights_may_not_change():
    front = {"image_prompts": ["Front"]}
    old = record(front, datasets=["/old/a=1", "/old/b=2"])
    assert other_than(old, record(front, datasets=["/new/a=1", "/new/b=2"])) == []
    assert other_than(old, record(front, datasets=["/new/a=1", "/new/b=3"])) != []
    assert other_than(old, record(front, datasets=["/new/a=1", "demo=2"])) != []
