"""The console script runs the same code as a playground file."""

import pytest

from opendm.cli import main
from opendm.runtime import VALIDATE_ONLY_VARIABLE


def test_train_runs_an_experiment_file(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv(VALIDATE_ONLY_VARIABLE, "1")
    flags = ["--model-config.model-name-or-path", str(tiny_checkpoint)]
    flags += ["--trainer-config.output-dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        main(["train", "--exp", "playground/dm05_sft_demo.py", *flags])
    assert stop.value.code == 0
    with pytest.raises(SystemExit) as stop:
        main(["train", "--exp", "playground/dm05_sft_demo.py", "--model-config.chunk-size", "0"])
    assert stop.value.code == 2


def test_a_missing_experiment_file_is_named(capsys):
    assert main(["train", "--exp", "no/such.py"]) == 2
    assert "no/such.py" in capsys.readouterr().err


def test_an_unknown_command_exits_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["trian"])
    assert stop.value.code == 2


def test_an_unknown_dataset_is_named(tmp_path, capsys):
    arguments = ["--checkpoint", str(tmp_path), "--untrained", str(tmp_path)]
    code = main(["eval", "open-loop", *arguments, "--dataset-name", "demo_heldot"])
    assert code in (2, 3)
    assert capsys.readouterr().err.startswith("error: ")
