"""Whole training runs in forked processes: imports are paid once."""

import faulthandler
import json
import os
import shutil
import signal
import sys
import time
import traceback
import uuid
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import TIMEOUT

from opendm.exp.dm05_exp import DM05Exp, DM05OptimizerConfig, run

CONTEXT = mp.get_context("forkserver")


def experiment(tiny, folder, **changes):
    """A short run of the tiny checkpoint; ``changes`` are ``section__field=value``."""
    exp = DM05Exp(optimizer_config=changes.pop("optimizer_config", DM05OptimizerConfig()))
    values = {
        "model_config__model_name_or_path": str(tiny),
        "model_config__chunk_size": 4,
        "model_config__bf16": False,
        "data_config__norm_stats_root": str(folder.parent / "stats"),
        "optimizer_config__base_lr": 1e-3,
        "optimizer_config__warmup_steps": 2,
        "trainer_config__bf16": False,
        "trainer_config__output_dir": str(folder),
        "trainer_config__num_train_steps": 6,
        "trainer_config__save_steps": 2,
        "trainer_config__per_device_train_batch_size": 4,
        "trainer_config__dataloader_num_workers": 0,
        **changes,
    }
    for name, value in values.items():
        section, field = name.split("__")
        setattr(getattr(exp, section), field, value)
    return exp


class Ranks:
    """Processes of one run, whose exit codes can be waited for.

    ``exp`` may be a list, one experiment by rank. Before the run each calls ``prepare(rank)``, a
    function that forked processes can import.
    """

    def __init__(self, exp, world_size, tmp_path, prepare=None):
        # not of `random`, which a run in this process seeds: ranks would meet an old file again
        store = tmp_path / f"store-{uuid.uuid4().hex}"
        exps = exp if isinstance(exp, list) else [exp] * world_size
        self.processes = [
            CONTEXT.Process(target=_rank, args=(exps[rank], rank, world_size, str(store), prepare))
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def signal(self, signum=signal.SIGKILL, ranks=None):
        for rank, process in enumerate(self.processes):
            if (ranks is None or rank in ranks) and process.is_alive():
                os.kill(process.pid, signum)

    def wait(self, timeout_s=120):
        """Exit codes by rank."""
        for process in self.processes:
            process.join(timeout_s)
            if process.is_alive():
                self.signal(signal.SIGUSR1)  # every rank writes where its threads are
                time.sleep(1)
                self.signal(signal.SIGKILL)
                raise AssertionError("a rank hangs; its error output says where")
        return [process.exitcode for process in self.processes]


def run_ranks(exp, world_size, tmp_path):
    """Exit codes of a run that nobody disturbs."""
    return Ranks(exp, world_size, tmp_path).wait()


def _rank(exp, rank, world_size, store, prepare):
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    if world_size > 1:
        dist.init_process_group(
            "gloo", timeout=TIMEOUT, store=dist.FileStore(store, world_size),
            rank=rank, world_size=world_size,
        )  # fmt: skip
    try:
        if prepare is not None:
            prepare(rank)
        code = run(exp)
    except BaseException:
        traceback.print_exc()
        code = 99
    os._exit(code)


def weights(folder):
    """The exported weights, byte by byte."""
    return (Path(folder) / "model.safetensors").read_bytes()


def interrupted_at(step, source, target):
    """A copy of a run as it was when ``step`` had been saved; metrics go further than that."""
    target.mkdir()
    for number in range(2, step + 1, 2):
        shutil.copytree(source / f"checkpoint-{number}", target / f"checkpoint-{number}")
    shutil.copy(source / "metrics.jsonl", target)
    return target


COMPARED = ("step", "loss", "fm_loss", "grad_norm", "lr")


def metrics(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def assert_same_metrics(folder, expected, rel=0.0):
    """The lines agree, each step once; bit for bit unless ``rel`` is given."""
    lines, wanted = metrics(folder), metrics(expected)
    assert [line["step"] for line in lines] == [line["step"] for line in wanted]
    for line, want in zip(lines, wanted, strict=True):
        for key in COMPARED:
            if rel:
                np.testing.assert_allclose(line[key], want[key], rtol=rel, err_msg=f"{key} {line}")
            else:
                assert line[key] == want[key], (key, line, want)
