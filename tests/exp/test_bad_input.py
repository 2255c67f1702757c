"""What a person does wrong is one line that names it, and exit code 2 or 3; never a traceback."""

import json
import shutil
from pathlib import Path

import pytest

from opendm.exp.dm05_exp import DM05DataConfig, DM05Exp, parse, run
from opendm.runtime import VALIDATE_ONLY_VARIABLE

SERVE = ("--task", "inference", "--inference-config.port", "0")
ASSETS = Path(__file__).parents[2] / "assets" / "demo"


@pytest.fixture
def attempt(tiny_checkpoint, tmp_path, capsys):
    """Run an experiment with flags; its exit code and its error line."""

    def attempt(*flags: str) -> tuple[int, str]:
        common = {
            "--model-config.model-name-or-path": str(tiny_checkpoint),
            "--model-config.chunk-size": "4",
            "--trainer-config.output-dir": str(tmp_path / "out"),
            "--trainer-config.num-train-steps": "1",
            "--trainer-config.dataloader-num-workers": "0",
            "--data-config.norm-stats-root": str(tmp_path / "stats"),
        }
        words = [word for pair in common.items() for word in pair if pair[0] not in flags]
        code = run(parse(DM05Exp, [*words, *flags]))
        error = capsys.readouterr().err
        lines = [line for line in error.splitlines() if line.startswith("error:")]
        assert "Traceback" not in error
        assert len(lines) == 1, error
        return code, lines[0]

    return attempt


@pytest.mark.parametrize(
    ("flags", "code", "expected"),
    [
        (["--data-config.dataset-name", "dmeo"], 2, "did you mean 'demo'"),
        (["--model-config.model-name-or-path", "no/such"], 2, "no/such"),
        (["--model-config.chunk-size", "0"], 2, "--model-config.chunk-size 0"),
        (["--trainer-config.num-train-steps", "0"], 2, "--trainer-config.num-train-steps 0"),
        (["--optimizer-config.base-lr", "-1"], 2, "--optimizer-config.base-lr"),
        (["--optimizer-config.base-lr", "nan"], 2, "--optimizer-config.base-lr"),
        (["--data-config.jsonl-dir", "no/folder"], 3, "no/folder"),
        (["--optimizer-config.muon-momentum", "1"], 2, "muon-momentum 1.0 is out of range"),
        (["--use-lora", "True", "--model-config.lora-config.r", "0"], 2, "lora-config.r 0"),
        (
            ["--use-lora", "True", "--model-config.lora-config.target-modules", "q_porj"],
            2,
            "the nearest are: q_proj",
        ),
        ([*SERVE], 2, "opendm.json does not exist"),
        ([*SERVE, "--inference-config.backend", "fast"], 2, "needs a GPU"),
        ([*SERVE, "--inference-config.host", "0.0.0.0"], 2, "--inference-config.no-auth"),
        (["--task", "inference", "--inference-config.port", "70000"], 2, "port 70000"),
    ],
)
def test_a_wrong_flag_is_named(attempt, flags, code, expected):
    assert expected in attempt(*flags)[1]
    assert attempt(*flags)[0] == code


@pytest.fixture
def episodes(tmp_path) -> Path:
    """A copy of one shipped episode."""
    folder = tmp_path / "episodes"
    folder.mkdir()
    shutil.copy(next((ASSETS / "heldout").glob("*.jsonl")), folder / "ep.jsonl")
    return folder


def edit(folder: Path, line_number: int, change) -> None:
    path = folder / "ep.jsonl"
    lines = path.read_text().splitlines()
    lines[line_number - 1] = change(lines[line_number - 1])
    path.write_text("\n".join(lines) + "\n")


def with_field(field, value):
    return lambda line: json.dumps(json.loads(line) | {field: value})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda line: line[:20], "not valid JSON"),
        (lambda line: "[1]", "expected a JSON object"),
        (with_field("state", [0.1, 0.2, 0.3]), "3 values"),
        (with_field("state", [0.1, None, 0.3, 0.4]), "state[1]"),
        (with_field("action", [0.1, "0.2", 0.3, 0.4]), "action[1]"),
        (lambda line: line.replace('"state": [', '"state": [NaN, ', 1), "state[0]"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(attempt, episodes, change, expected):
    edit(episodes, 7, change)
    code, line = attempt("--data-config.jsonl-dir", str(episodes))
    assert code == 3
    assert f"{episodes / 'ep.jsonl'}:7" in line
    assert expected in line


def test_a_missing_image_is_named_with_its_frame(attempt, episodes):
    for number in range(1, len((episodes / "ep.jsonl").read_text().splitlines()) + 1):
        edit(episodes, number, with_field("images_1", {"type": "image", "url": "./gone.jpg"}))
    code, line = attempt("--data-config.jsonl-dir", str(episodes))
    assert code == 3
    assert "gone.jpg" in line
    assert f"{episodes / 'ep.jsonl'}:" in line


def test_an_output_folder_with_checkpoints_is_refused(attempt, tmp_path):
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    code, line = attempt()
    assert code == 2
    assert "checkpoint-5" in line


def test_validate_only_checks_and_stops(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(VALIDATE_ONLY_VARIABLE, "1")
    exp = DM05Exp()
    exp.model_config.model_name_or_path = str(tiny_checkpoint)
    exp.trainer_config.output_dir = str(tmp_path / "out")
    assert run(exp) == 0
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().out == ""
    exp.data_config = DM05DataConfig(dataset_name="nothing")
    assert run(exp) == 2
