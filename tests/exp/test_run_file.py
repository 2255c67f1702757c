"""``run.json`` never gives away what only the service's clients may know."""

import json
from types import SimpleNamespace

import pytest
import torch

from opendm.exp.dm05_exp import DM05Exp
from opendm.exp.run_file import run_record, write_run_file
from opendm.infer.config import DM05InferenceConfig

SECRET = "a-long-secret"


@pytest.mark.parametrize(("token", "is_set"), [(SECRET, True), (None, False)])
def test_the_services_token_is_never_written_only_whether_there_is_one(tmp_path, token, is_set):
    exp = DM05Exp(inference_config=DM05InferenceConfig(token=token))
    engine = SimpleNamespace(name="none", device=torch.device("cpu"), compute_dtype=None)
    write_run_file(run_record(exp, engine, 1), tmp_path)
    text = (tmp_path / "run.json").read_text()
    assert SECRET not in text + repr(exp)
    assert json.loads(text)["config"]["inference_config"]["token"] is is_set
    assert exp.inference_config.token == token, "the service still needs it"
