"""Time to index a large JSONL dataset, and to open the index again.

Writes a set of frames of about 500 bytes (14 state and 14 action values, two image records) into a
temporary folder, indexes it as a run would, and opens it again in another process.

    python benchmarks/data/index.py --frames 1000000 --episodes 1000
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from machine import describe_machine

from opendm.data.formats import open_source

DIMENSIONS: Final = 14
TEMPLATES: Final = 1000
"""Different lines; repeated, because formatting a million would take longer than reading them."""
OPEN_AGAIN: Final = """
import sys, time
import numpy, orjson
from opendm.data.formats import open_source
started = time.perf_counter()
source = open_source(sys.argv[1], index_root=sys.argv[2])
source.record(len(source.index.episodes) - 1, 0)
print(time.perf_counter() - started)
"""


def write_dataset(folder: Path, num_frames: int, num_episodes: int) -> int:
    """Write episodes of equal length; the number of bytes."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(TEMPLATES):
        values = rng.normal(size=2 * DIMENSIONS).round(6).tolist()
        lines.append(
            f'{{"images_1": {{"type": "image", "url": "./images/high/{number:06d}.jpg"}}, '
            f'"images_2": {{"type": "image", "url": "./images/left/{number:06d}.jpg"}}, '
            f'"state": {values[:DIMENSIONS]}, "action": {values[DIMENSIONS:]}, '
            '"prompt": "Put the red cube into the box", "is_robot": true}\n'
        )
    per_episode = num_frames // num_episodes
    for number in range(num_episodes):
        first = number * 7 % TEMPLATES
        block = "".join(lines[first:] + lines[:first])
        whole, rest = divmod(per_episode, TEMPLATES)
        text = block * whole + "".join((lines[first:] + lines[:first])[:rest])
        (folder / f"episode_{number:06d}.jsonl").write_text(text)
    return sum(path.stat().st_size for path in folder.iterdir())


def processor_seconds() -> float:
    """Of this process and the children that have ended; other people's work does not count."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        data.mkdir()
        num_bytes = write_dataset(data, arguments.frames, arguments.episodes)
        print(
            f"{arguments.frames} frames in {arguments.episodes} files, {num_bytes / 1e6:.0f} MB, "
            f"{num_bytes / arguments.frames:.0f} bytes a frame"
        )
        made, opened, worked = [], [], []
        for repeat in range(arguments.repeats):
            index_root = Path(name) / f"index-{repeat}"
            started, before = time.perf_counter(), processor_seconds()
            source = open_source(data, index_root=index_root)
            made.append(time.perf_counter() - started)
            worked.append(processor_seconds() - before)
            if source.index.num_frames != arguments.frames:
                sys.exit(f"the index has {source.index.num_frames} frames")
            again = subprocess.run(
                [sys.executable, "-c", OPEN_AGAIN, str(data), str(index_root)],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            opened.append(float(again.stdout))
        print(f"indexed and saved: {[f'{s:.2f} s' for s in made]}, best {min(made):.2f} s")
        print(f"processor time of all processes for that: best {min(worked):.2f} s")
        print(f"opened again: {[f'{s:.3f} s' for s in opened]}, best {min(opened):.3f} s")


if __name__ == "__main__":
    main()
