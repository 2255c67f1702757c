"""The whole check: exit codes, JSON, exact counts, prompts, cameras, statistics, one batch."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opendm.check.config import DM05CheckConfig
from opendm.check.prompts import PromptShape, check_cameras, check_prompts, measure_tokens
from opendm.check.run import CheckedRun, check, check_briefly
from opendm.cli import main
from opendm.data.config import DM05DataConfig
from opendm.data.normalize import NormStatsFile
from opendm.data.processor import load_processor
from opendm.dataset.register import CONVERSATION_DATA
from opendm.errors import DataError
from opendm.exp.checking import check_before_training
from opendm.exp.dm05_exp import DM05Exp, run
from opendm.model.dm05.config import DM05ModelConfig
from opendm.trainer.config import DM05TrainerConfig

FRAMES = 12
PLAYGROUND = Path(__file__).parents[2] / "playground" / "dm05_sft_demo.py"
NAME = "checked_set"


def write_set(folder):
    """Four episodes of two cameras; joints near 1 and 2, a gripper that opens and closes."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    for episode in range(4):
        lines = []
        for frame in range(FRAMES):
            record = {"prompt": f"pick up cube {episode % 2}"}
            for camera in ("images_1", "images_2"):
                url = f"images/{episode}_{frame}_{camera}.jpg"
                pixels = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / url)
                record[camera] = {"type": "image", "url": url}
            state = [*rng.normal([1, 2], 0.2), float(rng.random())]
            record["state"] = state
            record["action"] = [*(np.array(state[:2]) + 0.05), float(rng.integers(2))]
            lines.append(json.dumps(record))
        (folder / f"e{episode}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    root = write_set(tmp_path / "set")
    fields = {
        "jsonl_dir": str(root),
        "image_dir": str(root),
        "image_keys": ["images_1", "images_2"],
        "image_prompts": ["Head", "Wrist"],
        "state_desc": ["joint", "joint", "gripper"],
        "robot_type": "Franka",
    }
    monkeypatch.setitem(CONVERSATION_DATA, NAME, fields)
    return root


@pytest.fixture
def checked(folder, tmp_path, tiny_checkpoint):
    return CheckedRun(
        DM05DataConfig(
            dataset_name=NAME,
            norm_stats_root=str(tmp_path / "stats"),
            index_root=str(tmp_path / "index"),
        ),
        DM05ModelConfig(model_name_or_path=str(tiny_checkpoint), chunk_size=4),
        DM05TrainerConfig(per_device_train_batch_size=2),
    )


def look(run_parts, **options):
    return check(run_parts, DM05CheckConfig(model=False, **options))


def spoil(path, line, **changes):
    lines = path.read_text().splitlines()
    lines[line - 1] = json.dumps({**json.loads(lines[line - 1]), **changes})
    path.write_text("\n".join(lines) + "\n")


def test_a_good_set_passes_with_one_batch_through_the_model(checked):
    report = check(checked, DM05CheckConfig())
    assert report.problems == []
    assert report.counts["frames"] == report.counts["samples"] == 4 * FRAMES
    assert report.counts["left_out_frames"] == 0
    assert np.isfinite(report.counts["loss"])
    assert check(checked, DM05CheckConfig()).counts["loss"] == report.counts["loss"]


def test_problems_of_all_kinds_are_found_in_one_pass(checked, folder):
    spoil(folder / "e0.jsonl", 3, state=[1, None, 0])
    spoil(folder / "e1.jsonl", 5, prompt="")
    (folder / "images" / "2_6_images_2.jpg").write_bytes(b"no picture")
    (folder / "images" / "3_0_images_1.jpg").unlink()
    report = look(checked)
    assert {(problem.where, problem.field) for problem in report.errors} == {
        (f"{folder}/e0.jsonl:3", "state[1]"),
        (f"{folder}/e1.jsonl:5", "prompt"),
        (f"{folder}/e2.jsonl:7", "images_2.url"),
        (f"{folder}/e3.jsonl:1", "images_1.url"),
    }
    assert report.counts["left_out_frames"] == FRAMES - 2


def test_skip_mode_counts_exactly_what_it_leaves_out(checked, folder):
    spoil(folder / "e0.jsonl", 3, state=[1, None, 0])
    spoil(folder / "e0.jsonl", 6, action="none")
    spoil(folder / "e2.jsonl", 11, state=[1])
    skips = replace(checked, data=replace(checked.data, bad_records="skip"))
    report = look(skips)
    assert report.errors == []
    assert [p.where for p in report.warnings if p.code.startswith("vector")] == [
        f"{folder}/e0.jsonl:3",
        f"{folder}/e0.jsonl:6",
        f"{folder}/e2.jsonl:11",
    ]
    lost = (FRAMES - 2) + (FRAMES - 10)
    assert report.counts["left_out_frames"] == lost
    assert report.counts["left_out_episodes"] == 2
    assert (
        report.counts["samples"]
        == 4 * FRAMES - lost
        == len(skips.data.open_source("train").source.index.state)
    )


def test_a_problem_that_skip_mode_would_keep_stays_an_error(checked, folder):
    spoil(folder / "e0.jsonl", 3, images_2={"type": "image"})
    skips = replace(checked, data=replace(checked.data, bad_records="skip"))
    assert [problem.where for problem in look(skips).errors] == [f"{folder}/e0.jsonl:3"]


def test_skip_mode_warns_of_bad_pictures_unless_all_are_bad(checked, folder):
    skips = replace(checked, data=replace(checked.data, bad_records="skip"))
    bad = [folder / "images" / f"{episode}_6_images_2.jpg" for episode in range(4)]
    contents = (None, b"", b"no picture", bad[3].read_bytes()[:300])
    for path, content in zip(bad, contents, strict=True):
        path.unlink() if content is None else path.write_bytes(content)
    for report in (look(skips), check_briefly(skips)):
        assert report.errors == []
        named = [p.where for p in report.warnings if p.code.startswith("picture")]
        assert named == [f"{folder}/e{episode}.jsonl:7" for episode in range(4)]
    assert look(skips).counts["bad_pictures"] == 4
    assert len(look(checked).errors) == len(check_briefly(checked).errors) == 4
    for path in folder.glob("images/*"):
        path.write_bytes(b"")
    assert len(look(skips).errors) == 2 * 4 * FRAMES
    assert len(check_briefly(skips).errors) == 8


def make_exp(checked, **options):
    return DM05Exp(
        task="check",
        data_config=checked.data,
        model_config=checked.model,
        trainer_config=checked.trainer,
        check_config=DM05CheckConfig(model=False, **options),
    )


def test_exit_codes_and_json(checked, folder, tmp_path, capsys):
    path = tmp_path / "out" / "findings.json"
    assert run(make_exp(checked, json_path=str(path))) == 0
    assert json.loads(path.read_text())["errors"] == 0
    spoil(folder / "e1.jsonl", 5, action=[1, 2, True])
    assert run(make_exp(checked, json_path=str(path))) == 3
    written = json.loads(path.read_text())
    [problem] = written["problems"]
    assert problem["where"] == f"{folder}/e1.jsonl:5"
    assert problem["field"] == "action[2]"
    assert written["counts"]["frames"] == 4 * FRAMES
    output = capsys.readouterr()
    assert f"error: {folder}/e1.jsonl:5 action[2] is True" in output.out
    assert "1 errors" in output.err


def test_the_command_takes_the_flags_of_training(checked, folder, tmp_path, capsys):
    path = tmp_path / "findings.json"
    words = ["check", "--exp", str(PLAYGROUND), "--no-model", "--json", str(path)]
    for flag, value in (
        ("--data-config.dataset-name", NAME),
        ("--data-config.index-root", checked.data.index_root),
        ("--data-config.norm-stats-root", checked.data.norm_stats_root),
        ("--model-config.model-name-or-path", checked.model.model_name_or_path),
        ("--model-config.chunk-size", "4"),
    ):
        words += [flag, value]
    codes = []
    for _ in range(2):
        with pytest.raises(SystemExit) as stop:
            main(words)
        codes.append(stop.value.code)
        spoil(folder / "e1.jsonl", 2, prompt=7)
    assert codes == [0, 3]
    assert json.loads(path.read_text())["problems"][0]["where"] == f"{folder}/e1.jsonl:2"
    assert main(["check", "--exp", "no/such.py"]) == 2


def test_training_ends_with_3_before_a_model_is_built(checked, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(DM05ModelConfig, "build_model", lambda *_, **__: pytest.fail("built"))
    for picture in folder.glob("images/*_images_2.jpg"):
        picture.write_bytes(b"no picture")
    exp = replace(make_exp(checked), task="train")
    exp.trainer_config.output_dir = str(tmp_path / "run")
    assert run(exp) == 3


def test_strict_lets_warnings_stop(checked, folder):
    (folder / "e4.jsonl").touch()
    assert run(make_exp(checked)) == 0
    assert run(make_exp(checked, strict=True)) == 3


def test_the_short_form_warns_and_refuses_before_a_model_is_built(checked, folder, caplog):
    exp = make_exp(checked)
    with caplog.at_level(logging.WARNING):
        check_before_training(exp, 64)
    assert "samples are 48, fewer than the 128 of one step" in caplog.text
    for path in folder.glob("images/*_6_*.jpg"):
        path.unlink()
    with pytest.raises(DataError, match=r"e0\.jsonl:7 images_1\.url"):
        check_before_training(exp, 1)


def test_a_camera_of_another_name_is_suggested(checked, folder):
    CONVERSATION_DATA[NAME]["image_keys"] = ["images_1", "imagee_2"]
    report = look(checked)
    assert {(p.field, p.code) for p in report.problems} == {
        ("imagee_2", "camera_unknown"),
        ("images_2", "camera_unused"),
    }
    assert "'images_2'" in next(p.reason for p in report.errors)
    assert not list(check_cameras(["a"], {"a": 3}, 3, "set"))


def test_tasks_are_measured_as_training_tokenises_them(checked, tiny_checkpoint):
    processor = load_processor(str(tiny_checkpoint))
    shape = PromptShape(["Head", "Wrist"], 3, 256, 1024, {"robot_type": "Franka"})
    tasks = [" ".join(["press the button"] * count) for count in range(1, 30)]
    tokens = measure_tokens(tasks, processor, shape)
    assert tokens.longest == tasks[-1]
    assert sum(count for *_, count in tokens.histogram()) == len(tasks)
    dataset = checked.data
    dataset.compute_norm_stats(4)
    sample = dataset.build_dataset(processor, 4, 1024)[0]
    own = measure_tokens(["pick up cube 0"], processor, shape).lengths["pick up cube 0"]
    assert own - 6 <= len(sample["input_ids"]) <= own  # a bin has one to three digits


def test_long_and_reserved_tasks_are_named(tiny_checkpoint):
    processor = load_processor(str(tiny_checkpoint))
    shape = PromptShape(["Head"], 3, 256, 120, {})
    places = {"go": "a:1", "go " * 200: "b:7", "say <eos> now": "c:9"}
    problems, _ = check_prompts(places, processor, shape)
    assert {(p.where, p.code, p.severity) for p in problems} == {
        ("b:7", "prompt_tokens", "warning"),
        ("c:9", "reserved_token", "error"),
    }
    problems, _ = check_prompts({"go": "a:1"}, processor, replace(shape, max_length=20))
    assert "prompt_limit" in {problem.code for problem in problems}


def test_stale_and_foreign_statistics_are_said(checked, folder):
    path = checked.data.compute_norm_stats(4)
    assert look(checked).problems == []
    spoil(folder / "e0.jsonl", 3, state=[9, 9, 1])
    assert [p.code for p in look(checked).problems] == ["stale_statistics"]
    file = NormStatsFile.load(path)
    action = file.profiles["Franka"]["action"]
    file.profiles["Franka"]["action"] = replace(
        action, q01=action.q01 * 1e-3, q99=action.q99 * 1e-3
    )
    file.opendm = {}
    file.save(path)
    assert {(p.field, p.code) for p in look(checked).problems} >= {("action", "scale")}
    path.write_text("{")
    assert [p.code for p in look(checked).errors] == ["statistics"]


def test_the_short_form_opens_few_pictures(checked, folder, monkeypatch):
    opened = []
    original = Image.open
    monkeypatch.setattr(Image, "open", lambda *a, **k: opened.append(a) or original(*a, **k))
    assert check_briefly(checked).problems == []
    assert 0 < len(opened) <= 16


def test_a_copy_of_a_held_out_episode_is_an_error_of_both_forms(checked, folder):
    held = replace(checked, data=replace(checked.data, val_episodes=1))
    [number] = held.data.open_source("val").episodes
    name = held.data.open_source("val").source.index.episodes[number]
    assert look(held).problems == []
    for attempt in range(40):  # until the hash of the name puts the copy into training
        copy = folder / f"copy{attempt}.jsonl"
        copy.write_bytes((folder / name).read_bytes())
        selected = held.data.open_source("val")
        if selected.source.index.episodes[selected.episodes[0]] == name:
            break
        copy.unlink()
    for report in (look(held), check_briefly(held)):
        [problem] = report.errors
        assert problem.code == "held_out_copy"
        assert f"{copy.name} = {name}" in problem.reason
    assert {p.code for p in look(checked).problems} == {"duplicate_episode"}


def test_all_datasets_of_a_mixture_are_checked(checked, folder, tmp_path, monkeypatch):
    other = write_set(tmp_path / "other")
    fields = CONVERSATION_DATA[NAME] | {"jsonl_dir": str(other), "image_dir": str(other)}
    monkeypatch.setitem(CONVERSATION_DATA, "other_set", fields)
    spoil(other / "e3.jsonl", 2, prompt=None)
    mixed = replace(checked, data=replace(checked.data, datasets=[NAME, "other_set"]))
    report = look(mixed)
    assert [problem.where for problem in report.errors] == [f"{other}/e3.jsonl:2"]
    assert report.counts["frames"] == 8 * FRAMES
    assert check_briefly(replace(mixed, data=replace(mixed.data, bad_records="skip"))).errors == []
