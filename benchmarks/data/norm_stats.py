"""Statistics of a dataset: time and memory on a large one, and how much faster than a loader.

    python benchmarks/data/norm_stats.py [--frames 1000000] [--plain-frames 20000] [--rounds 3]

The large set is measured in a fresh process, whose peak memory includes torch (the transforms need
it) and the mapped pages of the index. The other side of the ratio is what a user of a loader
writes: two workers run ``BuildAction`` frame by frame over records that are parsed already, and
numpy computes the same numbers of all real rows at once. Both sides are timed in turn, best of the
rounds; they must agree bit for bit in quantiles and extremes and to 1e-12 in mean and deviation.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from machine import describe_machine

from opendm.constants.robot import ActionMode
from opendm.data.index import FrameIndex
from opendm.data.stat_columns import StatisticsPart
from opendm.data.statistics import compute_statistics
from opendm.data.transforms import BuildAction

DIMS: Final = 14
EPISODE: Final = 500
DESC: Final = (*("joint",) * 6, "gripper") * 2
NUM_WORKERS: Final = 2
BATCH_SIZE: Final = 128


def make_index(num_frames: int) -> FrameIndex:
    """Random walks of 14 joints in episodes of 500 frames."""
    rng = np.random.default_rng(0)
    starts = np.append(np.arange(0, num_frames, EPISODE), num_frames)
    state = rng.normal(0, 0.02, (num_frames, DIMS)).cumsum(axis=0) % 3
    episodes = len(starts) - 1
    zeros = np.zeros(num_frames, np.int64)
    return FrameIndex(
        files=(),
        episodes=tuple(f"{number:06}" for number in range(episodes)),
        tasks=("",),
        dropped=(),
        episode_file=np.zeros(episodes, np.int32),
        has_actions=np.ones(episodes, bool),
        starts=starts,
        state=state,
        action=state + rng.normal(0, 0.01, state.shape),
        task=zeros,
        position=zeros,
        num_bytes=zeros,
    )


def part_of(index: FrameIndex, horizon: int, mode: ActionMode) -> StatisticsPart:
    transform = BuildAction(horizon, mode)
    return StatisticsPart(index, range(len(index.episodes)), "Aloha", transform, DESC)


class PlainSamples(torch.utils.data.Dataset):
    """Frames of an index through ``BuildAction``, one at a time."""

    def __init__(self, part: StatisticsPart) -> None:
        index = part.index
        self.transform = part.action_transform
        self.frames = [
            [{"state": s.tolist(), "action": a.tolist()} for s, a in zip(*rows, strict=True)]
            for rows in (
                (index.state[r.start : r.stop], index.action[r.start : r.stop])
                for r in map(index.episode_rows, part.episodes)
            )
        ]
        self.lines = [[json.dumps(frame) for frame in frames] for frames in self.frames]

    def __len__(self) -> int:
        return sum(map(len, self.frames))

    def __getitem__(self, number: int) -> dict[str, Any]:
        episode, frame = divmod(number, EPISODE)
        meta = {"frame_index": frame, "state_desc": DESC}
        lines = Numbers(self.frames[episode], self.lines[episode])
        sample = self.transform({
            **self.frames[episode][frame], "raw_lines": lines, "meta_data": meta
        })  # fmt: skip
        return {key: sample[key] for key in ("state", "action", "action_mask")}


class Numbers:
    """An episode as text and as numbers."""

    def __init__(self, frames: list[dict[str, Any]], lines: list[str]) -> None:
        self.frames, self.lines = frames, lines

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> str:
        return self.lines[number]

    def vectors(self, field: str, start: int, stop: int) -> np.ndarray:
        return np.asarray([frame[field] for frame in self.frames[start:stop]])


def plain_statistics(samples: PlainSamples) -> dict[str, dict[str, np.ndarray]]:
    """A loader, a list of batches, and numpy."""
    loader = torch.utils.data.DataLoader(
        samples, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS, prefetch_factor=4
    )
    states, actions = [], []
    for batch in loader:
        states.append(batch["state"].numpy())
        actions.append(batch["action"].numpy()[batch["action_mask"].numpy().any(-1)])
    found = {}
    for key, rows in (("state", states), ("action", actions)):
        wide = np.concatenate(rows).astype(np.float64)
        q01, q99 = np.quantile(wide, (0.01, 0.99), axis=0)
        found[key] = {"mean": wide.mean(0), "std": wide.std(0), "q01": q01, "q99": q99}
        found[key] |= {"min": wide.min(0), "max": wide.max(0)}
    return found


def compare_with_plain(num_frames: int, horizon: int, rounds: int) -> None:
    """Print the ratio of both sides."""
    part = part_of(make_index(num_frames), horizon, ActionMode.RELATIVE)
    samples = PlainSamples(part)
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    for _ in range(rounds):
        start = time.perf_counter()
        plain = plain_statistics(samples)
        times["plain"].append(time.perf_counter() - start)
        start = time.perf_counter()
        ours = compute_statistics([part]).profiles["Aloha"]
        times["ours"].append(time.perf_counter() - start)
    for key, expected in plain.items():
        for field in ("q01", "q99", "min", "max"):
            np.testing.assert_array_equal(ours[key].to_json()[field], expected[field])
        for field in ("mean", "std"):
            np.testing.assert_allclose(ours[key].to_json()[field], expected[field], rtol=1e-12)
    best = {side: min(values) for side, values in times.items()}
    print(
        f"{num_frames} frames x {DIMS} x {horizon}, relative: loader with {NUM_WORKERS} workers "
        f"{best['plain']:.2f} s, ours {best['ours']:.3f} s: {best['plain'] / best['ours']:.0f} x"
    )


def measure_large(folder: Path, horizon: int, mode: ActionMode) -> None:
    """Print time and peak memory of this process, over an index that lies on disk."""
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    index = FrameIndex.open(folder)
    start, start_cpu = time.perf_counter(), time.process_time()
    compute_statistics([part_of(index, horizon, mode)])
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{index.num_frames} frames x {DIMS} x {horizon}, {mode.value}: {seconds:.1f} s "
        f"({cpu_s:.1f} s of processor), "
        f"peak {peak_mb:.0f} MiB, of which {before_mb:.0f} MiB were there before (torch)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--plain-frames", type=int, default=20_000)
    parser.add_argument("--horizon", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--make", type=Path, help="folder of an index, for the child")
    parser.add_argument("--measure", nargs=2, help="folder of an index and a mode, for the child")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.make:
        make_index(arguments.frames).save(arguments.make)
        return
    if arguments.measure:
        folder, mode = arguments.measure
        measure_large(Path(folder), arguments.horizon, ActionMode(mode))
        return
    print(describe_machine(), f"load before: {os.getloadavg()[0]:.1f}", sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        # in a child: a process starts with the peak memory of the one that started it
        words = ["--make", folder, "--frames", str(arguments.frames)]
        subprocess.run([sys.executable, __file__, *words], check=True)
        for mode in ActionMode:
            words = ["--measure", folder, mode.value, "--horizon", str(arguments.horizon)]
            subprocess.run([sys.executable, __file__, *words], check=True)
    compare_with_plain(arguments.plain_frames, arguments.horizon, arguments.rounds)


if __name__ == "__main__":
    main()
