"""A run in small: phases with a collective in each, and a fault where the command line says.

``rank_program.py FOLDER PHASE RANK FAULT``; it leaves its process id and the moment of the fault in
FOLDER.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from opendm.errors import DataError, OpenDMError
from opendm.failure import phase, record_exception, record_failure
from opendm.runtime import (
    Runtime,
    collective_timeout_s,
    end_with_launcher,
    environment,
    show_stacks_on_signal,
)

PHASES = ("statistics", "loading", "step", "optimizer", "saving")


def die(error: Exception) -> None:
    raise error


def busy() -> None:
    while True:
        pass


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "abort": lambda: os.kill(os.getpid(), signal.SIGABRT),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": lambda: die(ValueError("broken\nsecond line")),
    "data": lambda: die(DataError("no such frame")),
    "memory": lambda: die(MemoryError("no more")),
    "exit 0": lambda: os._exit(0),  # an orderly exit sometimes aborts in gloo
    "exit 3": lambda: os._exit(3),
    "sleep": lambda: time.sleep(300),
    "busy": busy,
}


def run(folder: Path, where: str, who: int, fault: str) -> None:
    timeout = timedelta(seconds=collective_timeout_s())
    dist.init_process_group("gloo", timeout=timeout)
    rank = dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    with phase("training", environment()):
        for name in PHASES:
            with phase(name, environment()):
                dist.all_reduce(torch.ones(1))
                if (name, rank) == (where, who):
                    (folder / "moment").write_text(str(time.time()))
                    FAULTS[fault]()
                dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def main(folder: str, where: str, who: str, fault: str) -> int:
    torch.set_num_threads(1)
    end_with_launcher()
    show_stacks_on_signal()
    assert Runtime.from_env().world_size > 1
    try:
        run(Path(folder), where, int(who), fault)
    except OpenDMError as error:
        record_failure(str(error), error.exit_code, environment())
        return error.exit_code
    except Exception as error:
        record_exception(error, environment())
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
