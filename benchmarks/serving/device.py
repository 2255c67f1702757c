"""Latency of the released size on one GPU, with and without CUDA graphs over the suffix.

    python benchmarks/serving/device.py [--device cuda] [--size released] [--requests 100]

Random bfloat16 weights, 3 cameras, 10 steps, one request at a time. Takes below three minutes. On a
CPU, with ``--size tiny``, it shows that the script runs; graphs need a GPU. Ends with 1 if the
graphs' actions differ from the plain ones by more than bfloat16 explains.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit import contract_of, make_policy, print_split, request_body, synchronize
from machine import describe_machine

from opendm.infer.cuda_graphs import SuffixGraphs, record_cuda_graph
from opendm.infer.policy import Policy
from opendm.infer.request import parse_infer

NUM_CAMERAS: Final = 3
BUCKETS: Final = (896, 1024)
TOLERANCE: Final = 0.05
"""Of actions in [-1, 1] that are sampled in 10 steps of bfloat16 products."""


def latencies_ms(policy: Policy, num_steps: int, requests: int, device: str) -> np.ndarray:
    """Milliseconds from a request's bytes to its actions, after three to warm up."""
    contract = contract_of(policy, num_steps)
    bodies = [request_body(NUM_CAMERAS, seed) for seed in range(8)]
    noise = policy.noise_for([0])
    times = []
    for index in range(requests + 3):
        synchronize(device)
        start = time.perf_counter()
        observation = parse_infer(bodies[index % len(bodies)], contract).observation
        policy.act(observation, num_steps=num_steps, noise=noise)
        times.append(1000 * (time.perf_counter() - start))
    return np.array(times[3:])


def report(name: str, times: np.ndarray) -> None:
    """One line of percentiles."""
    p50, p99 = np.percentile(times, [50, 99])
    print(f"{name:<24} p50 {p50:8.2f} ms   p99 {p99:8.2f} ms   {1000 / p50:7.2f} requests/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=("released", "tiny"), default="released")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--num-steps", type=int, default=10)
    arguments = parser.parse_args()
    device, steps = arguments.device, arguments.num_steps
    print(describe_machine())
    if device == "cuda":
        print(torch.cuda.get_device_name())
    dtype = torch.bfloat16 if arguments.size == "released" else torch.float32
    policy = make_policy(arguments.size, device, dtype, NUM_CAMERAS)
    print(f"{policy.model.parameter_summary()['total']:,} parameters, {dtype}, {steps} steps")
    print_split(policy, steps, 10, device)

    plain = policy.sampler
    report("plain", latencies_ms(policy, steps, arguments.requests, device))
    if device != "cuda":
        print("no CUDA device: graphs are not measured")
        return
    graphs = SuffixGraphs(policy.model, steps, BUCKETS, record_cuda_graph)
    policy.sampler = graphs
    report("CUDA graphs", latencies_ms(policy, steps, arguments.requests, device))

    observation = parse_infer(request_body(NUM_CAMERAS, 0), contract_of(policy, steps)).observation
    noise, actions = policy.noise_for([1]), []
    for sampler in (plain, graphs):
        policy.sampler = sampler
        actions.append(policy.act(observation, num_steps=steps, noise=noise))
    difference = float(np.abs(actions[0] - actions[1]).max())
    print(f"largest difference of actions: {difference:.2e}")
    print(f"memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    sys.exit(difference > TOLERANCE)


if __name__ == "__main__":
    main()
