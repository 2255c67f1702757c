"""The console script runs the same code as a playground file."""

import pytest

from opendm.cli import main
from opendm.runtime import VALIDATE_ONLY_VARIABLE
from opendm.trainer.checkpoint_folder import begin, commit


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


def test_export_leaves_out_what_only_a_resume_needs(tmp_path, capsys):
    checkpoint = begin(tmp_path / "run", 3)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    (checkpoint / "state").mkdir()
    (checkpoint / "state" / "state.json").write_text("{}")
    checkpoint = commit(checkpoint, 3, {})
    output = tmp_path / "plain"
    words = ["export", "--checkpoint", str(checkpoint), "--output", str(output)]
    assert main(words) == 0
    assert [path.name for path in output.rglob("*")] == ["model.safetensors"]
    assert (output / "model.safetensors").read_bytes() == b"weights"
    assert main(words) == 2
    assert "exists" in capsys.readouterr().err
    (checkpoint / "model.safetensors").write_bytes(b"weightz")
    assert main([*words[:-1], str(tmp_path / "other")]) == 2
    assert "model.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
