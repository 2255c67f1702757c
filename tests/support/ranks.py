"""Work in several forked processes under gloo: torch is imported once and forked from there."""

import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from opendm.errors import OpenDMError

TIMEOUT = timedelta(seconds=60)
"""After which a rank that waits for another fails instead of hanging."""
CONTEXT = mp.get_context("forkserver")
# imported once, in a process without autograd threads, and forked from there
CONTEXT.set_forkserver_preload(["opendm.model.dm05.tiny", "opendm.exp.training"])


def fork_ranks(work, *arguments, tmp_path: Path, world_size: int = 2):
    """Run ``work(rank, *arguments)`` in forked processes under gloo; results by rank.

    ``work`` is a function of a module that forked processes can import.
    """
    results = CONTEXT.SimpleQueue()
    store = tmp_path / "store"
    store.unlink(missing_ok=True)
    processes = [
        CONTEXT.Process(target=_rank, args=(work, arguments, rank, world_size, store, results))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    collected = dict(results.get() for _ in processes)
    for process in processes:
        process.join(60)
    for rank, value in sorted(collected.items()):
        if isinstance(value, str) and value.startswith("Traceback"):
            raise AssertionError(f"rank {rank}: {value}")
    return [collected[rank] for rank in range(world_size)]


def _rank(work, arguments, rank, world_size, store, results):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            timeout=TIMEOUT,
            store=dist.FileStore(str(store), world_size),
            rank=rank,
            world_size=world_size,
        )
        results.put((rank, work(rank, *arguments)))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc()))


def message_of(action):
    """What an action is refused with."""
    try:
        action()
    except OpenDMError as error:
        return str(error)
    return "accepted"
