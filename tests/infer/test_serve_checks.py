"""What is checked before the first request, whose failure one is, and the end of a worker."""

import gc
import json
import logging
import multiprocessing
import os
import platform
import resource
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from policies import make_layout
from service_kit import InProcess, valid

from opendm.data.normalize import NormStats, NormStatsFile
from opendm.errors import CheckpointError, ConfigError, DataError
from opendm.infer.config import DM05InferenceConfig
from opendm.infer.layout import check_words
from opendm.infer.limits import RequestError
from opendm.infer.observation import Observation
from opendm.infer.policy import Policy, Prepared
from opendm.infer.reply import chunk_reply
from opendm.infer.request import Request
from opendm.infer.serve import check_against_checkpoint, settle, warm_up
from opendm.infer.worker import MAX_FAILURES, PolicyWorker

WAIT_S = 20


def linked(source, folder, name, content):
    """The checkpoint with one file replaced."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name != name:
            (folder / path.name).symlink_to(path)
    (folder / name).write_text(json.dumps(content))
    return folder


# Words


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"image_prompts": ["Corner", "a<start_of_image>"]}, r"image_prompts\[1\]"),
        ({"speed": "<end_of_turn>"}, "speed"),
        ({"control_mode": "eef <unused0>"}, "control_mode"),
        ({"robots": {"<eos>": {}}}, "robots"),
        (
            {"robots": {"Arm": {"image_prompts": ["Top", "<bos>"]}}},
            r"robots\[Arm\]\.image_prompts\[1\]",
        ),
    ],
)
def test_a_word_of_the_layout_that_holds_a_reserved_token_is_refused_at_load(
    served_checkpoint, tmp_path, changes, key
):
    make_layout(**changes).save(tmp_path)
    content = json.loads((tmp_path / "opendm.json").read_text())
    folder = linked(served_checkpoint, tmp_path / "all", "opendm.json", content)
    with pytest.raises(CheckpointError, match=rf"all/opendm\.json: key '{key}' holds the reserved"):
        Policy.from_checkpoint(folder)


def test_ordinary_words_of_a_layout_pass():
    check_words(make_layout(speed="0.5 < 1", control_mode="eef"), {"<bos>"}, "opendm.json")


# Statistics


@pytest.mark.parametrize("key", ["state", "action"])
@pytest.mark.parametrize("robot", ["Sawyer", None])
def test_statistics_without_a_part_are_refused_with_file_and_key(
    served_checkpoint, tmp_path, key, robot
):
    content = json.loads((served_checkpoint / "norm_stats.json").read_text())
    if robot is None:
        content = {"norm_stats": content["norm_stats"]}
    for entry in (content, content.get("norm_stats_by_robot", {})):
        for profile in entry.values():
            if isinstance(profile, dict):
                profile.pop(key, None)
    folder = linked(served_checkpoint, tmp_path / "all", "norm_stats.json", content)
    with pytest.raises((CheckpointError, DataError), match=rf"all/norm_stats\.json.*'{key}'"):
        Policy.from_checkpoint(folder)


def test_a_state_of_another_length_is_refused_at_the_start_and_in_a_request(
    served_policy, start_service
):
    """Where opendm.json does not say what the state is, the statistics do."""
    three = NormStats(*(np.full(3, value) for value in (0.0, 1.0, -1.0, 1.0)))
    profile = served_policy.norm_stats.profiles["Sawyer"]
    stats = NormStatsFile({"Sawyer": {**profile, "state": three}}, "Sawyer")
    wrong = Policy(served_policy.model, served_policy.processor, served_policy.layout, stats)
    with pytest.raises(CheckpointError, match=r"3 values of the state and opendm\.json 4"):
        check_against_checkpoint(wrong, DM05InferenceConfig())
    plain = make_layout(state_desc=None, action_mode="absolute")
    policy = Policy(served_policy.model, served_policy.processor, plain, served_policy.norm_stats)
    app = InProcess(start_service(policy))
    assert app.infer(valid(0))[0] == 200
    status, reply = app.infer(valid(0, state=[0.1, 0.2, 0.3]))
    assert status == 400
    assert "3 values, expected 4" in reply["error"]


# Flags


def test_another_order_of_the_state_is_refused():
    DM05InferenceConfig(state_layout="identity").validate()
    with pytest.raises(ConfigError, match="state-layout 'swapped' is unknown"):
        DM05InferenceConfig(state_layout="swapped").validate()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({}, []),
        ({"vision_trt_engine_path": "x.engine"}, ["vision-trt-engine-path has no effect"]),
        (
            {"vision_trt_engine_path": "x.engine", "force_rebuild": True, "backend": "fast"},
            ["vision-trt-engine-path and force-rebuild has no effect"],
        ),
        ({"fast_prefix_len": 2048}, ["fast-prefix-len has no effect"]),
        ({"fast_prefix_len": 2048, "backend": "fast"}, []),
    ],
)
def test_a_flag_without_effect_is_told_in_one_line(flags, told, caplog):
    DM05InferenceConfig(**flags).warn_of_unused()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(told)
    assert all(part in message for part, message in zip(told, messages, strict=True))


# Whose failure it is


def fail_for(policy, seeds, error):
    """The policy's sampler, which fails where it is given the noise of one of the seeds."""
    usual, ill = policy.sampler, [policy.noise_for([seed])[0] for seed in seeds]

    def sampler(inputs, noise, mask, steps):
        if any(np.array_equal(one, start) for one in noise for start in ill):
            raise error
        return usual(inputs, noise, mask, steps)

    return sampler


@pytest.mark.parametrize("error", [RuntimeError("odd"), DataError("prompt does not fit")])
def test_requests_that_only_their_senders_broke_never_make_the_service_unready(
    served_policy, start_service, monkeypatch, error
):
    service = start_service(served_policy)
    service.worker.probe = lambda: warm_up(served_policy, 1)
    app = InProcess(service)
    monkeypatch.setattr(served_policy, "sampler", fail_for(served_policy, [13], error))
    for _ in range(2 * MAX_FAILURES + 1):
        assert app.infer(valid(13))[0] == (400 if isinstance(error, DataError) else 500)
        assert app("GET", "/readyz")[0] == 200
    assert app.infer(valid(1))[0] == 200


def test_a_model_that_fails_its_own_observation_too_is_not_ready(
    served_policy, start_service, monkeypatch
):
    service = start_service(served_policy)
    service.worker.probe = lambda: warm_up(served_policy, 1)
    app = InProcess(service)
    with monkeypatch.context() as patch:
        patch.setattr(served_policy, "sampler", fail_for(served_policy, [0, 13], RuntimeError()))
        for _ in range(MAX_FAILURES):
            assert app("GET", "/readyz")[0] == 200
            assert app.infer(valid(13))[0] == 500
        assert app("GET", "/readyz")[0] == 503
    assert app.infer(valid(13))[0] == 200
    assert app("GET", "/readyz")[0] == 200


# A worker that cannot end


class HangingPolicy(Policy):
    def __init__(self):
        self.began, self.gate = threading.Event(), threading.Event()

    def prepare(self, observation):
        return Prepared({}, np.array(observation.state), {}, make_layout())

    def draw_noise(self, generators):
        return [None] * len(generators)

    def act_prepared(self, prepared, **_):
        self.began.set()
        assert self.gate.wait(WAIT_S)
        return [one.state[None] for one in prepared]


@pytest.mark.parametrize("num_waiting", [1, 2])
def test_a_model_that_hangs_is_given_up_and_everyone_is_told(caplog, num_waiting):
    """With two the queue is full, so that not even the sign to stop fits."""
    policy = HangingPolicy()
    worker = PolicyWorker(policy, num_steps=1, max_queue=1, max_batch=1, window_s=0.0)
    worker.start()
    answers = [Future() for _ in range(1 + num_waiting)]
    for number, answer in enumerate(answers):
        worker.submit(Request(Observation([float(number)], {}, ""), 0), answer)
        assert policy.began.wait(WAIT_S)
    begin = time.monotonic()
    with caplog.at_level(logging.ERROR, "opendm.infer.worker"):
        worker.close(timeout_s=0.2)
    assert time.monotonic() - begin < WAIT_S / 4
    assert f"1 requests that it works on and {num_waiting} that wait" in caplog.text
    for answer in answers:
        error = answer.exception(0)
        assert isinstance(error, RequestError)
        assert error.status == 503
    policy.gate.set()
    worker._thread.join(WAIT_S)
    assert not worker._thread.is_alive(), "it ends when the model comes back"


# Replies


def test_actions_that_are_not_finite_are_never_written():
    """orjson would write null."""
    assert chunk_reply("a", np.ones((1, 1), np.float32), {}).body == b'{"a":[[1.0]]}'
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match="not finite"):
            chunk_reply("a", np.full((1, 1), value, np.float32), {})


# What the process does on its own


def page_faults(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def use_and_free():
    for _ in range(8):
        parts = [np.ones(16 * 2**20, np.uint8) for _ in range(3)]
        del parts


def settle_and_tell(pipe):
    """(frozen objects, seconds of a full collection, page faults) in a process of its own."""
    settle()
    use_and_free()
    begin = time.process_time()
    gc.collect()
    taken_s = time.process_time() - begin
    pipe.send((gc.get_freeze_count(), taken_s, page_faults(use_and_free)))
    os._exit(0)


def test_a_settled_process_neither_searches_its_modules_nor_gives_its_memory_back():
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=settle_and_tell, args=(theirs,))
    child.start()
    assert ours.poll(WAIT_S)
    num_frozen, taken_s, num_faults = ours.recv()
    child.join()
    assert num_frozen > 100_000
    assert taken_s < 0.05
    if platform.libc_ver()[0] == "glibc":
        assert num_faults < 100, "otherwise 8 times 48 MB are fetched in pages of 4 kB"
