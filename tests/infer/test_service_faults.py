"""What clients are told when the service is full, its model fails, or it ends."""

import asyncio
import contextlib
import http.client
import json
import logging
import signal
import socket
import sys
import threading
import time

import numpy as np
import pytest
from service_kit import STATE, InProcess, Running, form, picture, strict, valid

import opendm.infer.server as server_module
from opendm.errors import ConfigError
from opendm.exp.dm05_exp import DM05Exp
from opendm.infer.client import PolicyClient, ServiceError
from opendm.infer.config import DM05InferenceConfig
from opendm.infer.serve import check_access, checkpoint_hash, describe, say_end, used_instead
from opendm.infer.worker import MAX_FAILURES

WAIT_S = 20
SERVING = ("body", "connection", "reply", "serve", "server")


def body_of(seed):
    return json.dumps(valid(seed)).encode()


# Full


@pytest.mark.parametrize("route", ["/v1/infer", "/process_frame"])
def test_the_first_request_too_many_is_refused_before_any_is_parsed(
    served_policy, start_service, monkeypatch, route
):
    """Parsing is held up here; refusals come all the same."""
    service = start_service(served_policy, max_queue=2, max_batch_size=1)
    app, gate = InProcess(service), threading.Event()
    for name in ("parse_infer", "parse_form"):
        usual = getattr(server_module, name)

        def held(*words, usual=usual):
            assert gate.wait(WAIT_S)
            return usual(*words)

        monkeypatch.setattr(server_module, name, held)
    images = [("image", f"{i}.png", picture(i)) for i in (0, 1)]
    body, headers = form([("states", json.dumps(STATE)), *images])
    if route == "/v1/infer":
        body, headers = body_of(0), ()

    async def flood():
        calls = [asyncio.ensure_future(app.call("POST", route, body, headers)) for _ in range(9)]
        refused, kept = set(), set(calls)
        try:
            while len(refused) < 6:
                done, kept = await asyncio.wait(
                    kept, timeout=WAIT_S / 2, return_when="FIRST_COMPLETED"
                )
                assert done, "nobody is refused while the parser is busy"
                refused |= done
        finally:
            gate.set()
        return [call.result() for call in refused], await asyncio.gather(*kept)

    refused, kept = asyncio.run(flood())
    assert [status for status, _, _ in refused] == [503] * 6
    assert all(headers[b"retry-after"] == b"1" for _, headers, _ in refused)
    assert [status for status, _, _ in kept] == [200] * 3
    assert app("POST", route, body, headers)[0] == 200, "places are given back"


# The model


def test_whatever_fails_in_the_worker_every_request_gets_an_answer(
    served_policy, start_service, monkeypatch
):
    app = InProcess(start_service(served_policy, max_batch_size=4))

    class Odd(BaseException):
        pass

    def fail(*_, **__):
        raise Odd

    for name in ("draw_noise", "prepare", "act_prepared"):
        with monkeypatch.context() as patch:
            patch.setattr(served_policy, name, fail)

            async def together():
                calls = [app.call("POST", "/v1/infer", body_of(seed)) for seed in range(3)]
                return await asyncio.wait_for(
                    asyncio.gather(*calls, return_exceptions=True), WAIT_S
                )

            assert all(isinstance(one, Odd) for one in asyncio.run(together())), name
        assert app.infer(valid(0))[0] == 200


def test_noise_that_cannot_be_drawn_is_a_500_and_no_more(served_policy, start_service, monkeypatch):
    app = InProcess(start_service(served_policy))

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(served_policy, "draw_noise", fail)
        assert app.infer(valid(0))[0] == 500
    assert app.infer(valid(0))[0] == 200


def test_a_model_that_keeps_failing_is_not_ready_until_it_succeeds(
    served_policy, start_service, monkeypatch
):
    app = InProcess(start_service(served_policy))

    def fail(*_):
        raise RuntimeError("illegal memory access")

    with monkeypatch.context() as patch:
        patch.setattr(served_policy, "sampler", fail)
        for count in range(MAX_FAILURES):
            assert app("GET", "/readyz")[0] == 200, count
            assert app.infer(valid(0))[0] == 500
        status, _, content = app("GET", "/readyz")
        assert status == 503
        assert "failed 5 times" in strict(content)["error"]
        assert app("GET", "/healthz")[0] == 200
    assert app.infer(valid(0))[0] == 200
    assert app("GET", "/readyz")[0] == 200


def test_without_its_thread_the_service_is_not_ready_and_refuses(served_policy, start_service):
    service = start_service(served_policy)
    app = InProcess(service)
    service.worker.close()
    assert app("GET", "/readyz")[0] == 503
    assert app.infer(valid(0))[0] == 503


# The end


def test_what_the_time_to_end_does_not_suffice_for_gets_503_and_is_counted(
    served_policy, start_service, monkeypatch, caplog
):
    service = start_service(served_policy, max_batch_size=1)
    usual, gate, began = served_policy.sampler, threading.Event(), threading.Event()

    def slow(*words):
        began.set()
        assert gate.wait(WAIT_S)
        return usual(*words)

    monkeypatch.setattr(served_policy, "sampler", slow)
    replies = []

    def ask(running):
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=WAIT_S)
        connection.request("POST", "/v1/infer", body_of(0))
        reply = connection.getresponse()
        replies.append((reply.status, reply.headers, strict(reply.read())))

    with Running(service) as running:
        running.server.config.timeout_graceful_shutdown = 1
        askers = [threading.Thread(target=ask, args=(running,)) for _ in range(2)]
        for asker in askers:
            asker.start()
        assert began.wait(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while service.num_open < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        running.server.handle_exit(signal.SIGTERM, None)
        for asker in askers:
            asker.join()
        gate.set()
    for status, headers, content in replies:
        assert (status, headers["retry-after"]) == (503, "1")
        assert content == {"error": "the service is ending"}
    assert len(replies) == service.num_dropped == 2
    with caplog.at_level(logging.INFO, "opendm.infer.serve"):
        say_end(service)
        service.num_dropped = 0
        say_end(service)
    dropped, complete = (record.getMessage() for record in caplog.records[-2:])
    assert "2 requests" in dropped
    assert "every accepted" not in dropped
    assert "every accepted request was answered" in complete


# What it says of itself, and whom it takes


def test_the_hash_is_that_of_the_files_really_used(served_policy, served_checkpoint, tmp_path):
    own = served_checkpoint / "norm_stats.json"
    same, other = tmp_path / "same.json", tmp_path / "other.json"
    same.write_bytes(own.read_bytes())
    other.write_text(own.read_text().replace("0.3", "0.4"))
    layout = tmp_path / "opendm.json"
    layout.write_text((served_checkpoint / "opendm.json").read_text().replace("256", "128"))

    def told(**flags):
        config = DM05InferenceConfig(**{name: str(path) for name, path in flags.items()})
        return describe(served_policy, served_checkpoint, config)["checkpoint"]

    plain = checkpoint_hash(served_checkpoint)
    assert told() == told(norm_stats_file=same) == plain
    hashes = {told(norm_stats_file=other), told(layout_file=layout), told(layout_file=tmp_path)}
    assert len(hashes) == 2
    assert plain not in hashes
    assert used_instead(DM05InferenceConfig()) == {}


@pytest.mark.parametrize("token", [" a", "a ", "\ta", "a\n", "", " ", "a\x7f", "é"])
def test_a_token_that_no_header_can_carry_is_refused_at_the_start(token):
    with pytest.raises(ConfigError, match="token"):
        check_access(DM05InferenceConfig(token=token))
    check_access(DM05InferenceConfig(token="one two"))


@pytest.mark.parametrize("path", ["/v1/infer/", "/metadata/", "/"])
def test_a_wrong_path_is_a_404_in_json_and_no_redirect(app, path):
    status, headers, content = app("POST", path, b"{}")
    assert status == 404
    assert headers[b"content-type"] == b"application/json"
    assert "error" in strict(content)


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "python_multipart"])
def test_a_missing_package_of_the_service_names_the_extra(monkeypatch, package):
    loaded = [name for name in sys.modules if name.partition(".")[0] == package]
    for name in (*loaded, *(f"opendm.infer.{part}" for part in SERVING)):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"package {package}, .* 'opendm\[serve\]'"):
        DM05Exp().inference()


# The client


def answer_late_once(listener, delay_s):
    """A service whose first reply comes late; each reply tells its number."""
    count = 0
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                while connection.recv(65536):
                    count += 1
                    if count == 1:
                        time.sleep(delay_s)
                    text = b'{"n": %d}' % count
                    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text)
                    try:
                        connection.sendall(head + text)
                    except OSError:
                        break


def test_a_client_goes_on_after_a_timeout_and_never_takes_the_late_reply():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer_late_once, args=(listener, 0.6), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with PolicyClient(url, timeout_s=0.2) as client:
            with pytest.raises(ServiceError, match="timed out") as refused:
                client.metadata()
            assert refused.value.status == 0
            time.sleep(0.8)
            assert [client.metadata()["n"] for _ in range(2)] == [2, 3]


@pytest.mark.parametrize(
    "reply", [b"hello\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"]
)
def test_a_reply_that_is_none_becomes_the_clients_one_error(reply):
    def answer(listener):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        client = PolicyClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=5.0)
        for _ in range(2):
            with pytest.raises(ServiceError) as refused:
                client.infer([np.zeros((4, 4, 3), np.uint8)], STATE, "Reach")
            assert refused.value.status == 0


def test_a_connection_that_the_service_closed_while_idle_is_opened_again(service):
    with Running(service) as running, PolicyClient(running.url) as client:
        client.metadata()
        for connection in list(running.server.server_state.connections):
            running.server.servers[0].get_loop().call_soon_threadsafe(connection.transport.close)
        time.sleep(0.2)
        client.metadata()
