"""An hour of mixed clients against a service in a process of its own: does anything grow?

    python tests/infer/service_soak.py --checkpoint FOLDER [--seconds 3600] [--load 0.5]

Valid, malformed, slow, idle and departing clients take turns; ``--load`` is how much of one
processor they and the service may use together, the rest is slept. Batching is off, so that every
valid reply must equal that of the quiet service at the start bit for bit. Ends with 1 if a reply is
wrong, or if a line through the last three quarters of the readings rises by more than 20 MB of
resident memory or one descriptor or thread.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
from malformed import CASES, malformed
from service_kit import STATE, form, picture, strict, valid
from sockets import GARBAGE, exchange, raw

MAX_GROWTH = {"resident MB": 20.0, "descriptors": 1.0, "threads": 1.0}
READ_EVERY_S = 15.0
"""Long enough for the service to close idle and slow clients in between."""
SETTLE_S = 0.5
"""From the last client's leaving to a reading."""
NUM_LAZY = 8
"""Idle clients, and as many that send a byte per round."""
MALFORMED_PER_ROUND = 8
MAX_BODY_BYTES = 2**20
"""Larger malformed ones are left to the tests; they would take most of the time."""
WAIT_S = 300.0
"""Low priority on a busy machine makes replies slow, not wrong."""
START_S = 600.0
"""Imports alone take a minute where eight others compute on two processors."""
HEAD = b"POST /v1/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"


def growth(readings):
    """Rise of the least-squares line through the last three quarters of (seconds, value) pairs."""
    seconds, values = np.array(readings[len(readings) // 4 :], dtype=float).T
    slope, _ = np.polyfit(seconds - seconds[0], values, 1)
    return float(slope * (seconds[-1] - seconds[0]))


def processor_seconds(pid):
    """Processor time of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read(pid):
    """What a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        "resident MB": int(status["VmRSS"].split()[0]) / 1024,
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


@contextlib.contextmanager
def serving(checkpoint, log):
    """(process, port) of ``opendm serve`` with 3 steps and without batches."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = {"port": port, "diffusion-steps": 3, "max-batch-size": 1}
    words = [word for name, v in flags.items() for word in (f"--inference-config.{name}", str(v))]
    code = "import sys, opendm; from opendm.cli import main; print(opendm.__file__, flush=True); "
    command = [sys.executable, "-c", code + "sys.exit(main())", "serve", "--checkpoint"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, str(checkpoint), *words], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_S
        while b" 200 " not in get_ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the service does not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield process, port
    finally:
        process.kill()
        process.wait()


def get_ready(port):
    try:
        return exchange(port, raw("GET", "/readyz", b"", []))[:40]
    except OSError:
        return b""


@dataclass
class Clients:
    """All who talk to the service, and what was wrong with its replies."""

    port: int
    quiet: dict = field(default_factory=dict)
    """Actions by seed when nothing else happened."""
    lazy: list = field(default_factory=list)
    """(connection, whether it sends)."""
    counts: dict = field(default_factory=dict)
    wrong: list = field(default_factory=list)

    def tally(self, name):
        self.counts[name] = self.counts.get(name, 0) + 1

    def infer(self, seed):
        """Actions of a valid request, on the route and connection of its own."""
        reply = exchange(self.port, raw("POST", "/v1/infer", body_of(seed), []), WAIT_S)
        head, _, content = reply.partition(b"\r\n\r\n")
        return head.split(b"\r\n")[0], content

    def ask(self, seed):
        """A valid request, whose reply must be the quiet service's."""
        status, content = self.infer(seed)
        self.tally("valid")
        if b" 200 " not in status or strict(content)["actions"] != self.quiet[seed]:
            self.wrong.append(("valid", seed, status, content[:200]))

    def ask_by_form(self):
        """A valid request without a seed on the older route."""
        images = [("image", f"{i}.png", picture(i)) for i in (0, 1)]
        body, headers = form([("states", json.dumps(STATE)), ("text", "Reach"), *images])
        reply = exchange(self.port, raw("POST", "/process_frame", body, headers), WAIT_S)
        self.tally("form")
        if b" 200 " not in reply[:40]:
            self.wrong.append(("form", reply[:200]))

    def misbehave(self, name, request):
        """A malformed request, which must be refused in JSON."""
        method, path, body, headers = request
        if len(body) > MAX_BODY_BYTES:
            return
        self.tally("malformed")
        try:
            reply = exchange(self.port, raw(method, path, body, headers), WAIT_S)
        except (ConnectionResetError, BrokenPipeError):  # refused before all of it was read
            return
        head, _, content = reply.partition(b"\r\n\r\n")
        is_json = b"application/json" in head.lower()
        told = method == "HEAD" or (is_json and "error" in strict(content))
        if not (head.startswith(b"HTTP/1.1 4") and told):
            self.wrong.append((name, reply[:200]))

    def speak_no_http(self, data):
        """Bytes that are no request."""
        self.tally("no HTTP")
        reply = exchange(self.port, data, WAIT_S)
        if not reply.startswith(b"HTTP/1.1 4"):
            self.wrong.append(("no HTTP", data[:40], reply[:200]))

    def leave(self):
        """One client goes within its request, one before its reply, one with a reset."""
        whole = raw("POST", "/v1/infer", body_of(0), [])
        for data, resets in ((whole[:500], False), (whole, False), (whole, True)):
            with socket.create_connection(("127.0.0.1", self.port), WAIT_S) as connection:
                connection.sendall(data)
                if resets:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.tally("left")

    def be_lazy(self):
        """Keep idle and slow clients; those whom the service has closed come again."""
        kept = []
        for connection, sends in self.lazy:
            try:
                if sends:
                    connection.send(b" ")
                is_closed = connection.recv(1000) == b""
            except BlockingIOError:
                is_closed = False
            except OSError:
                is_closed = True
            if is_closed:
                connection.close()
                self.tally("slow closed" if sends else "idle closed")
            else:
                kept.append((connection, sends))
        for sends in (False, True):
            for _ in range(NUM_LAZY - sum(kind == sends for _, kind in kept)):
                connection = socket.create_connection(("127.0.0.1", self.port), WAIT_S)
                connection.sendall(HEAD if sends else b"")
                connection.setblocking(False)
                kept.append((connection, sends))
        self.lazy = kept

    def go(self):
        """Everyone leaves."""
        for connection, _ in self.lazy:
            connection.close()
        self.lazy = []


def body_of(seed):
    return json.dumps(valid(seed)).encode()


def rounds(clients):
    """Endless rounds of all kinds of clients; yields after each."""
    garbage = list(GARBAGE.values())
    for number in count():
        for index, (name, request) in enumerate(malformed(len(CASES), seed=number)):
            clients.misbehave(name, request)
            if index % MALFORMED_PER_ROUND == 0:
                turn = index // MALFORMED_PER_ROUND
                clients.ask(turn % len(clients.quiet))
                clients.ask_by_form()
                clients.speak_no_http(garbage[turn % len(garbage)])
                clients.leave()
                clients.be_lazy()
                yield


def soak(process, port, seconds, load):
    """(readings by name, clients) of so many seconds."""
    clients = Clients(port)
    clients.quiet = {seed: strict(clients.infer(seed)[1])["actions"] for seed in range(4)}
    start, readings = time.monotonic(), []
    for _ in rounds(clients):
        passed = time.monotonic() - start
        if not readings or passed >= readings[-1][0] + READ_EVERY_S:
            clients.go()
            time.sleep(SETTLE_S)
            readings.append((passed, read(process.pid)))
            shown = ", ".join(f"{value:.0f} {name}" for name, value in readings[-1][1].items())
            print(f"{passed:6.0f} s: {shown}; {clients.counts}", flush=True)
        if clients.wrong or passed >= seconds:
            break
        used = processor_seconds(process.pid) + time.process_time()
        if passed == readings[0][0]:
            used_before, began = used, passed
        time.sleep(max(0.0, (used - used_before) / load - (passed - began)))
    clients.go()
    series = {name: [(at, values[name]) for at, values in readings] for name in MAX_GROWTH}
    return series, clients


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--log", type=Path, default=Path("service_soak_server.log"))
    arguments = parser.parse_args()
    with serving(arguments.checkpoint, arguments.log) as (process, port):
        readings, clients = soak(process, port, arguments.seconds, arguments.load)
        is_as_before = clients.quiet == {
            seed: strict(clients.infer(seed)[1])["actions"] for seed in clients.quiet
        }
        process.send_signal(signal.SIGTERM)
        code = process.wait(WAIT_S)
    rises = {name: growth(values) for name, values in readings.items()}
    for name, rise in rises.items():
        numbers = [value for _, value in readings[name]]
        print(
            f"{name}: {numbers[0]:.1f} at first, {min(numbers):.1f} to {max(numbers):.1f}, "
            f"{numbers[-1]:.1f} at last; line over the last three quarters {rise:+.2f} "
            f"(allowed {MAX_GROWTH[name]:g})"
        )
    print(f"exit code {code}; wrong replies: {clients.wrong}; counts: {clients.counts}")
    is_flat = all(rise <= MAX_GROWTH[name] for name, rise in rises.items())
    is_good = is_flat and not clients.wrong and is_as_before and code == 0
    print("passed" if is_good else "FAILED")
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
