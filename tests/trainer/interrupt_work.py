"""What forked ranks do in test_interrupt.py and test_rank_agreement.py."""

import os
import signal
import subprocess
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from opendm.errors import EngineError
from opendm.trainer.interrupt import StopRequest, outlive_signals
from opendm.trainer.rank_agreement import compare

CPU = torch.device("cpu")


def stop_one_rank(rank, signalled, at_step):
    """Steps until all agree; the rank ``signalled`` gets SIGTERM in the middle of a step."""
    with StopRequest() as stop:
        stop.finish_steps(CPU)
        for step in range(6):
            if (rank, step) == (signalled, at_step):
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.agreed(CPU):
                return step, stop.asked_by.name
    return None


class SlowNumbers:
    """0 to 11, each after a moment."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.05)
        return index


def read_under_signals(protect):
    """How many batches arrive when the whole process group gets SIGTERM and SIGHUP."""
    with StopRequest() as stop:
        stop.finish_steps(CPU)
        loader = DataLoader(
            SlowNumbers(), num_workers=2, worker_init_fn=protect, multiprocessing_context="fork"
        )
        batches = iter(loader)
        count = len(next(batches))
        try:
            for name in ("TERM", "HUP"):  # from another process: the rank may end its workers
                subprocess.run(["kill", f"-{name}", "--", f"-{os.getpgrp()}"], check=False)
            count += sum(len(batch) for batch in batches)
        except (RuntimeError, OSError):
            return "lost a worker"
        return f"{count} {stop.asked_by.name}"


LEFT = []


def signal_loaders(rank):
    """Batches with and without protection, and workers that are left to wait at the end."""
    os.setsid()
    outcomes = [read_under_signals(outlive_signals), read_under_signals(None)]
    known = set(children())
    loader = DataLoader(SlowNumbers(), num_workers=2, worker_init_fn=outlive_signals)
    LEFT.append(iter(loader))  # by this context's own way to start them, a fork server
    next(LEFT[0])
    return [*outcomes, [pid for pid in children() if pid not in known]]


def children():
    """Process ids of the data loaders' workers."""
    return [process.pid for process in torch.multiprocessing.active_children()]


def compare_facts(rank, facts_by_rank, timeout_s):
    """What each comparison says, and how long it took (s)."""
    outcomes = []
    for facts in facts_by_rank:
        dist.barrier()
        started = time.monotonic()
        try:
            compare(facts[rank], timeout_s)
            outcomes.append(("", time.monotonic() - started))
        except EngineError as error:
            outcomes.append((str(error), time.monotonic() - started))
    return outcomes


def compare_without_rank_1(rank, timeout_s):
    """Rank 1 never comes."""
    outcome = compare_facts(0, [[{"a": "1"}]], timeout_s) if rank == 0 else dist.barrier()
    dist.barrier()
    return outcome
