"""``run.json``: what of a registration it holds, and what only the service's clients may know."""

import json
from types import SimpleNamespace

import pytest
import torch

from opendm.constants.robot import RobotStateDesc
from opendm.dataset.register import CONVERSATION_DATA
from opendm.exp import training
from opendm.exp.dm05_exp import DM05Exp
from opendm.exp.run_file import run_record, write_run_file
from opendm.infer.config import DM05InferenceConfig
from opendm.trainer.rank_agreement import first_difference

SECRET = "a-long-secret"
ENGINE = SimpleNamespace(name="none", device=torch.device("cpu"), compute_dtype=None)


@pytest.mark.parametrize(("token", "is_set"), [(SECRET, True), (None, False)])
def test_the_services_token_is_never_written_only_whether_there_is_one(tmp_path, token, is_set):
    exp = DM05Exp(inference_config=DM05InferenceConfig(token=token))
    write_run_file(run_record(exp, ENGINE, 1), tmp_path)
    text = (tmp_path / "run.json").read_text()
    assert SECRET not in text + repr(exp)
    assert json.loads(text)["config"]["inference_config"]["token"] is is_set
    assert exp.inference_config.token == token, "the service still needs it"


def test_the_registration_is_recorded_without_its_folders(monkeypatch):
    fields = CONVERSATION_DATA["demo"]
    said = {
        "image_keys": ["images_2"],
        "image_prompts": ["Wrist"],
        "state_desc": [RobotStateDesc.JOINT],
        "robot_type": "Arm",
        "speed": "fast",
        "control_mode": "joint",
        "fps": 30,
        "action_mode": "relative",
        "episodes": [0, 1],
        "angle_dims": [0],
    }
    folders = {key: fields[key] for key in ("jsonl_dir", "image_dir")}
    monkeypatch.setitem(CONVERSATION_DATA, "told", {**folders, **said, "columns": None})
    exp = DM05Exp()
    exp.data_config.datasets = ["told", "demo"]
    monkeypatch.setattr(type(exp.data_config), "fingerprint", lambda _: "")
    written = run_record(exp, ENGINE, 1)["registration"]
    assert written["0"] == {**said, "state_desc": ["joint"]}
    assert written["1"]["image_prompts"] == fields["image_prompts"]
    assert not {"jsonl_dir", "image_dir"} & written["1"].keys()


def test_ranks_compare_their_registrations(monkeypatch):
    stated = []
    monkeypatch.setattr(training, "compare", lambda facts, _: stated.append(facts))
    for prompt in ("Front", "Top"):
        run = {"config": {}, "registration": {"0": {"image_prompts": [prompt]}}}
        training.compare_ranks(run, {})
    assert "registration.0.image_prompts: ['Top'] instead of ['Front']" in first_difference(stated)
