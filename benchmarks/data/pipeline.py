"""The whole training pipeline against the plain version of ``plain.py``, and where its time goes.

    python benchmarks/data/pipeline.py [--frames 60000] [--rounds 5] [--samples 320] [--steps 2000]

Two cameras of 640 x 480 JPEG, pictures of 448 x 448 for the model, 14 joints, chunks of 50 steps;
episodes of 100, 1,000 and 20,000 frames hold the same frames. Both sides are asked for the same
samples with the same seeds, and give them to the bit. Loaders have 2 workers, batches of 8, and
their workers stay alive between the rounds, which alternate; times are the best of the rounds.
Processor time is that of the workers, and less touched by other work on the machine.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

sys.path.append(sys.path.pop(0))  # this folder last: one of its files is named as a standard module
sys.path.append(str(Path(__file__).parents[1]))
import pipeline_set as made
import plain
from machine import describe_machine

from opendm.data.augmentations import TrainingTransformPipeline
from opendm.data.collator import TrainingCollator
from opendm.data.transforms import BuildAction, LoadImages, Pipeline, PixelTransform
from opendm.data.transforms.prompt import build_messages
from opendm.data.transforms.prompt_encoding import stack_pixels
from opendm.model.dm05.tiny import ImageSizes, build_processor
from opendm.pixels import scale_bytes

NUM_WORKERS: Final = 2
BATCH_SIZE: Final = 8
KEPT_FILES: Final = 32
LENGTHS: Final = (100, 1000, 20_000)


class Seeded(Dataset):
    """Samples whose randomness depends on their number alone."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        torch.default_generator.manual_seed(index)  # torch.manual_seed formats three tracebacks
        return self.samples[index]


class RoundSampler(Sampler):
    """Random samples, others in every round."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count, self.round = size, count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.round)
        yield from torch.randint(self.size, (self.count,), generator=generator).tolist()


def make_loader(samples: Any, collate: Callable[[Any], Any], count: int) -> DataLoader:
    return DataLoader(
        Seeded(samples),
        BATCH_SIZE,
        sampler=RoundSampler(len(samples), count),
        num_workers=NUM_WORKERS,
        collate_fn=collate,
        persistent_workers=True,
        multiprocessing_context="fork",
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per sample."""

    wall: float
    processor: float


def cost_per_sample(loader: DataLoader, number: int) -> Cost:
    sampler: Any = loader.sampler
    sampler.round = number
    before, start = worker_seconds(loader), time.perf_counter()
    for _ in loader:
        pass
    wall = time.perf_counter() - start
    return Cost(wall / len(sampler), (worker_seconds(loader) - before) / len(sampler))


def worker_seconds(loader: Any) -> float:
    """Processor time of the workers; 0 before they start."""
    workers = loader._iterator._workers if loader._iterator else []  # noqa: SLF001
    fields = [
        Path(f"/proc/{worker.pid}/stat").read_text().rsplit(")")[1].split() for worker in workers
    ]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


def time_loaders(loaders: Mapping[str, DataLoader], rounds: int) -> dict[str, Cost]:
    """Least cost of each, in turn; the first round starts the workers."""
    found: dict[str, list[Cost]] = {name: [] for name in loaders}
    for number in range(rounds + 1):
        for name, loader in loaders.items():
            cost = cost_per_sample(loader, number)
            if number:
                found[name].append(cost)
    return {
        name: Cost(min(c.wall for c in costs), min(c.processor for c in costs))
        for name, costs in found.items()
    }


def time_reads(sides: Mapping[str, Any], count: int, rounds: int) -> dict[str, float]:
    """Best seconds per sample of each in this process, in turn, on random samples."""
    best = dict.fromkeys(sides, float("inf"))
    for number in range(rounds + 1):
        for name, side in sides.items():
            order = torch.randint(
                len(side), (count,), generator=torch.Generator().manual_seed(number)
            ).tolist()
            start = time.perf_counter()
            for index in order:
                side[index]
            taken = (time.perf_counter() - start) / count
            best[name] = min(best[name], taken) if number else best[name]
    return best


def check_same(ours: DataLoader, others: DataLoader) -> int:
    """Number of batches, which are equal to the bit once the model has scaled our bytes."""
    count = 0
    for one, other in zip(ours, others, strict=True):
        if set(one) != set(other):
            sys.exit(f"ours has {sorted(one)}, the plain version {sorted(other)}")
        for key, given in one.items():
            value = scale_bytes(given) if given.dtype == torch.uint8 else given
            if value.dtype != other[key].dtype or not torch.equal(value, other[key]):
                sys.exit(f"{key} differs")
        count += 1
    return count


def nothing(samples: Sequence[Any]) -> int:
    return len(samples)


class Sides:
    """Both versions over the sets below ``root``."""

    def __init__(self, root: Path, processor: Any) -> None:
        self.root, self.processor = root, processor
        self.collate = TrainingCollator(processor.tokenizer.pad_token_id)

    def ours(self, length: int) -> Any:
        return made.our_dataset(self.root, length, made.transforms(self.root, self.processor))

    def pictures_only(self, length: int) -> Any:
        """Decoding and augmentation alone; nothing but a number leaves the worker."""
        keys = [camera for camera, _ in made.CAMERAS]
        steps = [
            LoadImages(keys, str(self.root)),
            PixelTransform(TrainingTransformPipeline(made.IMAGE_SIZE)),
        ]
        return made.our_dataset(self.root, length, Pipeline(steps))

    def plain_frames(self, length: int, kept_files: int) -> plain.PlainFrames:
        folder = self.root / f"episodes_{length}"
        return plain.PlainFrames(folder, made.GRIPPER, made.HORIZON, kept_files)

    def plain(self, length: int) -> plain.PlainSamples:
        return plain.PlainSamples(
            self.plain_frames(length, KEPT_FILES),
            image_dir=self.root,
            cameras=made.CAMERAS,
            stats=made.statistics(),
            processor=self.processor,
            robot_type=made.ROBOT,
        )


def report_whole(sides: Sides, count: int, rounds: int) -> None:
    print(f"\nwhole pipeline, {NUM_WORKERS} workers, ms per sample, {count} samples a round")
    for length in LENGTHS[1:]:
        loaders = {
            "ours": make_loader(sides.ours(length), sides.collate, count),
            "plain": make_loader(sides.plain(length), plain.collate, count),
            "decode + augment": make_loader(sides.pictures_only(length), nothing, count),
        }
        same = check_same(loaders["ours"], loaders["plain"])
        best = time_loaders(loaders, rounds)
        ours, other, pictures = best["ours"], best["plain"], best["decode + augment"]
        print(f"{length:6d}-frame episodes ({same} batches are equal to the bit):")
        for kind, one, two, three in (
            ("time", ours.wall, other.wall, pictures.wall),
            ("processor time", ours.processor, other.processor, pictures.processor),
        ):
            print(
                f"  {kind}: ours {one * 1e3:.2f}, plain {two * 1e3:.2f}, decode + augment "
                f"{three * 1e3:.2f}; plain / ours {two / one:.2f}, "
                f"ours / (decode + augment) {one / three:.2f}",
                flush=True,
            )


def report_reading(sides: Sides, rounds: int) -> None:
    print("\nreading and action building alone, one process, us per sample")
    for length in LENGTHS[1:]:
        versions = {
            "ours": made.our_dataset(sides.root, length, BuildAction(made.HORIZON)),
            f"plain, lines of {KEPT_FILES} files kept": sides.plain_frames(length, KEPT_FILES),
        }
        best = time_reads(versions, 2000, rounds)
        again = {"plain, file read again": sides.plain_frames(length, 0)}
        best |= time_reads(again, 40, 1)
        text = ", ".join(
            f"{name} {taken * 1e6:.1f} ({taken / best['ours']:.1f} x)"
            for name, taken in best.items()
        )
        print(f"{length:6d}-frame episodes: {text}", flush=True)


def report_lengths(sides: Sides, count: int, rounds: int) -> None:
    print("\nours by length of the episodes")
    reading = {
        str(length): made.our_dataset(sides.root, length, BuildAction(made.HORIZON))
        for length in LENGTHS
    }
    print_lengths("reading and action building, us", time_reads(reading, 2000, rounds), 1e6)
    loaders = {
        str(length): make_loader(sides.ours(length), sides.collate, count) for length in LENGTHS
    }
    best = time_loaders(loaders, rounds)
    print_lengths("whole, ms", {name: cost.wall for name, cost in best.items()}, 1e3)
    processor = {name: cost.processor for name, cost in best.items()}
    print_lengths("whole, ms of processor", processor, 1e3)


def print_lengths(what: str, best: Mapping[str, float], unit: float) -> None:
    text = ", ".join(f"{name} frames {taken * unit:.2f}" for name, taken in best.items())
    print(f"{what}: {text}; most / least {max(best.values()) / min(best.values()):.3f}", flush=True)


def report_parts(sides: Sides, num_batches: int) -> None:
    """A table of the steps of one sample, the mean, in one process that shares no memory."""
    dataset = made.our_dataset(sides.root, 1000, None)
    steps = made.transforms(sides.root, sides.processor).transforms
    names = ["actions", "read and decode JPEG", "augment", "normalise", "prompt", "pad actions"]
    order = torch.randint(len(dataset), (num_batches + 1, BATCH_SIZE)).tolist()
    for number, batch in enumerate(order):
        if number < 2:
            taken: dict[str, list[float]] = {}  # the first batch warms up
        samples = []
        for index in batch:
            torch.default_generator.manual_seed(index)
            sample = measured(taken, "read the record", lambda i=index: dataset[i])
            for name, step in zip(names, steps, strict=True):
                if name == "prompt":
                    time_prompt(sides.processor, sample, taken)
                sample = measured(taken, name, lambda s=step, x=sample: s(x))
            samples.append(sample)
        measured(taken, "collate", lambda s=samples: sides.collate(s))
    inner = ("template", "tokenise", "stack pixels")
    per_sample = {name: sum(v) / num_batches / BATCH_SIZE for name, v in taken.items()}
    total = sum(value for name, value in per_sample.items() if name not in inner)
    print("\n| Part of a sample | us | of the whole |\n|---|---|---|")
    for name, value in per_sample.items():
        label = f"(of the prompt: {name})" if name in inner else name
        print(f"| {label} | {value * 1e6:.0f} | {value / total:.1%} |")
    print(f"| whole | {total * 1e6:.0f} | |", flush=True)


def measured(taken: dict[str, list[float]], name: str, call: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = call()
    taken.setdefault(name, []).append(time.perf_counter() - start)
    return result


def time_prompt(processor: Any, sample: Any, taken: dict[str, list[float]]) -> None:
    """The parts of the prompt, each alone."""
    messages = build_messages(
        sample["prompt"], sample["images"], [label for _, label in made.CAMERAS],
        robot_type=made.ROBOT, state_bins=[127] * made.DIMS,
    )  # fmt: skip
    text = measured(
        taken, "template",
        lambda: processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
    )  # fmt: skip
    # nearly what the encoder splits; its text has a few more line ends
    measured(taken, "tokenise", lambda: processor.tokenizer(text, add_special_tokens=False))
    measured(taken, "stack pixels", lambda: stack_pixels(sample["images"]))


def report_memory(sides: Sides, steps: int) -> None:
    samples = sides.ours(20_000)
    small = DataLoader(
        Seeded(samples), 2, sampler=RoundSampler(len(samples), steps * 2),
        num_workers=NUM_WORKERS, collate_fn=sides.collate, multiprocessing_context="fork",
    )  # fmt: skip
    found = {}
    batches = iter(small)
    workers: Any = batches
    pids = [os.getpid(), *(worker.pid for worker in workers._workers)]  # noqa: SLF001
    for step in range(1, steps + 1):
        next(batches)
        if step in {steps // 10, steps // 2, steps}:
            found[step] = [resident_mib(pid) for pid in pids]
    print("\nprivate memory, MiB: parent and workers, batches of 2, 20,000-frame episodes")
    for step, sizes in found.items():
        print(f"after {step:5d} steps: " + ", ".join(f"{size:.1f}" for size in sizes), flush=True)


def resident_mib(pid: int) -> float:
    """Memory that is neither a file's nor shared."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise SystemExit("this part reads /proc of Linux")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=60_000)
    parser.add_argument("--samples", type=int, default=320, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000, help="for the memory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(describe_machine(), f"load before: {os.getloadavg()[0]:.1f}", sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        num_bytes = made.write_pictures(root, options.frames)
        for length in LENGTHS:
            made.write_episodes(root / f"episodes_{length}", options.frames, length)
        made.write_statistics(root / "stats.json")
        print(
            f"{options.frames} frames, 2 cameras, 640 x 480 JPEG of {num_bytes / 1e3:.0f} kB, "
            f"{made.IMAGE_SIZE} px for the model, {made.DIMS} joints, horizon {made.HORIZON}",
            flush=True,
        )
        processor = build_processor(made.TASKS, ImageSizes(made.IMAGE_SIZE, 14, 256))
        sides = Sides(root, processor)
        report_reading(sides, options.rounds)
        report_parts(sides, 20)
        report_whole(sides, options.samples, options.rounds)
        report_lengths(sides, options.samples, options.rounds)
        report_memory(sides, options.steps)
        print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
