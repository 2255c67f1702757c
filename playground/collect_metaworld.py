"""Record demonstrations of Meta-World's scripted experts as OpenDM episodes.

    pip install 'opendm[sim]'
    python playground/collect_metaworld.py --output data/metaworld --episodes-per-task 100

**Frame.** Two JPEG views: `corner2` turned by 180 degrees (the simulator delivers it upside down;
a vertical flip alone would mirror the scene) and `gripperPOV` as it is. The simulator's site
markers stay visible: the goal of reach exists only as such a marker, drawn larger (see `TASKS`).
`state` is the end-effector position x, y, z in metres and the gripper opening (0 closed, 1 open).
`action` is the absolute end-effector target x, y, z in metres and the gripper command (-1 open,
1 closed). To execute an action, send `clip((target - end_effector) * 100, -1, 1)`, with the end
effector as it is now.

**Start.** Everything follows from the episode's seed: the object or goal position is uniform over
the task's range (Meta-World's own, or the wider one in `TASKS`), and the hand start is jittered by
up to 3 cm on each axis inside the workspace. Training seeds count up from `--seed`, held-out seeds
from `--seed` + 20000.

**Label.** Actions are always the expert's. On odd seeds what is *executed* carries noise (sigma
0.4 of the full command, held for 6 steps), so that recoveries are recorded too. An episode ends
at its first success, its last frame shows it, and failed episodes are replaced by the next seed.
"""

import argparse
import ctypes.util
import difflib
import importlib
import io
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:
    import mujoco
    from metaworld.policies.policy import Policy
    from metaworld.sawyer_xyz_env import SawyerXYZEnv

CAMERAS = ("corner2", "gripperPOV")
GL_LIBRARIES = {"osmesa": ("OSMesa", "libosmesa6"), "egl": ("EGL", "libegl1")}
"""Backend -> (library, Debian package)."""

METRES_PER_COMMAND = 0.01
"""Distance that a command of 1 moves the hand's target in one control step."""
HAND_JITTER_M = 0.03
NOISE_SIGMA = 0.4
NOISE_HOLD_STEPS = 6
HELDOUT_SEED_OFFSET = 20_000
ATTEMPTS_PER_EPISODE = 5
MIN_IMAGE_STD = 5.0
"""Grey levels. A renderer that lost its context returns flat images without an error."""
EPISODE_NAME = re.compile(r"[a-z-]+-v3_\d+")


class CollectionError(Exception):
    """Reported as one line."""

    exit_code: int = 1


class SetupError(CollectionError):
    """A flag, a folder or the installation is wrong."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Task:
    """A Meta-World task and how it is recorded."""

    sentence: str
    """Prompt of every frame, without a final period."""
    steps_after_success: int = 0
    """Control steps recorded after the first success, so that the arrival is seen to be held."""
    start_range: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Lowest and highest object position in metres; None keeps Meta-World's range."""
    goal_radius_m: float | None = None
    """Radius at which the goal marker is drawn; None keeps Meta-World's 2 cm."""


TASKS: dict[str, Task] = {
    "button-press-topdown-v3": Task(
        "Press the button on top of the box",
        # Meta-World's x +-0.1, y 0.8-0.9 is so narrow that one blind trajectory often succeeds.
        start_range=((-0.25, 0.7, 0.115), (0.25, 0.9, 0.115)),
    ),
    "drawer-open-v3": Task("Pull the drawer open"),
    "reach-v3": Task(
        "Move the gripper to the red goal marker",
        steps_after_success=8,
        goal_radius_m=0.03,  # 2 cm are 2 pixels of corner2, which JPEG blurs away
    ),
    "button-press-v3": Task("Press the button on the front of the box"),
    "door-open-v3": Task("Open the door"),
    "drawer-close-v3": Task("Push the drawer closed"),
    "window-close-v3": Task("Slide the window closed"),
    "window-open-v3": Task("Slide the window open"),
}
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


def expert_action(state: NDArray[np.float64], command: NDArray[np.float32]) -> NDArray[np.float64]:
    """Turn a relative command in [-1, 1], shape (4,), into the absolute action of a frame."""
    clipped = np.clip(command.astype(np.float64), -1.0, 1.0)
    return np.append(state[:3] + clipped[:3] * METRES_PER_COMMAND, clipped[3])


def held_noise(rng: np.random.Generator, num_steps: int) -> NDArray[np.float64]:
    """Return command noise of shape (num_steps, 3) that changes every `NOISE_HOLD_STEPS` steps."""
    num_draws = -(-num_steps // NOISE_HOLD_STEPS)
    draws = rng.normal(0.0, NOISE_SIGMA, size=(num_draws, 3))
    return np.repeat(draws, NOISE_HOLD_STEPS, axis=0)[:num_steps]


def prepare_simulator(gl: str) -> None:
    """Select the OpenGL backend and import the simulator, or say what to install."""
    library, package = GL_LIBRARIES[gl]
    if ctypes.util.find_library(library) is None:
        raise SetupError(f"lib{library} not found, which --gl {gl} needs; apt install {package}")
    os.environ["MUJOCO_GL"] = gl  # noqa: TID251  mujoco reads it once, while it is imported
    try:
        importlib.import_module("mujoco")
        importlib.import_module("metaworld.policies")
    except ModuleNotFoundError as error:
        raise SetupError(f"{error}; the simulator is an extra: pip install 'opendm[sim]'") from None
    except (ImportError, AttributeError) as error:
        raise SetupError(
            f"the OpenGL backend {gl!r} does not load ({error}); apt install {package}, "
            f"or choose another --gl ({', '.join(GL_LIBRARIES)})"
        ) from None
    # The experts ask for more than a command of 1 by design; the simulator clips it.
    warnings.filterwarnings("ignore", message="Constant\\(s\\) may be too high")


def make_env(name: str) -> "SawyerXYZEnv":
    """Build a task that draws a new start from its own generator at every reset."""
    from gymnasium.spaces import Box
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    env = ALL_V3_ENVIRONMENTS[name]()
    env.seeded_rand_vec = True
    # Meta-World reaches these only through its benchmark classes and their fixed lists of starts.
    env._set_task_called = True  # noqa: SLF001
    env._freeze_rand_vec = False  # noqa: SLF001
    # True would hide the goal from the expert, and so would the space that the constructor cached:
    # every step clips the observation to it.
    env._partially_observable = False  # noqa: SLF001
    del env.sawyer_observation_space
    goal_radius_m = TASKS[name].goal_radius_m
    if goal_radius_m is not None:
        env.model.site("goal").size[:] = goal_radius_m
    start_range = TASKS[name].start_range
    if start_range is not None:
        env._random_reset_space = Box(  # noqa: SLF001
            np.array(start_range[0]), np.array(start_range[1]), dtype=np.float64
        )
    return env


def make_renderer(env: "SawyerXYZEnv", image_size: int) -> "mujoco.Renderer":
    """Build an off-screen renderer without shadows and reflections: 12 times faster on a CPU.

    Close it before making another: freeing an old OSMesa context breaks a newer one silently.
    """
    import mujoco

    env.model.vis.quality.shadowsize = 0
    env.model.vis.quality.offsamples = 0
    try:
        renderer = mujoco.Renderer(env.model, image_size, image_size)
    except (ImportError, RuntimeError, mujoco.FatalError) as error:
        packages = ", ".join(f"{gl}: {package}" for gl, (_, package) in GL_LIBRARIES.items())
        raise SetupError(f"no off-screen OpenGL ({error}); Debian packages: {packages}") from None
    flags = mujoco.mjtRndFlag
    for flag in (flags.mjRND_SHADOW, flags.mjRND_REFLECTION, flags.mjRND_SKYBOX, flags.mjRND_HAZE):
        renderer.scene.flags[flag] = 0
    return renderer


def reset_env(
    env: "SawyerXYZEnv", hand_start: NDArray[np.float64], seed: int
) -> NDArray[np.float64]:
    """Start an episode from `seed`; return the observation, shape (39,).

    Meta-World moves objects and goal markers in the model without recomputing the scene, so that
    right after its reset both the observation and the picture show where they were before.
    """
    import mujoco

    jitter = np.random.default_rng(seed).uniform(-HAND_JITTER_M, HAND_JITTER_M, size=3)
    env.hand_init_pos = np.clip(hand_start + jitter, env.mocap_low, env.mocap_high)
    env.seed(seed)
    env.reset()
    for site, position in env._target_site_config:  # noqa: SLF001
        env.model.site(site).pos = position
    mujoco.mj_forward(env.model, env.data)
    env._get_obs()  # noqa: SLF001  fills the previous half of the stacked observation
    return env._get_obs()  # noqa: SLF001


def render_view(renderer: "mujoco.Renderer", env: "SawyerXYZEnv", camera: str) -> NDArray[np.uint8]:
    """Render one camera the right way up: RGB of shape (size, size, 3)."""
    renderer.update_scene(env.data, camera)
    image = renderer.render()
    if image.std() < MIN_IMAGE_STD:
        raise CollectionError(
            f"camera {camera} returned a blank image (std {image.std():.1f}, expected at least "
            f"{MIN_IMAGE_STD}); the OpenGL context is broken, try another --gl"
        )
    return image[::-1, ::-1] if camera == "corner2" else image


def jpeg_bytes(image: NDArray[np.uint8], quality: int) -> bytes:
    """Encode an RGB image with 4:2:0 chroma."""
    buffer = io.BytesIO()
    picture = Image.fromarray(np.ascontiguousarray(image))
    picture.save(buffer, "JPEG", quality=quality, optimize=True, subsampling="4:2:0")
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class Recorder:
    """One task's simulator, expert and renderer."""

    env: "SawyerXYZEnv"
    policy: "Policy"
    renderer: "mujoco.Renderer"
    task: Task
    hand_start: NDArray[np.float64]
    """Shape (3,): Meta-World's hand start in metres, before jitter."""
    max_steps: int
    jpeg_quality: int

    def record(self, seed: int) -> list[Frame] | None:
        """Play one episode; None when the expert did not succeed within `max_steps`."""
        noise = held_noise(np.random.default_rng((seed, 1)), self.max_steps) * (seed % 2)
        observation = reset_env(self.env, self.hand_start, seed)
        frames: list[Frame] = []
        steps_left: int | None = None
        for step in range(self.max_steps):
            command = self.policy.get_action(observation)
            frames.append(self._frame(observation, command))
            if steps_left == 0:
                return frames
            executed = np.clip(command, -1.0, 1.0)
            executed[:3] = np.clip(executed[:3] + noise[step], -1.0, 1.0)
            observation, _, _, _, info = self.env.step(executed)
            if steps_left is not None:
                steps_left -= 1
            elif info["success"]:
                steps_left = self.task.steps_after_success
        return None

    def _frame(self, observation: NDArray[np.float64], command: NDArray[np.float32]) -> Frame:
        images = tuple(
            jpeg_bytes(render_view(self.renderer, self.env, camera), self.jpeg_quality)
            for camera in CAMERAS
        )
        state = observation[:4].copy()
        return Frame(images, state, expert_action(state, command))


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


def collect_task(name: str, recorder: Recorder, options: argparse.Namespace) -> list[int]:
    """Record the episodes of one task; return their numbers of frames."""
    num_train = options.episodes_per_task - options.heldout_per_task
    lengths: list[int] = []
    splits = {
        "train": (options.seed, range(num_train)),
        "heldout": (
            options.seed + HELDOUT_SEED_OFFSET,
            range(num_train, options.episodes_per_task),
        ),
    }
    for split, (first_seed, numbers) in splits.items():
        seeds = iter(range(first_seed, first_seed + ATTEMPTS_PER_EPISODE * len(numbers)))
        for number in numbers:
            frames = next_success(recorder, seeds, name)
            save_episode(
                options.output, split, f"{name}_{number:02d}", frames, recorder.task.sentence
            )
            lengths.append(len(frames))
    return lengths


def next_success(recorder: Recorder, seeds: Iterator[int], name: str) -> list[Frame]:
    """Try seeds until the expert succeeds."""
    for seed in seeds:
        frames = recorder.record(seed)
        if frames is not None:
            return frames
        sys.stderr.write(f"{name}: seed {seed} failed, trying the next one\n")
    raise CollectionError(
        f"the expert of {name} keeps failing within {recorder.max_steps} steps; raise --max-steps"
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
        raise SetupError(
            f"{root} already has {len(episodes)} episodes; choose another --output or add "
            "--overwrite to delete them"
        )
    for path in episodes:
        path.unlink()
        shutil.rmtree(root / "images" / path.stem, ignore_errors=True)


def check_options(options: argparse.Namespace) -> None:
    """Reject what would only fail later."""
    for name in options.tasks:
        if name not in TASKS:
            near = difflib.get_close_matches(name, TASKS, n=3, cutoff=0.5) or list(TASKS)
            raise SetupError(f"unknown task {name!r}; near matches: {', '.join(near)}")
    limits = {
        "episodes-per-task": (options.episodes_per_task, 1, 10_000),
        "heldout-per-task": (options.heldout_per_task, 0, options.episodes_per_task),
        "image-size": (options.image_size, 16, 480),  # Meta-World's frame buffer has 480 lines
        "jpeg-quality": (options.jpeg_quality, 1, 100),
        "max-steps": (options.max_steps, 2, 500),  # Meta-World refuses step 501
        "seed": (options.seed, 0, 2**31),
    }
    for flag, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise SetupError(f"--{flag} {value} is out of range; allowed: {low} to {high}")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    environment_gl = os.environ.get("MUJOCO_GL", "")  # noqa: TID251  this file stands alone
    gl = environment_gl if environment_gl in GL_LIBRARIES else "osmesa"
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder that gets train, heldout and images")
    add("--tasks", nargs="+", default=list(DEFAULT_TASKS), help=f"any of: {', '.join(TASKS)}")
    add("--episodes-per-task", type=int, default=10, help="held-out ones included")
    add("--heldout-per-task", type=int, default=2, help="episodes written to heldout")
    add("--image-size", type=int, default=112, help="pixels per side")
    add("--jpeg-quality", type=int, default=70, help="1 to 100")
    add("--seed", type=int, default=1000, help="seed of each task's first training episode")
    add("--max-steps", type=int, default=200, help="control steps after which an episode failed")
    add("--gl", choices=list(GL_LIBRARIES), default=gl, help="default: MUJOCO_GL, else osmesa")
    add("--overwrite", action="store_true", help="delete the episodes that --output has")
    return parser.parse_args(arguments)


def collect(options: argparse.Namespace) -> None:
    """Record all tasks, one renderer at a time."""
    check_options(options)
    prepare_simulator(options.gl)
    clear_output(options.output, overwrite=options.overwrite)
    from metaworld.policies import ENV_POLICY_MAP

    for name in dict.fromkeys(options.tasks):
        env = make_env(name)
        with make_renderer(env, options.image_size) as renderer:
            recorder = Recorder(
                env=env,
                policy=ENV_POLICY_MAP[name](),
                renderer=renderer,
                task=TASKS[name],
                hand_start=np.array(env.hand_init_pos, dtype=np.float64),
                max_steps=options.max_steps,
                jpeg_quality=options.jpeg_quality,
            )
            lengths = collect_task(name, recorder, options)
        env.close()
        sys.stdout.write(
            f"{name}: {len(lengths)} episodes, {sum(lengths)} frames "
            f"({min(lengths)} to {max(lengths)} per episode)\n"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    try:
        collect(parse_options(arguments))
    except CollectionError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
