"""The service: what it answers, whom it serves, and how it ends."""

import ast
import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from policies import make_layout
from service_kit import (
    STATE,
    STEPS,
    InProcess,
    Running,
    b64,
    form,
    picture,
    strict,
    valid,
)

from opendm.cli import main
from opendm.errors import CheckpointError, ConfigError
from opendm.infer.client import PolicyClient, ServiceError
from opendm.infer.config import DM05InferenceConfig
from opendm.infer.limits import Limits
from opendm.infer.policy import Observation, Policy
from opendm.infer.serve import (
    check_access,
    check_against_checkpoint,
    checkpoint_hash,
    make_contract,
    serve,
)

REPOSITORY = Path(__file__).parents[2]
WAIT_S = 30


def observation(seed):
    images = {"images_1": picture(2 * seed), "images_2": picture(2 * seed + 1)}
    return Observation(STATE, images, "Reach")


def expected(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    return policy.act(observation(seed), num_steps=STEPS, generator=generator)


# What is answered


def test_a_reply_holds_the_policys_actions_exactly(app, served_policy):
    status, reply = app.infer(valid(5))
    assert status == 200
    assert reply.keys() == {"actions", "metadata"}
    assert reply["metadata"].keys() == {"latency_ms"}
    actions = np.asarray(reply["actions"], dtype=np.float32)
    np.testing.assert_array_equal(actions, expected(served_policy, 5))


def test_both_routes_take_every_form_of_a_request(app):
    _, plain = app.infer(valid(1))
    variants = [
        valid(1, state=json.dumps(STATE)),
        valid(1, images={"2": "data:image/png;base64," + b64(picture(3)), "1": b64(picture(2))}),
        valid(1, robot_type="Sawyer", history_images=[]),
    ]
    variants.append(valid(1))
    variants[-1]["sampling"]["num_steps"] = STEPS
    for variant in variants:
        assert app.infer(variant)[1]["actions"] == plain["actions"]
    assert app.infer({"observation": valid(1)["observation"]})[0] == 200
    fields = [
        ("states", json.dumps(STATE)), ("text", "Reach"), ("speed", "0.5"),
        ("image", "a.png", picture(2)), ("image", "b.png", picture(3)),
    ]  # fmt: skip
    body, headers = form(fields)
    status, _, content = app("POST", "/process_frame", body, headers)
    reply = strict(content)
    assert status == 200
    assert reply.keys() == {"response", "model_latency_ms"}
    assert np.shape(reply["response"]) == np.shape(plain["actions"])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_the_three_formats_are_decoded(app, kind):
    images = {"1": b64(picture(0, kind=kind)), "2": b64(picture(1, kind=kind))}
    assert app.infer(valid(0, images=images))[0] == 200


def test_words_of_a_request_reach_the_prompt(app):
    plain = app.infer(valid(1))[1]["actions"]
    for change in ({"prompt": "Push"}, {"speed": "1.0"}, {"control_mode": "joint"}):
        assert app.infer(valid(1, **change))[1]["actions"] != plain


def test_health_and_metadata_are_told(app, served_checkpoint):
    assert strict(app("GET", "/healthz")[2]) == {"status": "ok"}
    assert strict(app("GET", "/readyz")[2]) == {"status": "ready"}
    told = strict(app("GET", "/metadata")[2])
    assert told["checkpoint"] == checkpoint_hash(served_checkpoint)
    assert [camera["prompt"] for camera in told["cameras"]] == ["Corner", "Gripper"]
    assert (told["horizon"], told["action_dim"], told["num_steps"]) == (6, 4, STEPS)
    assert told["state"] == make_layout().state_desc


def test_the_hash_changes_with_any_file_that_matters(served_checkpoint, tmp_path):
    for path in served_checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    same = checkpoint_hash(tmp_path)
    assert same == checkpoint_hash(served_checkpoint)
    stats = tmp_path / "norm_stats.json"
    stats.write_text(stats.read_text().replace("0.3", "0.4"))
    assert checkpoint_hash(tmp_path) != same


def test_a_wrong_number_of_the_state_is_named(app):
    for index, literal in ((1, "NaN"), (0, "null"), (2, "true"), (3, '"1.5"'), (1, "9" * 400)):
        values = [str(number) for number in STATE]
        values[index] = literal
        text = json.dumps(valid(0, state=["S"])).replace('["S"]', f"[{', '.join(values)}]")
        status, _, content = app("POST", "/v1/infer", text.encode())
        assert status == 400
        assert f"state[{index}]" in strict(content)["error"]


def test_unknown_fields_are_refused_by_name_or_ignored_with_one_warning(app, caplog):
    status, reply = app.infer(valid(0, temperature=1))
    assert status == 400
    assert "observation.temperature" in reply["error"]
    fields = [
        ("states", json.dumps(STATE)), ("image", "a.png", picture(0)), ("robot", "x\n[31m"),
        ("image", "b.png", picture(1)),
    ]  # fmt: skip
    body, headers = form(fields)
    app.service.warned = False
    with caplog.at_level(logging.WARNING, "opendm.infer.server"):
        for _ in range(2):
            assert app("POST", "/process_frame", body, headers)[0] == 200
    (record,) = caplog.records
    assert "'robot'" in record.getMessage()


def test_a_key_that_stands_twice_is_refused_in_an_otherwise_good_request(app):
    text = json.dumps(valid(0))[:-1] + ', "sampling": {"seed": 1}}'
    status, _, content = app("POST", "/v1/infer", text.encode())
    assert status == 400
    assert "'sampling' stands twice" in strict(content)["error"]


# Faults


def test_a_failing_model_answers_500_with_an_id_only_and_the_service_lives(
    served_policy, start_service, monkeypatch, caplog
):
    service = start_service(served_policy)
    app = InProcess(service)
    good = app.infer(valid(0))
    secret = "/home/someone/checkpoint is broken"

    def fail(*_):
        raise RuntimeError(secret)

    with monkeypatch.context() as patch:
        patch.setattr(served_policy, "sampler", fail)
        status, reply = app.infer(valid(0))
    assert status == 500
    assert reply.keys() == {"error", "id"}
    assert "home" not in json.dumps(reply)
    assert reply["id"] in caplog.text
    assert secret in caplog.text
    assert app.infer(valid(0))[1]["actions"] == good[1]["actions"]


def test_one_request_that_fails_the_model_does_not_fail_its_batch(
    served_policy, start_service, monkeypatch
):
    service = start_service(served_policy, batch_window_ms=50.0)
    app = InProcess(service)
    usual = served_policy.sampler

    def sampler(inputs, noise, mask, steps):
        actions = usual(inputs, noise, mask, steps)
        ill = [torch.equal(start, served_policy.noise_for([13])[0]) for start in noise]
        actions[ill] = float("nan")
        return actions

    monkeypatch.setattr(served_policy, "sampler", sampler)

    async def together():
        bodies = [json.dumps(valid(seed)).encode() for seed in (1, 13, 2, 3)]
        return await asyncio.gather(*(app.call("POST", "/v1/infer", body) for body in bodies))

    statuses = [status for status, _, _ in asyncio.run(together())]
    assert statuses == [200, 500, 200, 200]


def test_more_requests_than_the_queue_holds_are_refused_at_once(
    served_policy, start_service, monkeypatch
):
    service = start_service(served_policy, max_queue=2, max_batch_size=1)
    app = InProcess(service)
    usual, gate = served_policy.sampler, threading.Event()

    def slow(*words):
        gate.wait(10)
        return usual(*words)

    monkeypatch.setattr(served_policy, "sampler", slow)

    async def flood():
        async def one(seed):
            start = time.monotonic()
            body = json.dumps(valid(seed)).encode()
            status, headers, _ = await app.call("POST", "/v1/infer", body)
            return status, headers, time.monotonic() - start

        first = asyncio.ensure_future(one(0))
        await asyncio.sleep(0.2)
        others = [asyncio.ensure_future(one(seed)) for seed in range(1, 8)]
        await asyncio.sleep(0.3)
        gate.set()
        return await asyncio.gather(first, *others)

    answers = asyncio.run(flood())
    refused = [answer for answer in answers if answer[0] == 503]
    assert [status for status, _, _ in answers].count(200) == 3
    assert len(refused) == 5
    assert all(headers[b"retry-after"] == b"1" for _, headers, _ in refused)
    assert max(taken for _, _, taken in refused) < 0.28, "they wait for the model"


def test_a_seed_never_touches_another_request_or_the_process(app):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    unseeded = {"observation": valid(0)["observation"]}
    first, second = (app.infer(unseeded)[1]["actions"] for _ in range(2))
    app.infer(valid(0))
    third = app.infer(unseeded)[1]["actions"]
    assert first != second != third != first
    assert torch.equal(torch.get_rng_state(), before)


def test_the_environments_seed_overrides_that_of_every_request(
    served_policy, start_service, monkeypatch
):
    monkeypatch.setenv("DM05_INFERENCE_SEED", "9")
    app = InProcess(start_service(served_policy, max_batch_size=1))
    asked = valid(5)
    asked["sampling"]["seed"] = 9
    _, wanted = app.infer(asked)
    for body in (valid(5), {"observation": valid(5)["observation"]}):
        assert app.infer(body)[1]["actions"] == wanted["actions"]
    images = [("image", f"{i}.png", picture(i)) for i in (10, 11)]
    body, headers = form([("states", json.dumps(STATE)), ("text", "Reach"), *images])
    assert strict(app("POST", "/process_frame", body, headers)[2])["response"] == wanted["actions"]
    wrong = valid(5)
    wrong["sampling"]["seed"] = -1
    assert app.infer(wrong)[0] == 400
    monkeypatch.delenv("DM05_INFERENCE_SEED")
    app = InProcess(start_service(served_policy, max_batch_size=1))
    assert app.infer(valid(5))[1]["actions"] != wanted["actions"]


@pytest.mark.parametrize("text", ["-1", "x", str(2**64)])
def test_a_seed_of_the_environment_that_is_none_is_named(served_policy, monkeypatch, text):
    monkeypatch.setenv("DM05_INFERENCE_SEED", text)
    with pytest.raises(ConfigError, match="DM05_INFERENCE_SEED"):
        make_contract(served_policy, DM05InferenceConfig())


# Bodies, clients that are slow, and many of them


def test_a_body_is_cut_off_at_the_limit_however_it_is_announced(app):
    limit = Limits().max_body_bytes
    head = [(b"content-length", b"10")]
    pieces = [b" " * 2**20 for _ in range(64)]
    for headers in ([], head):
        sent = list(pieces)
        status, reply_headers, _ = app("POST", "/v1/infer", headers=headers, parts=sent)
        assert status == 413
        assert reply_headers[b"connection"] == b"close"
    announced = [(b"content-length", str(limit + 1).encode())]
    assert app("POST", "/v1/infer", b"", announced)[0] == 413
    assert app.service.bodies.buffered_bytes == 0


def connect(port, data=b""):
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    connection.sendall(data)
    return connection


HEAD = b"POST /v1/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"


@contextlib.contextmanager
def lazy_clients(port):
    """(idle, slow with their bodies, slow with their heads): 64, 48 and 16 connections."""
    with contextlib.ExitStack() as stack:
        starts = [b""] * 64 + [HEAD] * 48 + [HEAD[:20]] * 16
        found = [stack.enter_context(connect(port, start)) for start in starts]
        stop = threading.Event()

        def trickle():
            while not stop.wait(0.1):
                for connection in found[64:]:
                    with contextlib.suppress(OSError):
                        connection.send(b" ")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            yield found[:64], found[64:112], found[112:]
        finally:
            stop.set()
            thread.join()


def is_open(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.settimeout(WAIT_S)


def test_idle_and_slow_clients_hinder_nobody(served_policy, start_service, monkeypatch):
    service = start_service(served_policy, max_queue=64)
    monkeypatch.setattr(service.bodies, "limits", Limits(body_timeout_s=600.0))
    wanted = {seed: expected(served_policy, seed) for seed in range(4)}
    failures = []

    def ask(seed):
        try:
            with PolicyClient(running.url) as client:
                images = [picture(2 * seed), picture(2 * seed + 1)]
                actions = client.infer(images, STATE, "Reach", seed=seed)
            np.testing.assert_allclose(actions, wanted[seed], rtol=0, atol=1e-5)
        except Exception as error:
            failures.append(error)

    with Running(service, head_timeout_s=600) as running, lazy_clients(running.port) as lazy:
        askers = [threading.Thread(target=ask, args=(i % 4,)) for i in range(32)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        assert failures == []
        assert all(is_open(connection) for kind in lazy for connection in kind), "all were there"


def test_idle_and_slow_clients_are_closed(served_policy, start_service, monkeypatch):
    """Their bytes, which come without end, win them no time."""
    service = start_service(served_policy)
    monkeypatch.setattr(service.bodies, "limits", Limits(body_timeout_s=1.0))
    with Running(service, head_timeout_s=1.0) as running, lazy_clients(running.port) as lazy:
        idle, slow, slow_heads = ([read_end(one) for one in kind] for kind in lazy)
    assert idle == [b""] * 64
    assert all(reply.startswith(b"HTTP/1.1 408") for reply in slow)
    assert slow_heads == [b""] * 16
    assert service.bodies.buffered_bytes == 0


def read_end(connection):
    """What comes before the other side closes; a reset, as writing to it brings, is an end too."""
    try:
        return connection.recv(1000)
    except ConnectionResetError:
        return b""


def test_no_reply_waits_for_an_acknowledgement(service):
    """Head and body are two writes; Nagle's algorithm would hold the second one back."""
    with Running(service) as running, connect(running.port) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        (connection,) = running.server.server_state.connections
        theirs = connection.transport.get_extra_info("socket")
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_client_that_leaves_costs_nothing(service, served_policy):
    body = json.dumps(valid(0)).encode()
    head = f"POST /v1/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with Running(service) as running:
        for part in (body, body[:100]):
            connect(running.port, head + part).close()
        with PolicyClient(running.url) as client:
            actions = client.infer([picture(0), picture(1)], STATE, "Reach", seed=0)
        np.testing.assert_array_equal(actions, expected(served_policy, 0))
        deadline = time.monotonic() + 5
        while service.bodies.buffered_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert service.bodies.buffered_bytes == 0


# Access


def test_a_token_is_asked_for_and_compared(served_policy, start_service):
    service = start_service(served_policy, token="secret-1")
    app = InProcess(service)
    body = json.dumps(valid(0)).encode()
    for header in (b"", b"Bearer", b"Bearer secret", b"Basic secret-1", b"Bearer \xff"):
        status, _, content = app("POST", "/v1/infer", body, [(b"authorization", header)])
        assert status == 401
        assert "secret-1" not in strict(content)["error"]
    assert app("GET", "/metadata")[0] == 401
    assert app("GET", "/readyz")[0] == 200
    given = [(b"authorization", b"Bearer secret-1")]
    assert app("POST", "/v1/infer", body, given)[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.4", "robot"])
def test_other_machines_are_served_with_a_token_or_when_that_is_meant(host, caplog):
    with pytest.raises(ConfigError, match=r"no-auth"):
        check_access(DM05InferenceConfig(host=host))
    check_access(DM05InferenceConfig(host=host, token="t"))
    assert caplog.text == ""
    check_access(DM05InferenceConfig(host=host, no_auth=True))
    assert "anyone" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_is_served_without_a_token(host):
    check_access(DM05InferenceConfig(host=host))
    assert DM05InferenceConfig().host == "127.0.0.1"


# Start and end


def test_what_the_checkpoint_lacks_or_contradicts_is_refused(served_checkpoint, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in served_checkpoint.iterdir():
        if path.name not in {"norm_stats.json", "opendm.json"}:
            (bare / path.name).symlink_to(path)
    config = DM05InferenceConfig(port=0)
    with pytest.raises(CheckpointError, match=r"opendm\.json"):
        serve(bare, config)
    config.layout_file = str(served_checkpoint / "opendm.json")
    with pytest.raises(CheckpointError, match=r"norm_stats\.json"):
        serve(bare, config)
    policy = Policy.from_checkpoint(
        bare,
        layout_file=served_checkpoint / "opendm.json",
        norm_stats_file=served_checkpoint / "norm_stats.json",
    )
    check_against_checkpoint(policy, DM05InferenceConfig(output_action_dim=4))
    with pytest.raises(ConfigError, match="output-action-dim 7 contradicts"):
        check_against_checkpoint(policy, DM05InferenceConfig(output_action_dim=7))
    with pytest.raises(ConfigError, match="image-prompts"):
        check_against_checkpoint(policy, DM05InferenceConfig(image_prompts=["Top", "Gripper"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is at hand")
def test_the_fast_backend_is_refused_without_a_gpu(served_checkpoint):
    with pytest.raises(ConfigError, match="needs a GPU"):
        serve(served_checkpoint, DM05InferenceConfig(port=0, backend="fast"))


def test_a_port_in_use_is_said_before_the_weights_are_read(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1"):
            serve(tmp_path / "nothing", DM05InferenceConfig(port=port))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve_in_child(folder, port, log):
    """``opendm serve`` in a forked process, its output in a file; never returns."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
        flags = {"port": port, "diffusion-steps": 60}
        words = [w for name, v in flags.items() for w in (f"--inference-config.{name}", str(v))]
        code = main(["serve", "--checkpoint", str(folder), *words])
        sys.stdout.flush()
    os._exit(code)


def test_sigterm_answers_what_was_accepted_and_exits_0(served_checkpoint, tmp_path):
    port, log = free_port(), tmp_path / "log"
    child = multiprocessing.get_context("fork").Process(
        target=serve_in_child, args=(served_checkpoint, port, log)
    )
    child.start()
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and child.is_alive():
        with contextlib.suppress(OSError):
            assert urllib.request.urlopen(f"{url}/readyz").status == 200
            break
        time.sleep(0.05)
    replies = []

    def ask():
        with PolicyClient(url) as client:
            replies.append(client.infer([picture(0), picture(1)], STATE, "Reach", seed=0))

    asker = threading.Thread(target=ask)
    asker.start()
    time.sleep(0.2)  # the request is with the model, which takes half a second or more
    is_early = not replies
    os.kill(child.pid, signal.SIGTERM)
    asker.join()
    child.join(60)
    output = log.read_text()
    assert child.exitcode == 0, output
    assert is_early
    assert len(replies) == 1, output
    assert "every accepted request was answered" in output


def test_a_draining_service_is_not_ready(served_policy, start_service):
    service = start_service(served_policy)
    with Running(service) as running:
        running.server.handle_exit(signal.SIGTERM, None)
        assert InProcess(service)("GET", "/readyz")[0] == 503


# The client


def test_the_client_gives_and_takes_arrays(service, served_policy):
    pixels = [np.random.default_rng(i).integers(0, 256, (90, 120, 3), dtype=np.uint8)
              for i in (0, 1)]  # fmt: skip
    with Running(service) as running, PolicyClient(running.url) as client:
        actions = client.infer(pixels, np.asarray(STATE), "Reach", seed=0)
        with pytest.raises(ServiceError, match=r"^3 images") as refused:
            client.infer([*pixels, pixels[0]], STATE, "Reach")
        assert refused.value.status == 400
        again = client.infer(pixels, STATE, "Reach", seed=0)
        assert client.metadata()["horizon"] == len(actions)
    assert actions.dtype == np.float32
    np.testing.assert_array_equal(actions, expected(served_policy, 0))
    np.testing.assert_array_equal(actions, again)


SERVING = {"body.py", "connection.py", "reply.py", "serve.py", "server.py"}


def imported(node):
    """Names of the modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) else []


def test_training_and_the_policy_import_no_serving_dependency():
    """Only files of the service do, and at import time only those import each other."""
    serving = {f"opendm.infer.{name.removesuffix('.py')}" for name in SERVING}
    wrong, found = [], set()
    for path in (REPOSITORY / "opendm").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            for name in imported(node):
                heavy = name.split(".")[0] in {"starlette", "uvicorn", "h11", "python_multipart"}
                if heavy:
                    found.add(path.name)
                if (heavy or name in serving) and path.name not in SERVING:
                    wrong.append(f"{path.name}: {name}")
    assert wrong == []
    assert found == SERVING


def test_every_thread_of_a_closed_service_ends(served_policy, start_service):
    service = start_service(served_policy)
    InProcess(service).infer(valid(0))
    service.worker.close()
    assert not service.worker._thread.is_alive()
