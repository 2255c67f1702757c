"""What importing ``opendm.optimizer`` costs a project that knows nothing of OpenDM."""

import json
import statistics
import subprocess
import sys

MOST_SECONDS = 0.1

MEASURED = """
import json, os, sys, time
import torch
before = set(sys.modules)
for _ in range(5):
    if os.fork():  # each child imports anew, after the one import of torch
        os.wait()
        continue
    wall, cpu = time.perf_counter(), time.process_time()
    import jaxtyping
    import opendm.optimizer
    opendm.optimizer.MuonAdamW
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(json.dumps([wall, cpu, sorted(set(sys.modules) - before)]), flush=True)
    os._exit(0)
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_it_costs_a_tenth_of_a_second_beyond_torch_and_loads_no_other_package():
    rounds = run(MEASURED)
    wall_s, cpu_s = (statistics.median(times) for times in list(zip(*rounds, strict=True))[:2])
    print(f"opendm.optimizer.MuonAdamW beyond torch: {wall_s:.3f} s, on the CPU {cpu_s:.3f} s")
    loaded = {name for *_, modules in rounds for name in modules}
    assert "opendm.optimizer.muon_adamw" in loaded
    allowed = ("opendm.", "jaxtyping.", "numpy.typing.", "numpy._typing.")  # jaxtyping's own two
    foreign = {
        name
        for name in loaded
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not f"{name}.".startswith((*allowed, "torch."))
    }
    assert foreign == set()
    lazy = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._tensor")
    assert {name for name in loaded if name.startswith(lazy)} == set()
    assert len(rounds) == 5
    assert cpu_s <= MOST_SECONDS  # unlike the time on the clock it leaves out what else runs


def test_the_package_itself_loads_without_torch():
    program = "import json, sys, opendm.optimizer; print(json.dumps('torch' in sys.modules))"
    assert run(program) == [False]
