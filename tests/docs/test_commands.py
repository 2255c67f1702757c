"""Every command and example in the documentation does what the page says."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from opendm.dataset import register
from opendm.exp.dm05_exp import DM05DataConfig, DM05OptimizerConfig

REPOSITORY = Path(__file__).parents[2]
PAGES = [*sorted(REPOSITORY.glob("README*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]
TRANSLATIONS = {
    "README.md": "README.zh-CN.md",
    "docs/en/data.md": "docs/zh/data.md",
    "docs/en/dm05_finetuning.md": "docs/zh/dm05_finetuning.md",
    "docs/en/dm05_inference.md": "docs/zh/dm05_inference.md",
    "docs/en/dm05_libero_lora_training.md": "docs/zh/dm05_libero_lora_training.md",
    "docs/en/optimizer.md": "docs/zh/optimizer.md",
    "docs/en/reliability.md": "docs/zh/reliability.md",
}
GUIDE = REPOSITORY / "docs/en/dm05_finetuning.md"
MARKS = ("run", "train", "parse")
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FEW_STEPS = (
    "--trainer-config.num-train-steps 2 --trainer-config.per-device-train-batch-size 1 "
    "--trainer-config.dataloader-num-workers 0"
)  # fmt: skip


def blocks(page, language):
    """(mark, text) of every block of a language on a page."""
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [(m["mark"], m["text"]) for m in found if m["language"] == language]


def english_commands(mark):
    """The commands of one mark, in reading order; translations have the same ones."""
    translated = {REPOSITORY / name for name in TRANSLATIONS.values()}
    return [
        (page, text)
        for page in PAGES
        if page not in translated
        for found, text in blocks(page, "bash")
        if found == mark
    ]


def marked_file(name):
    """The example that the guide asks to be written to ``name``."""
    found = FENCE.finditer(GUIDE.read_text(encoding="utf-8"))
    (text,) = [m["text"] for m in found if m["mark"] == f"file: {name}"]
    return text


def write_script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def write_episodes(root, frame):
    """Two episodes of a robot, their frames like the guide's."""
    for split in ("train", "heldout"):
        lines = []
        for index in range(6):
            line = frame | {
                "state": [value + 0.01 * index for value in frame["state"]],
                "action": [value + 0.01 * index + 0.01 for value in frame["action"]],
            }
            for key in ("images_1", "images_2"):
                url = frame[key]["url"].replace("0.jpg", f"{index}.jpg")
                line[key] = frame[key] | {"url": url}
                picture = root / "images" / url
                picture.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (32, 24), (40 * index, 90, 120)).save(picture)
            lines.append(json.dumps(line))
        (root / split).mkdir(parents=True)
        (root / split / "ep0.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def desk(tiny_checkpoint, tmp_path_factory):
    """A folder that looks like the repository to a reader, and keeps what commands write."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("Makefile", "assets", "opendm", "playground", "script"):
        (folder / name).symlink_to(REPOSITORY / name)
    write_script(folder / ".venv/bin/python", f'exec "{sys.executable}" "$@"')
    write_script(folder / ".venv/bin/opendm", f'exec "{sys.executable}" -m opendm.cli "$@"')
    write_script(
        folder / "checking_python",
        f'case "$1 $2" in "-m opendm.launch") exit 0 ;; esac\nexec "{sys.executable}" "$@"',
    )
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/DM05").symlink_to(tiny_checkpoint)
    (folder / "checkpoints/tiny").symlink_to(tiny_checkpoint)
    for name in ("my_data/my_robot.py", "my_experiment.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(marked_file(name))
    write_episodes(folder / "data/my_robot", json.loads(marked_file("frame.json")))
    return folder


def shell(desk, text, **environment):
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=desk, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **environment},
    )  # fmt: skip
    assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_every_command_says_how_it_is_checked(page):
    wrong = [text for mark, text in blocks(page, "bash") if mark not in MARKS]
    assert not wrong, f"mark these blocks with one of {MARKS}"
    languages = {m["language"] for m in FENCE.finditer(page.read_text(encoding="utf-8"))}
    assert languages <= {"bash", "python", "json", "text"}


@pytest.mark.parametrize(("english", "chinese"), TRANSLATIONS.items())
def test_translations_have_the_same_blocks_byte_for_byte(english, chinese):
    pages = [(REPOSITORY / name).read_text(encoding="utf-8") for name in (english, chinese)]
    first, second = ([m[0] for m in FENCE.finditer(page)] for page in pages)
    assert first == second


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links_and_named_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:opendm|tests|playground|script)/[\w/]+(?:\.\w+)?/?)[:`]", text):
        assert (REPOSITORY / name).exists(), name
    for name, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert f"def {test}(" in (REPOSITORY / name).read_text(), f"{name}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_examples_compile(page):
    for mark, text in blocks(page, "python"):
        compile(text, f"{page.name}: {mark}", "exec")
    for _, text in blocks(page, "json"):
        json.loads(text)


def test_hooks_have_the_signatures_of_the_code():
    ((_, text),) = [block for block in blocks(GUIDE, "python") if block[0] == "hooks"]
    classes = {cls.__name__: cls for cls in (DM05DataConfig, DM05OptimizerConfig)}
    seen = set()
    for node in ast.parse(text).body:
        for method in node.body:
            parameters = inspect.signature(getattr(classes[node.name], method.name)).parameters
            given = [*method.args.args, *method.args.kwonlyargs]
            assert list(parameters) == [argument.arg for argument in given]
            seen.add(method.name)
    assert len(seen) == 4


def test_the_registration_example_registers_what_the_guide_says(desk, monkeypatch):
    monkeypatch.setattr(register, "CONVERSATION_DATA", {})
    register.import_catalogue([str(desk / "my_data")])
    for split in ("train", "heldout"):
        fields = register.dataset_fields(f"my_robot_{split}")
        assert Path(fields["jsonl_dir"]) == desk / "data/my_robot" / split
        assert len(fields["state_desc"]) == len(json.loads(marked_file("frame.json"))["state"])


def test_commands_that_need_gpus_or_minutes_are_well_formed(desk):
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for page, text in english_commands("parse"):
        made = re.findall(r"^make (\S+)$", text, re.MULTILINE)
        assert set(made) <= targets, page
        rest = re.sub(r"^make \S+\n", "", text, flags=re.MULTILINE)
        if rest.strip():
            python = str(desk / "checking_python")
            shell(desk, rest, OPENDM_VALIDATE_ONLY="1", OPENDM_PYTHON=python)


def test_a_wrong_flag_in_a_checked_command_is_noticed(desk):
    (command,) = [t for page, t in english_commands("parse") if "user_checkpoints/eight" in t]
    wrong = command.replace("--trainer-config.output-dir", "--trainer-config.output-folder")
    python = str(desk / "checking_python")
    with pytest.raises(AssertionError, match="output-folder"):
        shell(desk, wrong, OPENDM_VALIDATE_ONLY="1", OPENDM_PYTHON=python)


def test_training_and_the_commands_around_it_work_as_printed(desk):
    (desk / "checkpoints/tiny").unlink()  # README makes its own
    order = [
        (page, mark, text)
        for page in (REPOSITORY / "README.md", GUIDE)
        for mark, text in blocks(page, "bash")
        if mark in ("run", "train")
    ]
    assert len(order) == len(english_commands("run")) + len(english_commands("train"))
    assert sum(mark == "train" for _, mark, _ in order) == 2, "training takes time"
    for _, mark, text in order:
        few = f" {FEW_STEPS}" if mark == "train" else ""
        shell(desk, text.rstrip("\n") + few)
    for output in ("one_process", "my_robot"):
        lines = (desk / "user_checkpoints" / output / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (desk / "user_checkpoints/my_robot/report.html").is_file()
