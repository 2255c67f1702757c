"""A service in this process, and ways to talk to it."""

import asyncio
import base64
import io
import json
import threading
import time

import numpy as np
from PIL import Image

from opendm.infer.config import DM05InferenceConfig
from opendm.infer.connection import TimedConnection
from opendm.infer.serve import bound_socket, describe, make_contract, make_server
from opendm.infer.server import Service, build_app
from opendm.infer.worker import PolicyWorker

STATE = (0.1, 0.6, 0.2, 1.0)
STEPS = 3


def picture(seed=0, size=(120, 90), kind="PNG"):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def b64(data):
    return base64.b64encode(data).decode()


def valid(seed=0, **changes):
    """A good body of /v1/infer as a Python object."""
    observation = {
        "prompt": "Reach",
        "state": list(STATE),
        "images": {"1": b64(picture(2 * seed)), "2": b64(picture(2 * seed + 1))},
    }
    return {"observation": {**observation, **changes}, "sampling": {"seed": seed}}


def make_service(policy, checkpoint="", **flags):
    config = DM05InferenceConfig(diffusion_steps=STEPS, port=0, **flags)
    worker = PolicyWorker(
        policy,
        num_steps=STEPS,
        max_queue=config.max_queue,
        max_batch=config.max_batch_size,
        window_s=config.batch_window_ms / 1000,
    )
    metadata = describe(policy, checkpoint, config) if checkpoint else {}
    service = Service(worker, make_contract(policy, config), metadata, config.token)
    worker.start()
    return service


class InProcess:
    """Calls the application without a socket."""

    def __init__(self, service):
        self.service = service
        self.app = build_app(service)

    async def call(self, method, path, body=b"", headers=(), parts=None):
        """(status, headers, body); ``parts`` sends the body in pieces."""
        pieces = [body] if parts is None else parts
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "path": path, "raw_path": path.encode(), "root_path": "", "scheme": "http",
            "query_string": b"", "headers": [(k.lower(), v) for k, v in headers],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        messages = [
            {"type": "http.request", "body": piece, "more_body": i + 1 < len(pieces)}
            for i, piece in enumerate(pieces)
        ]
        sent = []

        async def receive():
            if messages:
                return messages.pop(0)
            return await asyncio.sleep(3600)

        async def send(message):
            sent.append(message)

        await self.app(scope, receive, send)
        content = b"".join(m.get("body", b"") for m in sent[1:])
        return sent[0]["status"], dict(sent[0]["headers"]), content

    def __call__(self, *words, **more):
        return asyncio.run(self.call(*words, **more))

    def infer(self, content):
        status, _, body = self("POST", "/v1/infer", json.dumps(content).encode())
        return status, json.loads(body)


class Running:
    """A server in a thread, on a free port of this machine."""

    def __init__(self, service, head_timeout_s=10.0):
        self.service = service
        self.socket_scope = bound_socket(DM05InferenceConfig(port=0))
        self.socket = self.socket_scope.__enter__()
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = make_server(service)
        self.server.config.http = type(
            "Connection", (TimedConnection,), {"head_timeout_s": head_timeout_s}
        )
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)

    def __enter__(self):
        self.thread.start()
        deadline = time.monotonic() + 10
        while not self.server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        return self

    def __exit__(self, *error):
        self.server.should_exit = True
        self.thread.join(20)
        self.socket_scope.__exit__(None, None, None)


def no_constants(text):
    raise AssertionError(f"{text} is not JSON")


def strict(body):
    """The content of a reply, which must be JSON in the narrow sense."""
    return json.loads(body, parse_constant=no_constants)


def form(fields, boundary="frontier"):
    """A multipart body: (name, value) or (name, file name, bytes); and its content type."""
    out = bytearray()
    for entry in fields:
        name, *rest = entry
        out += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"'.encode()
        if len(rest) == 2:
            out += f'; filename="{rest[0]}"\r\nContent-Type: image/png'.encode()
        value = rest[-1]
        out += b"\r\n\r\n" + (value if isinstance(value, bytes) else value.encode()) + b"\r\n"
    out += f"--{boundary}--\r\n".encode()
    kind = f"multipart/form-data; boundary={boundary}".encode()
    return bytes(out), [(b"content-type", kind)]
