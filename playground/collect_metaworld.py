"""Record demonstrations of Meta-World's scripted experts as OpenDM episodes.

    pip install 'opendm[sim]'
    python playground/collect_metaworld.py --output data/metaworld --episodes-per-task 100

**Frame.** Two JPEG views: `corner2` turned by 180 degrees (the simulator delivers it upside down;
a vertical flip alone would mirror the scene) and `gripperPOV` as it is. The simulator's site
markers stay visible: the goal of reach exists only as such a marker, drawn larger. The tasks
`alike-*` share one scene whose goal is a disc on the table (`opendm/eval/metaworld/tasks.py`).
`state` is the end-effector position x, y, z in metres and the gripper opening (0 closed, 1 open).
`action` is the absolute end-effector target x, y, z in metres and the gripper command (-1 open,
1 closed). To execute an action, send `clip((target - end_effector) * 100, -1, 1)`, with the end
effector as it is now.

**Start.** Everything follows from the episode's seed: the object or goal position is uniform over
the task's range (Meta-World's own, or that of `tasks.py`), and the hand start is jittered by
up to 3 cm on each axis inside the workspace; where `tasks.py` has a range for the hand, two of four
seeds start anywhere in it. Training seeds count up from `--seed`, held-out seeds
from `--seed` + 20000, and `seeds.json` has each episode's, so that an evaluation can avoid them.
What was recorded is in `recording.json`, written last; `--keep` leaves the same recording alone.

**Label.** Actions are always the expert's. On odd seeds what is *executed* carries noise (sigma
0.4 of the full command, 0.1 while a puck is held, held for 6 steps), so that recoveries are
recorded too. An episode ends at its first success, or 8 steps later where an arrival is to be held;
its last frame shows it, and failed episodes are replaced by later seeds.
"""

import argparse
import io
import json
import multiprocessing
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opendm.errors import ConfigError, DataError, OpenDMError
from opendm.eval.metaworld.demonstrations import SEEDS_FILE
from opendm.eval.metaworld.environment import (
    CAMERAS,
    GL_LIBRARIES,
    World,
    absolute_action,
    prepare_simulator,
)
from opendm.eval.metaworld.tasks import TASKS, find_task
from opendm.runtime import chosen_opengl

if TYPE_CHECKING:
    from metaworld.policies.policy import Policy

NOISE_HOLD_STEPS = 6
HELDOUT_SEED_OFFSET = 20_000
ATTEMPTS_PER_EPISODE = 10
RECORDING_FILE = "recording.json"
EPISODE_NAME = re.compile(r"[a-z-]+-v3_\d+")
DEFAULT_TASKS = ("button-press-topdown-v3", "drawer-open-v3", "reach-v3")


@dataclass(frozen=True, slots=True)
class Frame:
    """What is recorded at one control step."""

    images: tuple[bytes, ...]
    """JPEG files in the order of `CAMERAS`."""
    state: NDArray[np.float64]
    """Shape (4,): x, y, z in metres, gripper opening."""
    action: NDArray[np.float64]
    """Shape (4,): target x, y, z in metres, gripper command."""


def held_noise(rng: np.random.Generator, num_steps: int, sigma: float) -> NDArray[np.float64]:
    """Return command noise of shape (num_steps, 3) that changes every `NOISE_HOLD_STEPS` steps."""
    num_draws = -(-num_steps // NOISE_HOLD_STEPS)
    draws = rng.normal(0.0, sigma, size=(num_draws, 3))
    return np.repeat(draws, NOISE_HOLD_STEPS, axis=0)[:num_steps]


def jpeg_bytes(image: NDArray[np.uint8], quality: int) -> bytes:
    """Encode an RGB image with 4:2:0 chroma."""
    buffer = io.BytesIO()
    picture = Image.fromarray(np.ascontiguousarray(image))
    picture.save(buffer, "JPEG", quality=quality, optimize=True, subsampling="4:2:0")
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class Recorder:
    """One task's world and expert."""

    world: World
    policy: "Policy"
    max_steps: int
    jpeg_quality: int

    def record(self, seed: int) -> list[Frame] | None:
        """Play one episode; None when the expert did not succeed within `max_steps`."""
        task = self.world.task
        rng = np.random.default_rng((seed, 1))
        noise = held_noise(rng, self.max_steps, task.command_noise * (seed % 2))
        calm = 1.0 if task.holding_noise is None else task.holding_noise / task.command_noise
        observation = self.world.reset(seed, task.hand_range if seed % 4 > 1 else None)
        frames: list[Frame] = []
        steps_left: int | None = None
        for step in range(self.max_steps):
            command = self.policy.get_action(observation)
            frames.append(self._frame(observation, command))
            if steps_left == 0:
                return frames
            executed = np.clip(command, -1.0, 1.0)
            scale = calm if executed[3] > 0 else 1.0
            executed[:3] = np.clip(executed[:3] + scale * noise[step], -1.0, 1.0)
            observation, is_success = self.world.step(executed)
            if steps_left is not None:
                steps_left -= 1
            elif is_success:
                steps_left = self.world.task.steps_after_success
        return None

    def _frame(self, observation: NDArray[np.float64], command: NDArray[np.float32]) -> Frame:
        views = self.world.look()
        images = tuple(jpeg_bytes(views[camera], self.jpeg_quality) for camera in CAMERAS)
        state = observation[:4].copy()
        return Frame(images, state, absolute_action(state, command))


def frame_record(name: str, index: int, frame: Frame, sentence: str) -> dict[str, object]:
    """Build the JSON object of one frame; image paths are relative to the images folder."""
    views = {
        f"images_{number}": {"type": "image", "url": f"./{name}/{camera}/{index}.jpg"}
        for number, camera in enumerate(CAMERAS, start=1)
    }
    return {
        **views,
        "state": [round(float(value), 6) for value in frame.state],
        "action": [round(float(value), 6) for value in frame.action],
        "prompt": sentence,
        "is_robot": True,
    }


def save_episode(root: Path, split: str, name: str, frames: list[Frame], sentence: str) -> None:
    """Write one episode so that its JSONL file appears only when all its images are there."""
    images, partial = root / "images" / name, root / "images" / f"{name}.partial"
    for folder in (images, partial):  # left over from an interrupted run
        shutil.rmtree(folder, ignore_errors=True)
    for number, camera in enumerate(CAMERAS):
        (partial / camera).mkdir(parents=True)
        for index, frame in enumerate(frames):
            (partial / camera / f"{index}.jpg").write_bytes(frame.images[number])
    partial.rename(images)

    records = (frame_record(name, index, frame, sentence) for index, frame in enumerate(frames))
    target = root / split / f"{name}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".partial")
    unfinished.write_text("".join(json.dumps(record) + "\n" for record in records))
    unfinished.replace(target)


@dataclass(frozen=True, slots=True)
class Job:
    """An episode to record, and the seeds to try for it."""

    task: str
    split: str
    name: str
    seeds: range


def plan_jobs(name: str, num_episodes: int, options: argparse.Namespace) -> list[Job]:
    """The episodes of a task. Each is a function of its number, however they are shared out."""
    num_train = num_episodes - options.heldout_per_task
    splits = {
        "train": (options.seed, 0, num_train),
        "heldout": (
            options.seed + HELDOUT_SEED_OFFSET,
            num_train,
            options.heldout_per_task,
        ),
    }
    return [
        Job(
            name,
            split,
            f"{name}_{first + number:02d}",
            range(first_seed + number, first_seed + ATTEMPTS_PER_EPISODE * count, count),
        )
        for split, (first_seed, first, count) in splits.items()
        for number in range(count)
    ]


def record_jobs(jobs: Sequence[Job], options: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Record episodes, one renderer at a time; seed and number of frames of each."""
    prepare_simulator(options.gl)
    from metaworld.policies import ENV_POLICY_MAP

    done: dict[str, tuple[int, int]] = {}
    for name in dict.fromkeys(job.task for job in jobs):
        world = World.open(name, options.image_size)
        expert = ENV_POLICY_MAP[world.task.environment or name]()
        recorder = Recorder(world, expert, options.max_steps, options.jpeg_quality)
        for job in jobs:
            if job.task == name:
                seed, frames = next_success(recorder, job)
                save_episode(options.output, job.split, job.name, frames, world.task.sentence)
                done[job.name] = seed, len(frames)
        world.close()
    return done


def next_success(recorder: Recorder, job: Job) -> tuple[int, list[Frame]]:
    """Try seeds until the expert succeeds."""
    for seed in job.seeds:
        frames = recorder.record(seed)
        if frames is not None:
            return seed, frames
        sys.stderr.write(f"{job.task}: seed {seed} failed, trying another\n")
    raise DataError(
        f"the expert of {job.task} keeps failing within {recorder.max_steps} steps; raise "
        "--max-steps"
    )


def clear_output(root: Path, *, overwrite: bool) -> None:
    """Delete earlier episodes and their images when allowed; leave every other file alone."""
    episodes = [
        path
        for split in ("train", "heldout")
        for path in sorted((root / split).glob("*.jsonl"))
        if EPISODE_NAME.fullmatch(path.stem)
    ]
    if episodes and not overwrite:
        raise ConfigError(
            f"{root} already has {len(episodes)} episodes; choose another --output or add "
            "--overwrite to delete them"
        )
    for name in (RECORDING_FILE, SEEDS_FILE):
        (root / name).unlink(missing_ok=True)
    for path in episodes:
        path.unlink()
        shutil.rmtree(root / "images" / path.stem, ignore_errors=True)


def check_options(options: argparse.Namespace) -> None:
    """Reject what would only fail later."""
    for name in options.tasks:
        find_task(name)
    counts = options.episodes_per_task
    if len(counts) not in (1, len(options.tasks)):
        raise ConfigError(
            f"--episodes-per-task has {len(counts)} numbers for {len(options.tasks)} tasks; give "
            "one for all or one for each, in their order"
        )
    limits = {
        "episodes-per-task": (min(counts), 1, 10_000),
        "heldout-per-task": (options.heldout_per_task, 0, min(counts)),
        "image-size": (options.image_size, 16, 480),  # Meta-World's frame buffer has 480 lines
        "jpeg-quality": (options.jpeg_quality, 1, 100),
        "max-steps": (options.max_steps, 2, 500),  # Meta-World refuses step 501
        "seed": (options.seed, 0, HELDOUT_SEED_OFFSET),  # evaluations start at 50 000
        "processes": (options.processes, 1, 64),
    }
    for flag, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise ConfigError(f"--{flag} {value} is out of range; allowed: {low} to {high}")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gl = chosen_opengl() if chosen_opengl() in GL_LIBRARIES else "osmesa"
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder that gets train, heldout and images")
    add("--tasks", nargs="+", default=list(DEFAULT_TASKS), help=f"any of: {', '.join(TASKS)}")
    add(
        "--episodes-per-task", type=int, nargs="+", default=[10],
        help="one number for all or one per task, held-out ones included",
    )  # fmt: skip
    add("--heldout-per-task", type=int, default=2, help="episodes written to heldout")
    add("--image-size", type=int, default=112, help="pixels per side")
    add("--jpeg-quality", type=int, default=70, help="1 to 100")
    add("--seed", type=int, default=1000, help="seed of each task's first training episode")
    add("--max-steps", type=int, default=200, help="control steps after which an episode failed")
    add("--processes", type=int, default=1, help="recording at once; the episodes are the same")
    add("--gl", choices=list(GL_LIBRARIES), default=gl, help="default: MUJOCO_GL, else osmesa")
    add("--keep", action="store_true", help="do nothing where --output has the same recording")
    add("--overwrite", action="store_true", help="delete the episodes that --output has")
    return parser.parse_args(arguments)


def recording(options: argparse.Namespace, tasks: Mapping[str, int]) -> dict[str, object]:
    """All that decides what is recorded, as JSON has it."""
    names = ("heldout_per_task", "image_size", "jpeg_quality", "seed", "max_steps")
    found = {
        "tasks": {name: {"episodes": tasks[name], **asdict(find_task(name))} for name in tasks},
        "noise_hold_steps": NOISE_HOLD_STEPS,
        **{name: getattr(options, name) for name in names},
    }
    return json.loads(json.dumps(found))


def has_recording(root: Path, wanted: Mapping[str, object]) -> bool:
    """Whether a folder has exactly this recording, to its end."""
    path = root / RECORDING_FILE
    try:
        return path.is_file() and json.loads(path.read_text(encoding="utf-8")) == wanted
    except ValueError:
        return False


def collect(options: argparse.Namespace) -> None:
    """Record all tasks."""
    check_options(options)
    counts = options.episodes_per_task
    if len(counts) == 1:
        counts = counts * len(options.tasks)
    tasks = dict(zip(options.tasks, counts, strict=True))
    wanted = recording(options, tasks)
    if options.keep and has_recording(options.output, wanted):
        sys.stdout.write(f"{options.output} has this recording already\n")
        return
    prepare_simulator(options.gl)
    clear_output(options.output, overwrite=options.overwrite)
    jobs = [job for name, count in tasks.items() for job in plan_jobs(name, count, options)]
    shares = [(jobs[first :: options.processes], options) for first in range(options.processes)]
    if options.processes == 1:
        parts = [record_jobs(*shares[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            parts = pool.starmap(record_jobs, shares)
    done = {name: found for part in parts for name, found in part.items()}
    seeds = {job.name: done[job.name][0] for job in jobs}
    (options.output / SEEDS_FILE).write_text(json.dumps(seeds, indent=2) + "\n")
    (options.output / RECORDING_FILE).write_text(json.dumps(wanted, indent=2) + "\n")
    for name in tasks:
        lengths = [done[job.name][1] for job in jobs if job.task == name]
        sys.stdout.write(
            f"{name}: {len(lengths)} episodes, {sum(lengths)} frames "
            f"({min(lengths)} to {max(lengths)} per episode)\n"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    try:
        collect(parse_options(arguments))
    except OpenDMError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
