"""What the service adds to a policy, and what batching gains, on a CPU with a tiny policy.

    OMP_NUM_THREADS=1 python benchmarks/serving/latency.py [--pairs 600] [--rounds 5] [--threads 1]

Clients are another process. Of each request the service tells how long the model's thread took; to
make its pictures smaller, which ``policy.act`` also does, it takes a time that is measured beside
it. What is left is the overhead, and its 99th percentile counts. In turns with the requests
``policy.act`` runs in the client's process, on the same observations with their pictures decoded:
the difference of such a pair also holds what two runs of the model differ by. Rates of one and
eight clients are taken in turns, best of the rounds. Ends with 1 if the overhead is more than 5 ms
at the 99th percentile, or eight clients get less than twice the rate.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit import contract_of, make_policy, median_ms, print_split, request_body
from machine import describe_machine

from opendm.infer.config import DM05InferenceConfig
from opendm.infer.observation import to_picture
from opendm.infer.own_thread import in_own_thread
from opendm.infer.policy import Policy
from opendm.infer.request import parse_infer
from opendm.infer.serve import bound_socket, make_server, settle, warm_up
from opendm.infer.server import Service
from opendm.infer.worker import PolicyWorker

MAX_OVERHEAD_MS: Final = 5.0
MIN_GAIN: Final = 2.0
NUM_CAMERAS: Final = 2
NUM_CLIENTS: Final = 8
WARM_UP_PAIRS: Final = 10


def serve_in_child(pipe: Connection, num_steps: int, num_threads: int) -> None:
    """Serve a tiny policy on a free port, which goes through ``pipe``; never returns.

    Whatever comes through the pipe is answered with the number of batches of each size until then.
    """
    torch.set_num_threads(num_threads)
    policy = in_own_thread(lambda: make_policy("tiny", "cpu", torch.float32, NUM_CAMERAS))
    worker = PolicyWorker(policy, num_steps=num_steps, max_queue=64, max_batch=8, window_s=0.003)
    service = Service(worker, contract_of(policy, num_steps), {})
    in_own_thread(lambda: warm_up(policy, num_steps))
    settle()
    worker.start()

    def tell() -> None:
        while pipe.recv():
            pipe.send(dict(worker.batch_sizes))

    threading.Thread(target=tell, daemon=True).start()
    with bound_socket(DM05InferenceConfig(port=0)) as listener:
        server = make_server(service)
        pipe.send(listener.getsockname()[1])
        server.run(sockets=[listener])
    worker.close()
    os._exit(0)


class Client:
    """One connection."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, body: bytes) -> tuple[float, bytes]:
        """Milliseconds until the reply of a request is read, and its content."""
        start = time.perf_counter()
        self.connection.request("POST", "/v1/infer", body)
        reply = self.connection.getresponse()
        content = reply.read()
        wait_ms = 1000 * (time.perf_counter() - start)
        if reply.status != 200:
            raise SystemExit(f"the service answered {reply.status}: {content[:200]!r}")
        return wait_ms, content


def ask_often(port: int, body: bytes, count: int) -> None:
    client = Client(port)
    for _ in range(count):
        client.ask(body)
    client.connection.close()


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
    threads = [threading.Thread(target=ask_often, args=(port, body, count)) for body in bodies]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clients * count / (time.perf_counter() - start)


def interruptions(pid: int) -> int:
    """How often the threads of a process had to leave the processor to others."""
    total = 0
    for folder in Path(f"/proc/{pid}/task").iterdir():
        lines = (folder / "status").read_text().splitlines()
        total += int(lines[-1].rpartition(":")[2])
    return total


def measure_pairs(
    port: int, pid: int, policy: Policy, num_steps: int, num_pairs: int
) -> Float64[np.ndarray, "pairs 4"]:
    """Per pair: request, ``act`` and the worker's time in ms, interruptions of the service."""
    contract = replace(contract_of(policy, num_steps), shrink=lambda picture: picture)
    bodies = [request_body(NUM_CAMERAS, seed) for seed in range(8)]
    observations = [parse_infer(body, contract).observation for body in bodies]
    client, rows = Client(port), []

    def request(index: int) -> tuple[float, float]:
        wait_ms, content = client.ask(bodies[index])
        return wait_ms, json.loads(content)["metadata"]["latency_ms"]

    def act(index: int) -> float:
        generator = torch.Generator().manual_seed(index)
        start = time.perf_counter()
        policy.act(observations[index], num_steps=num_steps, generator=generator)
        return 1000 * (time.perf_counter() - start)

    for number in range(-WARM_UP_PAIRS, num_pairs):
        index, before = number % len(bodies), interruptions(pid)
        if number % 2:
            act_ms = act(index)
            wait_ms, worker_ms = request(index)
        else:
            wait_ms, worker_ms = request(index)
            act_ms = act(index)
        rows.append((wait_ms, act_ms, worker_ms, interruptions(pid) - before))
    return np.array(rows[WARM_UP_PAIRS:])


def resize_time(policy: Policy, num_steps: int) -> float:
    """Milliseconds to make the pictures of a request as small as the model sees them."""
    contract = replace(contract_of(policy, num_steps), shrink=lambda picture: picture)
    pictures = parse_infer(request_body(NUM_CAMERAS, 0), contract).observation.images.values()
    return median_ms(lambda: [policy.shrink(to_picture("", one)) for one in pictures], 50, "cpu")


def print_overhead(rows: Float64[np.ndarray, "pairs 4"], resize_ms: float) -> float:
    """Print what the pairs say; the 99th percentile of the overhead in milliseconds."""
    wait, act, worker, stops = rows.T
    difference, outside = wait - act, wait - worker - resize_ms

    def show(name: str, values: Float64[np.ndarray, " pairs"]) -> None:
        median, high, tail = np.percentile(values, [50, 90, 99])
        print(f"{name:<44}{median:>8.2f}{high:>8.2f}{tail:>8.2f}")

    print(f"{f'{len(rows)} pairs, ms at the percentile':<44}{50:>8}{90:>8}{99:>8}")
    show("a request of one client", wait)
    show("policy.act on its decoded observation", act)
    show("request minus the act within it", outside)
    show("request minus the act beside it", difference)
    tail = float(np.percentile(outside, 99))
    apart = np.percentile(wait, 99) - np.percentile(act, 99)
    print(f"99th percentile of requests minus that of act: {apart:.2f} ms")
    slow = outside >= tail
    print(
        f"the slowest {slow.sum()} of {len(rows)}: {np.mean(stops[slow]):.1f} interruptions of the "
        f"service each, {np.mean(stops[~slow]):.1f} in the others"
    )
    return tail


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


def measure_gain(port: int, pipe: Connection, per_client: int, rounds: int) -> float:
    """Print the rates of one and eight clients, best of the rounds; their ratio."""
    before = batches(pipe)
    rates = [
        (rate(port, 1, per_client), rate(port, NUM_CLIENTS, per_client)) for _ in range(rounds)
    ]
    one, many = (max(column) for column in zip(*rates, strict=True))
    print(f"requests/s: {one:.1f} of 1 client, {many:.1f} of {NUM_CLIENTS}; ratio {many / one:.2f}")
    ratios = sorted(pair[1] / pair[0] for pair in rates)
    print("ratio of each round: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))
    after = batches(pipe)
    sizes = {size: number - before.get(size, 0) for size, number in sorted(after.items())}
    print(f"batches by size: {sizes}")
    return many / one


def batches(pipe: Connection) -> dict[int, int]:
    """How many batches of each size the service has run."""
    pipe.send(1)
    sizes: dict[int, int] = pipe.recv()
    return sizes


def print_batch_cost(policy: Policy, num_steps: int, repeats: int) -> None:
    """Processor time of ``act_batch`` per observation, which other work hardly changes."""
    contract = contract_of(policy, num_steps)
    seen = [
        parse_infer(request_body(NUM_CAMERAS, seed), contract).observation
        for seed in range(NUM_CLIENTS)
    ]
    spent: dict[int, list[float]] = {size: [] for size in (1, 2, 4, 8)}
    for _ in range(repeats):  # in turns
        for size, times in spent.items():
            start = time.process_time()
            policy.act_batch(seen[:size], num_steps=num_steps)
            times.append(1000 * (time.process_time() - start) / size)
    alone = statistics.median(spent[1])
    for size, times in spent.items():
        cost = statistics.median(times)
        print(
            f"act_batch of {size}: {cost:.1f} ms of processor time each, ratio {alone / cost:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--per-client", type=int, default=25)
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    steps = arguments.num_steps
    torch.set_num_threads(1)  # of two kinds of threads, a forked child inherits only one
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve_in_child, args=(theirs, steps, arguments.threads))
    child.start()
    port, pid = ours.recv(), child.pid or 0
    torch.set_num_threads(arguments.threads)
    print(describe_machine())
    policy = make_policy("tiny", "cpu", torch.float32, NUM_CAMERAS)
    warm_up(policy, steps)
    settle()

    rows = measure_pairs(port, pid, policy, steps, arguments.pairs)
    tail_ms = print_overhead(rows, resize_time(policy, steps))
    measure_processor_time(port, pid, arguments.per_client)
    gain = measure_gain(port, ours, arguments.per_client, arguments.rounds)
    child.terminate()
    child.join()
    print_batch_cost(policy, steps, 12)
    print_split(policy, steps, 20, "cpu")
    observation = parse_infer(request_body(NUM_CAMERAS, 0), contract_of(policy, steps)).observation
    whole_ms = median_ms(lambda: policy.act(observation, num_steps=steps), 20, "cpu")
    print(f"policy.act on a resized observation as a whole: {whole_ms:.2f} ms")
    sys.exit(tail_ms > MAX_OVERHEAD_MS or gain < MIN_GAIN)


if __name__ == "__main__":
    main()
