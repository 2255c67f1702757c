"""10,000 malformed requests: every one is refused in JSON, and nobody else notices."""

import asyncio
import ctypes
import gc
import json
from pathlib import Path

import numpy as np
import pytest
from malformed import CASES, malformed
from service_kit import InProcess, Running, b64, picture, strict, valid
from sockets import GARBAGE, exchange, raw

NUM_SHORT = 2_000
VALID_EVERY = 50
MAX_GROWTH_BYTES = 20 * 2**20


def status_bytes(name):
    """A field of this process's memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def resident_bytes():
    """Memory that is held; what the C library keeps of what was freed depends on the past."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status_bytes("VmRSS")


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def quiet_replies(app):
    """What each valid request is answered when nothing else happens."""
    return {seed: app.infer(valid(seed))[1]["actions"] for seed in range(4)}


async def run(app, count, quiet, check):
    """Send the corpus with valid requests in between; what was not answered as it should."""
    wrong, statuses = [], {}
    for index, (name, (method, path, body, headers)) in enumerate(malformed(count)):
        pending = None
        if index % VALID_EVERY == 0:
            seed = index // VALID_EVERY % len(quiet)
            good = json.dumps(valid(seed)).encode()
            pending = asyncio.ensure_future(app.call("POST", "/v1/infer", good))
        status, head, content = await app.call(method, path, body, headers)
        statuses[status] = statuses.get(status, 0) + 1
        is_json = head[b"content-type"] == b"application/json"
        told = method == "HEAD" or "error" in strict(content)
        if not (400 <= status < 500 and is_json and told and b"/root" not in content):
            wrong.append((name, status, content[:200]))
        if pending is not None:
            status, _, content = await pending
            assert status == 200, content
            check(strict(content)["actions"], quiet[seed])
    return wrong, statuses


def exactly(now, before):
    assert now == before


def corpus(app, count):
    quiet = quiet_replies(app)
    asyncio.run(run(app, len(CASES), quiet, exactly))  # warms caches, pools and allocators up
    before, files = resident_bytes(), open_files()
    wrong, statuses = asyncio.run(run(app, count, quiet, exactly))
    growth = resident_bytes() - before
    print(f"{count} malformed requests of {len(CASES)} classes: {statuses}, RSS +{growth} bytes")
    assert wrong == []
    assert sum(statuses.values()) == count
    assert growth <= MAX_GROWTH_BYTES
    assert open_files() <= files
    assert quiet_replies(app) == quiet


def test_malformed_requests_are_refused_and_touch_nobody(app):
    assert len(CASES) >= 150
    corpus(app, NUM_SHORT)


@pytest.mark.soak
def test_ten_thousand_malformed_requests_are_refused_and_touch_nobody(app):
    corpus(app, 10_000)


def test_with_batching_valid_requests_differ_by_rounding_only(served_policy, start_service):
    service = start_service(served_policy, max_batch_size=8, batch_window_ms=20.0)
    app = InProcess(service)
    quiet = quiet_replies(app)

    async def together():
        bad = [app.call(*request) for _, request in malformed(100, seed=1)]
        good = [app.call("POST", "/v1/infer", json.dumps(valid(i % 4)).encode()) for i in range(12)]
        return (await asyncio.gather(*good, *bad))[: len(good)]

    for index, (status, _, content) in enumerate(asyncio.run(together())):
        assert status == 200, content
        np.testing.assert_allclose(strict(content)["actions"], quiet[index % 4], rtol=0, atol=1e-5)
    assert max(service.worker.batch_sizes) > 1


def test_over_a_socket_every_class_is_refused_in_json(service):
    with Running(service) as running:
        for name, (method, path, body, headers) in malformed(len(CASES), seed=2):
            if len(body) > 2**20:
                continue
            try:
                reply = exchange(running.port, raw(method, path, body, headers))
            except ConnectionResetError:  # the reply went out before the body was read
                continue
            head, _, content = reply.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 4"), (name, reply[:200])
            assert b"application/json" in head.lower(), (name, reply[:200])
            assert method == "HEAD" or "error" in strict(content), name


@pytest.mark.parametrize("name", GARBAGE)
def test_what_is_no_http_is_answered_in_json_and_closed(service, name):
    with Running(service) as running:
        reply = exchange(running.port, GARBAGE[name])
    head, _, content = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 4"), reply[:200]
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    assert "error" in strict(content[:length])


def peak_growth_bytes(work):
    """How far the most memory during ``work`` lies above what was held before.

    The peak starts from what is held once the garbage of earlier tests is gone: were that collected
    between the two readings, its size would count as growth.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmHWM")
    work()
    return status_bytes("VmHWM") - before


def largest_bodies():
    size = 16 * 2**20 - 400_000
    picture_2048 = b64(picture(0, (2048, 2048), "JPEG"))
    pictures = {"1": picture_2048, "2": picture_2048}
    yield "base64", json.dumps(valid(0, images={"1": "A" * size, "2": ""})).encode()
    yield "brackets", b"[" * size
    yield "commas", b"[" + b"1," * (size // 2) + b"1]"
    yield "escapes", b'"' + b"\\u00e9" * (size // 6) + b'"'
    yield "large pictures", json.dumps(valid(0, images=pictures)).encode()


def test_no_body_within_the_limit_takes_more_than_64_mb(app):
    app.infer(valid(0))
    for name, body in largest_bodies():
        growth = peak_growth_bytes(lambda body=body: app("POST", "/v1/infer", body))
        assert growth <= 64 * 2**20, name


def test_a_soak_would_notice_memory_that_is_kept(app):
    """The measure itself: memory that is held shows in it."""
    before = resident_bytes()
    held = np.ones(30 * 2**20, np.uint8)
    assert resident_bytes() - before > MAX_GROWTH_BYTES
    del held
