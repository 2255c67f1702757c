"""Hold results of ``opendm eval metaworld`` against what a policy that sees must reach.

    python benchmarks/training/sim_criteria.py RESULT.json...

One line per condition; exits with 1 when one fails. The limits are for the widened start range of
button-press-topdown-v3, where a blind motion seldom succeeds.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

LEAST_SOLVED: Final = 0.95
MOST_SOLVED: Final = {
    "untrained": 0.0,
    "blind mean demonstration": 0.2,
    "blank images": 0.05,
    "frozen images of another start": 0.05,
}


def judge(task: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Condition, result and whether it is as it must be."""
    last = max(task["by_step"], key=int)
    found = {"this policy": task["by_step"][last], **task["controls"]}
    for name in ("this policy", *MOST_SOLVED):
        if name not in found:
            yield name, "not measured", False
            continue
        rate = found[name]
        share = rate["successes"] / rate["episodes"]
        limit = MOST_SOLVED.get(name)
        is_met = share >= LEAST_SOLVED if limit is None else share <= limit
        yield name, f"{rate['successes']}/{rate['episodes']}", is_met


def main(paths: list[str]) -> int:
    """Print every condition of every file."""
    failed = 0
    for path in paths:
        for task, result in json.loads(Path(path).read_text(encoding="utf-8"))["tasks"].items():
            for name, rate, is_met in judge(result):
                failed += not is_met
                print(f"{path}  {task}  {name}: {rate}  {'as required' if is_met else 'FAILED'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
