"""A policy that was loaded in one thread computes in another without a second team of threads."""

import subprocess
import sys
import threading

import pytest

from opendm.infer import serve
from opendm.infer.config import DM05InferenceConfig
from opendm.infer.own_thread import in_own_thread

SCRIPT = """
import os, sys, time
import torch
from opendm.infer import Policy

def count():
    return len(os.listdir("/proc/self/task"))

before = count()
policy = Policy.from_checkpoint(sys.argv[1], dtype=torch.bfloat16)
end = time.monotonic() + 20
while count() > before and time.monotonic() < end:
    time.sleep(0.01)  # threads of a team end a little after the one that they served
after = count()
torch.ones(1 << 22).add_(1)
print(before, after, count())
"""


def test_loading_a_policy_leaves_no_threads_behind(served_checkpoint):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, served_checkpoint], check=True, capture_output=True,
        text=True, env={"PATH": "", "OMP_NUM_THREADS": "2"}, timeout=240,
    )  # fmt: skip
    before, after, computed = map(int, done.stdout.split())
    assert after <= before
    assert computed > after, "computing in the main thread starts its team"


def test_what_the_work_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        in_own_thread(lambda: 1 // 0)


def test_the_service_warms_up_in_no_thread_that_stays(served_checkpoint, monkeypatch):
    warmed = []
    monkeypatch.setattr(serve, "warm_up", lambda *_: warmed.append(threading.current_thread()))
    monkeypatch.setattr(serve, "settle", lambda: None)
    monkeypatch.setattr(serve, "run_server", lambda *_: None)
    serve.serve(served_checkpoint, DM05InferenceConfig(port=0))
    assert [thread.is_alive() for thread in warmed] == [False]
