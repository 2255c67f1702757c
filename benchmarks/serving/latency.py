"""What the service adds to a policy, and what batching gains, on a CPU with a tiny policy.

    OMP_NUM_THREADS=1 python benchmarks/serving/latency.py [--requests 200] [--rounds 3]

Clients are other processes. The overhead of a request is what its client waits minus the time in
which the worker prepared and ran it (``policy.act`` on the decoded observation; the service says
it). Rates of one and eight clients are taken in turns, best of the rounds. Ends with 1 if the
overhead is more than 5 ms at the 99th percentile, or eight clients get less than twice the rate.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit import contract_of, make_policy, median_ms, print_split, request_body
from machine import describe_machine

from opendm.infer.config import DM05InferenceConfig
from opendm.infer.request import parse_infer
from opendm.infer.serve import bound_socket, make_server
from opendm.infer.server import Service
from opendm.infer.worker import PolicyWorker

MAX_OVERHEAD_MS: Final = 5.0
MIN_GAIN: Final = 2.0
NUM_CAMERAS: Final = 2
NUM_CLIENTS: Final = 8


def serve_in_child(pipe: Connection, num_steps: int) -> None:
    """Serve a tiny policy on a free port, which goes through ``pipe``; never returns."""
    torch.set_num_threads(1)
    policy = make_policy("tiny", "cpu", torch.float32, NUM_CAMERAS)
    worker = PolicyWorker(policy, num_steps=num_steps, max_queue=64, max_batch=8, window_s=0.003)
    service = Service(worker, contract_of(policy, num_steps), {})
    worker.start()
    with bound_socket(DM05InferenceConfig(port=0)) as listener:
        server = make_server(service)
        pipe.send(listener.getsockname()[1])
        server.run(sockets=[listener])
    worker.close()
    os._exit(0)


def ask(port: int, body: bytes, count: int) -> list[tuple[float, float]]:
    """(wait, the worker's time) of ``count`` requests on one connection, in milliseconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    results = []
    for _ in range(count):
        start = time.perf_counter()
        connection.request("POST", "/v1/infer", body)
        reply = connection.getresponse()
        content = reply.read()
        wait_ms = 1000 * (time.perf_counter() - start)
        if reply.status != 200:
            raise SystemExit(f"the service answered {reply.status}: {content[:200]!r}")
        results.append((wait_ms, json.loads(content)["metadata"]["latency_ms"]))
    connection.close()
    return results


def thread_seconds(pid: int) -> dict[str, float]:
    """Processor time of each thread of a process; unlike waits, other work hardly changes it."""
    ticks = os.sysconf("SC_CLK_TCK")
    spent = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        spent[folder.name] = (int(fields[11]) + int(fields[12])) / ticks
    return spent


def rate(port: int, clients: int, count: int) -> float:
    """Requests per second of so many clients that ask ``count`` times each."""
    bodies = [request_body(NUM_CAMERAS, seed) for seed in range(clients)]
    threads = [threading.Thread(target=ask, args=(port, body, count)) for body in bodies]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients * count / (time.perf_counter() - start)


def measure_overhead(port: int, body: bytes, requests: int) -> float:
    """Print what one client waits for; the overhead's 99th percentile in milliseconds."""
    results = np.array(ask(port, body, requests))
    overhead = results[:, 0] - results[:, 1]
    waits = np.percentile(results[:, 0], [50, 99])
    median, tail = np.percentile(overhead, [50, 99])
    print(f"one client: {waits[0]:.1f} ms at the median, {waits[1]:.1f} ms at the 99th percentile")
    print(f"service minus policy.act: {median:.2f} ms at the median, {tail:.2f} ms at the 99th")
    return float(tail)


def measure_processor_time(port: int, pid: int, requests: int) -> None:
    """Print the service's processor time per request with one client and with eight."""
    seconds = {}
    for clients in (1, NUM_CLIENTS):
        before = thread_seconds(pid)
        rate(port, clients, requests)
        spent = sorted(now - before.get(tid, 0.0) for tid, now in thread_seconds(pid).items())
        seconds[clients] = sum(spent) / clients / requests
        rest_ms = 1000 * sum(spent[:-1]) / clients / requests
        print(
            f"processor time per request, {clients} clients: {1000 * seconds[clients]:.1f} ms, "
            f"{rest_ms:.2f} of it outside the model's thread"
        )
    print(f"ratio of processor times: {seconds[1] / seconds[NUM_CLIENTS]:.2f}")


def measure_gain(port: int, per_client: int, rounds: int) -> float:
    """Print the rates of one and eight clients, best of the rounds; their ratio."""
    rates = [
        (rate(port, 1, per_client), rate(port, NUM_CLIENTS, per_client)) for _ in range(rounds)
    ]
    one, many = (max(column) for column in zip(*rates, strict=True))
    print(f"requests/s: {one:.1f} of 1 client, {many:.1f} of {NUM_CLIENTS}; ratio {many / one:.2f}")
    return many / one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=10)
    arguments = parser.parse_args()
    steps, requests = arguments.num_steps, arguments.requests
    torch.set_num_threads(1)
    print(describe_machine())

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve_in_child, args=(theirs, steps))
    child.start()
    port = ours.recv()
    body = request_body(NUM_CAMERAS, 0)
    ask(port, body, 10)
    tail_ms = measure_overhead(port, body, requests)
    measure_processor_time(port, child.pid or 0, max(10, requests // 4))
    gain = measure_gain(port, max(10, requests // 8), arguments.rounds)
    child.terminate()
    child.join()

    policy = make_policy("tiny", "cpu", torch.float32, NUM_CAMERAS)
    print_split(policy, steps, 20, "cpu")
    observation = parse_infer(body, contract_of(policy, steps)).observation
    whole_ms = median_ms(lambda: policy.act(observation, num_steps=steps), 20, "cpu")
    print(f"policy.act as a whole: {whole_ms:.2f} ms")
    sys.exit(tail_ms > MAX_OVERHEAD_MS or gain < MIN_GAIN)


if __name__ == "__main__":
    main()
