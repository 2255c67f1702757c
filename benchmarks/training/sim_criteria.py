"""Hold results of ``opendm eval metaworld`` against what a policy that sees must reach.

    python benchmarks/training/sim_criteria.py RESULT.json...

One line per condition; exits with 1 when one fails. With one task the limits are for the widened
start range of button-press-topdown-v3, where a blind motion seldom succeeds. With several they are
for each task and for their mean, and a task whose scene others share must fail when it is told
another's sentence.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from opendm.eval.metaworld.tasks import find_task

LEAST_SOLVED: Final = 0.95
LEAST_SOLVED_EACH: Final = 0.7
LEAST_SOLVED_MEAN: Final = 0.85
MOST_SOLVED_TOLD: Final = 0.2
"""By a policy that is told another task's sentence."""
MOST_SOLVED: Final = {
    "untrained": 0.0,
    "blind mean demonstration": 0.2,
    "blank images": 0.05,
    "frozen images of another start": 0.05,
}


def share(rate: dict[str, Any]) -> float:
    """Of the starts."""
    return rate["successes"] / rate["episodes"]


def judge(task: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Condition, result and whether it is as it must be."""
    found = {"this policy": task["judged"], **task["controls"]}
    for name in ("this policy", *MOST_SOLVED):
        if name not in found:
            yield name, "not measured", False
            continue
        rate = found[name]
        limit = MOST_SOLVED.get(name)
        is_met = share(rate) >= LEAST_SOLVED if limit is None else share(rate) <= limit
        yield name, f"{rate['successes']}/{rate['episodes']}", is_met


def judge_several(tasks: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, bool]]:
    """Condition, result and whether it is as it must be, of one policy for all."""
    shares = {name: share(task["judged"]) for name, task in tasks.items()}
    for name, found in shares.items():
        yield name, f"{found:.0%}", found >= LEAST_SOLVED_EACH
    mean = sum(shares.values()) / len(shares)
    yield "mean", f"{mean:.1%}", mean >= LEAST_SOLVED_MEAN
    for name in filter(lambda name: find_task(name).has_disc, tasks):
        controls = tasks[name]["controls"]
        told = {control: share(rate) for control, rate in controls.items() if "told" in control}
        if not told:
            yield f"{name}, told another sentence", "not measured", False
        for control, found in told.items():
            yield f"{name}, {control}", f"{found:.0%}", found <= MOST_SOLVED_TOLD


def main(paths: list[str]) -> int:
    """Print every condition of every file."""
    failed = 0
    for path in paths:
        tasks = json.loads(Path(path).read_text(encoding="utf-8"))["tasks"]
        judged = judge(*tasks.values()) if len(tasks) == 1 else judge_several(tasks)
        for name, rate, is_met in judged:
            failed += not is_met
            print(f"{path}  {name}: {rate}  {'as required' if is_met else 'FAILED'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
