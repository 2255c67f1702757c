"""The command line is a contract: every flag, its default, and what asking for help costs."""

import json
import time
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

import pytest

from opendm.exp.dm05_exp import DM05Exp, parse

GOLDEN = Path(__file__).parent / "flags.json"


def defaults(config, prefix=""):
    listed = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            listed |= defaults(value, f"{prefix}{item.name}.")
        else:
            listed[prefix + item.name] = value.value if isinstance(value, Enum) else value
    return listed


def test_fields_and_defaults_are_the_published_ones():
    assert json.loads(json.dumps(defaults(DM05Exp()))) == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", json.loads(GOLDEN.read_text()))
def test_every_field_is_a_flag(name, help_text):
    flag = "--" + name.replace("_", "-")
    assert flag in help_text, flag


@pytest.fixture(scope="module")
def help_text():
    import subprocess
    import sys

    result = subprocess.run(
        [sys.executable, "-c", "from opendm.exp.dm05_exp import *; main(DM05Exp)", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "300", "PATH": "/usr/bin:/bin"},
        cwd=Path(__file__).parents[2],
    )
    return result.stdout


@pytest.mark.parametrize("written", ["RELATIVE", "relative", "Relative"])
def test_enum_flags_take_values_and_names(written):
    exp = parse(DM05Exp, ["--data-config.action-mode", written])
    assert exp.data_config.action_mode.value == "relative"


@pytest.mark.parametrize("written", ["fp32_mixed", "FP32_MIXED"])
def test_choice_flags_take_either_case(written):
    exp = parse(DM05Exp, ["--model-config.precision-policy", written])
    assert exp.model_config.precision_policy == "fp32_mixed"


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--model-config.precision-polcy", "fp32_mixed"], "--model-config.precision-policy"),
        (["--optimizer-config.optim", "admaw"], "did you mean adamw?"),
        (["--data-config.action-mode", "relativ"], "did you mean relative?"),
    ],
)
def test_a_typo_exits_2_and_names_what_was_meant(argv, hint, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(DM05Exp, argv)
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert hint in (output.err + output.out).replace("\n│ ", " ")


def test_an_unknown_flag_is_one_line(capsys):
    with pytest.raises(SystemExit):
        parse(DM05Exp, ["--trainer-config.num_train_step=3"])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean --trainer-config.num-train-steps?" in error


@pytest.mark.parametrize(
    "argv",
    [
        ["--trainer-config.lr-scheduler-kwargs.min-lr-rate", "0.2"],
        ["--model-config.no-bf16"],
        ["--trainer_config.num_train_steps", "3"],
        ["--inference-config.image-prompts", "Head", "Left wrist"],
    ],
)
def test_flags_in_every_spelling_are_known(argv):
    parse(DM05Exp, argv)


def test_the_configuration_layer_imports_no_framework(run_python):
    started = time.perf_counter()
    result = run_python(
        "-c",
        "import sys, opendm.exp.dm05_exp, opendm.cli;"
        "print([m for m in ('torch', 'transformers', 'PIL', 'av') if m in sys.modules])",
    )
    assert result.stdout.strip() == "[]", result.stderr
    print(f"importing the configuration layer took {time.perf_counter() - started:.2f} s")
