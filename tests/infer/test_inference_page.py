"""Every example on the inference page runs against a service and does what the page says."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from policies import CHUNK
from service_kit import Running, make_service, picture

REPOSITORY = Path(__file__).parents[2]
BLOCK = re.compile(r"^<!-- ([^\n]*) -->\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page(language):
    return (REPOSITORY / f"docs/{language}/dm05_inference.md").read_text(encoding="utf-8")


def examples(mark):
    return [text for found, text in BLOCK.findall(page("en")) if found == mark]


@pytest.fixture(scope="module")
def running(served_policy, served_checkpoint):
    service = make_service(served_policy, served_checkpoint)
    with Running(service) as running:
        yield running
    service.worker.close()


def test_both_languages_have_the_same_examples():
    assert BLOCK.findall(page("en")) == BLOCK.findall(page("zh"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("mark", "key"), [("curl: infer", "actions"), ("curl: form", "response")])
def test_the_curl_examples_are_answered(running, tmp_path, mark, key):
    for seed, name in enumerate(("corner.jpg", "gripper.jpg")):
        (tmp_path / name).write_bytes(picture(seed, kind="JPEG"))
    (command,) = examples(mark)
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command.replace(":7891", f":{running.port}")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    reply = json.loads(result.stdout)
    assert np.shape(reply[key]) == (CHUNK, 4)


def test_the_python_examples_run_in_the_order_of_the_page(running, served_checkpoint):
    names = {}
    (policy,), (client,), (runner,) = examples("policy"), examples("client"), examples("runner")
    exec(policy.replace("user_checkpoints/my_robot", str(served_checkpoint)), names)
    assert names["actions"].shape == (CHUNK, 4)
    exec(client.replace(":7891", f":{running.port}"), names)
    assert names["actions"].shape == (CHUNK, 4)
    assert names["horizon"] == CHUNK
    exec(runner, names)
    assert names["runner"].error is None


def test_the_flags_of_the_page_have_the_documented_defaults():
    from opendm.infer.config import DM05InferenceConfig

    config = DM05InferenceConfig()
    rows = re.findall(r"^\| `([\w-]+)` \| `?([\w-]+)`? \|", page("en"), re.MULTILINE)
    assert len(rows) == 10
    for flag, default in rows:
        value = getattr(config, flag.replace("-", "_"))
        shown = {"False": "off"}.get(
            str(value), f"{value:g}" if isinstance(value, float) else value
        )
        assert str(shown) == default, flag
