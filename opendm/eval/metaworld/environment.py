"""One Meta-World task with its renderer: start from a seed, look, act.

Collector and evaluation share it, so that a policy meets what it was taught. The simulator
delivers `corner2` upside down; turned by 180 degrees it is upright (a vertical flip alone would
mirror it). Site markers stay visible, except where a task shows a disc instead.
"""

import ctypes.util
import importlib
import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from opendm.errors import ConfigError
from opendm.eval.metaworld.tasks import Range, Task, find_task
from opendm.runtime import choose_opengl

if TYPE_CHECKING:
    import mujoco
    from metaworld.sawyer_xyz_env import SawyerXYZEnv

CAMERAS: Final = ("corner2", "gripperPOV")
GL_LIBRARIES: Final = {"osmesa": ("OSMesa", "libosmesa6"), "egl": ("EGL", "libegl1")}
"""Backend -> (library, Debian package)."""
METRES_PER_COMMAND: Final = 0.01
"""Distance that a command of 1 moves the hand's target in one control step."""
STATE_SIZE: Final = 4
"""x, y, z of the end effector in metres and the gripper's opening, 0 closed and 1 open."""
HAND_JITTER_M: Final = 0.03
MIN_IMAGE_STD: Final = 5.0
"""Grey levels. A renderer that lost its context returns flat images without an error."""
DISC_SIZE_M: Final = (0.035, 0.002)
"""Radius and half height."""
DISC_COLOUR: Final = (0.1, 0.25, 0.9, 1.0)
PUCK_COLOUR: Final = (1.0, 0.8, 0.1, 1.0)

Image = NDArray[np.uint8]
Vector = NDArray[np.float64]


def prepare_simulator(gl: str) -> None:
    """Select the OpenGL backend and import the simulator.

    Raises:
        ConfigError: something is missing; the message says what to install.
    """
    if gl not in GL_LIBRARIES:
        allowed = ", ".join(GL_LIBRARIES)
        raise ConfigError(f"OpenGL backend {gl!r} (--gl or MUJOCO_GL); allowed: {allowed}")
    library, package = GL_LIBRARIES[gl]
    if ctypes.util.find_library(library) is None:
        raise ConfigError(f"lib{library} not found, which --gl {gl} needs; apt install {package}")
    choose_opengl(gl)
    logging.getLogger("OpenGL").setLevel(logging.WARNING)  # it reports its own missing accelerator
    try:
        importlib.import_module("mujoco")
        importlib.import_module("metaworld.policies")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error}; the simulator is an extra: pip install 'opendm[sim]'"
        ) from None
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the OpenGL backend {gl!r} does not load ({error}); apt install {package}, "
            f"or choose another --gl ({', '.join(GL_LIBRARIES)})"
        ) from None
    # The experts ask for more than a command of 1 by design; the simulator clips it.
    warnings.filterwarnings("ignore", message="Constant\\(s\\) may be too high")


def absolute_action(state: Vector, command: NDArray[np.floating]) -> Vector:
    """Turn a relative command in [-1, 1], shape (4,), into target x, y, z in metres and gripper."""
    clipped = np.clip(np.asarray(command, np.float64), -1.0, 1.0)
    return np.append(state[:3] + clipped[:3] * METRES_PER_COMMAND, clipped[3])


def relative_command(state: Vector, action: NDArray[np.floating]) -> Vector:
    """The inverse of :func:`absolute_action` from the end effector as it is now.

    The command moves a point that the hand follows with a lag and an offset; aiming anew at every
    step corrects both.
    """
    target = np.asarray(action, np.float64)
    moves = (target[:3] - state[:3]) / METRES_PER_COMMAND
    return np.clip(np.append(moves, target[3]), -1.0, 1.0)


@dataclass(frozen=True, slots=True)
class World:
    """A task's simulator and renderer."""

    name: str
    task: Task
    env: "SawyerXYZEnv"
    renderer: "mujoco.Renderer"
    hand_start: Vector
    """Meta-World's hand start in metres, before jitter."""

    @classmethod
    def open(cls, name: str, image_size: int) -> "World":
        """Build a task; :func:`prepare_simulator` must have been called."""
        task = find_task(name)
        env = _make_env(task.environment or name, task)
        renderer = _make_renderer(env, image_size)
        return cls(name, task, env, renderer, np.array(env.hand_init_pos, dtype=np.float64))

    @property
    def image_size(self) -> int:
        """Pixels per side."""
        return self.renderer.height

    def close(self) -> None:
        """Free renderer and simulator, and nothing of other worlds.

        MuJoCo 3.3 drops a renderer's OpenGL context before it deletes the renderer's objects, and
        so deletes those of the same numbers in whichever context is current: another world would
        go on with garbage pictures, silently.
        """
        renderer = self.renderer
        renderer._gl_context.make_current()  # noqa: SLF001
        renderer._mjr_context.free()  # noqa: SLF001
        renderer._mjr_context = None  # noqa: SLF001
        renderer.close()
        self.env.close()

    def reset(self, seed: int, hand_range: Range | None = None) -> Vector:
        """Start an episode; everything in it follows from ``seed``. The observation, ``[39]``.

        The hand starts near where Meta-World has it, or anywhere in ``hand_range``.

        Meta-World moves objects and goal markers in the model without recomputing the scene, so
        that right after its reset both the observation and the picture show where they were.
        """
        import mujoco

        env = self.env
        rng = np.random.default_rng(seed)
        if hand_range is None:
            hand = self.hand_start + rng.uniform(-HAND_JITTER_M, HAND_JITTER_M, size=3)
        else:
            hand = rng.uniform(*hand_range)
        env.hand_init_pos = np.clip(hand, env.mocap_low, env.mocap_high)
        env.seed(seed)
        env.reset()
        for site, position in env._target_site_config:  # noqa: SLF001
            env.model.site(site).pos = position
        mujoco.mj_forward(env.model, env.data)
        env._get_obs()  # noqa: SLF001  fills the previous half of the stacked observation
        return env._get_obs()  # noqa: SLF001

    def step(self, command: NDArray[np.floating]) -> tuple[Vector, bool]:
        """Execute a command, ``[4]`` in [-1, 1]; the observation and whether the task is solved."""
        observation, _, _, _, info = self.env.step(command)
        return observation, bool(info["success"])

    def look(self) -> dict[str, Image]:
        """RGB pictures ``[size, size, 3]`` of all cameras, the right way up."""
        return {camera: self._render(camera) for camera in CAMERAS}

    def _render(self, camera: str) -> Image:
        self.renderer.update_scene(self.env.data, camera)
        if self.task.has_disc:
            _add_disc(self.renderer, np.asarray(self.env._target_pos))  # noqa: SLF001
        image = self.renderer.render()
        if image.std() < MIN_IMAGE_STD:
            raise ConfigError(
                f"camera {camera} returned a blank image (std {image.std():.1f}, expected at least "
                f"{MIN_IMAGE_STD}); the OpenGL context is broken, try another --gl"
            )
        return image[::-1, ::-1] if camera == "corner2" else image


def _make_env(environment: str, task: Task) -> "SawyerXYZEnv":
    """A task that draws a new start from its own generator at every reset."""
    from gymnasium.spaces import Box
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    env = ALL_V3_ENVIRONMENTS[environment]()
    env.seeded_rand_vec = True
    # Meta-World reaches these only through its benchmark classes and their fixed lists of starts.
    env._set_task_called = True  # noqa: SLF001
    env._freeze_rand_vec = False  # noqa: SLF001
    # True would hide the goal from the expert, and so would the space that the constructor cached:
    # every step clips the observation to it.
    env._partially_observable = False  # noqa: SLF001
    del env.sawyer_observation_space
    if task.goal_radius_m is not None:
        env.model.site("goal").size[:] = task.goal_radius_m
    if task.has_disc:
        env.model.site("goal").rgba[:] = 0.0
        puck = env.model.geom("objGeom")
        puck.matid[:] = -1  # a dark material, which hardly differs from the table
        puck.rgba[:] = PUCK_COLOUR
    if task.start_range is not None:
        low, high = map(np.array, task.start_range)
        env._random_reset_space = Box(low, high, dtype=np.float64)  # noqa: SLF001
    return env


def _make_renderer(env: "SawyerXYZEnv", image_size: int) -> "mujoco.Renderer":
    """An off-screen renderer without what takes long on a CPU: shadows, reflections, smoothing."""
    import mujoco

    env.model.vis.quality.shadowsize = 0
    env.model.vis.quality.offsamples = 0
    try:
        renderer = mujoco.Renderer(env.model, image_size, image_size)
    except (ImportError, RuntimeError, mujoco.FatalError) as error:
        packages = ", ".join(f"{gl}: {package}" for gl, (_, package) in GL_LIBRARIES.items())
        raise ConfigError(f"no off-screen OpenGL ({error}); Debian packages: {packages}") from None
    flags = mujoco.mjtRndFlag
    for flag in (flags.mjRND_SHADOW, flags.mjRND_REFLECTION, flags.mjRND_SKYBOX, flags.mjRND_HAZE):
        renderer.scene.flags[flag] = 0
    return renderer


def _add_disc(renderer: "mujoco.Renderer", goal: Vector) -> None:
    """Draw a disc on the table under the goal, without touching the physics."""
    import mujoco

    scene = renderer.scene
    mujoco.mjv_initGeom(
        scene.geoms[scene.ngeom],
        mujoco.mjtGeom.mjGEOM_CYLINDER,
        np.array([DISC_SIZE_M[0], DISC_SIZE_M[1], 0.0]),
        np.array([goal[0], goal[1], DISC_SIZE_M[1]]),
        np.eye(3).ravel(),
        np.array(DISC_COLOUR, dtype=np.float32),
    )
    scene.ngeom += 1
