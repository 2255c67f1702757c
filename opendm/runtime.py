"""Facts about this process: its rank, its environment, how it logs. Nothing else reads them."""

import ctypes
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opendm.errors import ConfigError

VALIDATE_ONLY_VARIABLE = "OPENDM_VALIDATE_ONLY"
DATA_PATH_VARIABLE = "OPENDM_DATA_PATH"
WANDB_PROJECT_VARIABLE = "WANDB_PROJECT"
WANDB_DISABLED_VARIABLE = "WANDB_DISABLED"
CACHE_VARIABLE = "OPENDM_CACHE"
COLLECTIVE_TIMEOUT_VARIABLE = "OPENDM_COLLECTIVE_TIMEOUT_S"
COLLECTIVE_TIMEOUT_S = 1800
INFERENCE_SEED_VARIABLE = "DM05_INFERENCE_SEED"
LAUNCHER_PID_VARIABLE = "OPENDM_LAUNCHER_PID"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Runtime:
    """The place of this process in the job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    ranks_per_node: int = 1

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "Runtime":
        """Read torchrun's variables; a plain ``python`` is a world of one."""
        env = os.environ if env is None else env
        return cls(
            rank=_integer(env, "RANK", 0),
            local_rank=_integer(env, "LOCAL_RANK", 0),
            world_size=_integer(env, "WORLD_SIZE", 1),
            ranks_per_node=_integer(env, "LOCAL_WORLD_SIZE", 1),
        )

    @property
    def is_main(self) -> bool:
        """Whether this process writes what a job writes once."""
        return self.rank == 0


def environment() -> Mapping[str, str]:
    """The environment of this process."""
    return os.environ


def data_paths() -> list[str]:
    """Folders of dataset registrations outside the package (``OPENDM_DATA_PATH``)."""
    return [path for path in os.environ.get(DATA_PATH_VARIABLE, "").split(os.pathsep) if path]


def cache_folder() -> Path:
    """Folder of what can be made again: ``OPENDM_CACHE``, or ``opendm`` in the user's cache."""
    own = os.environ.get(CACHE_VARIABLE)
    shared = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(own) if own else Path(shared) / "opendm"


def validate_only() -> bool:
    """Whether an experiment shall check its configuration and stop (the launcher asks for it)."""
    return os.environ.get(VALIDATE_ONLY_VARIABLE, "") not in ("", "0")


def collective_timeout_s() -> int:
    """Seconds that a rank waits for the others (``OPENDM_COLLECTIVE_TIMEOUT_S``)."""
    return _integer(os.environ, COLLECTIVE_TIMEOUT_VARIABLE, COLLECTIVE_TIMEOUT_S)


def inference_seed() -> int | None:
    """Seed of every request's noise, whatever the request says (``DM05_INFERENCE_SEED``)."""
    if not os.environ.get(INFERENCE_SEED_VARIABLE):
        return None
    return _integer(os.environ, INFERENCE_SEED_VARIABLE, 0)


def show_stacks_on_signal() -> None:
    """On SIGUSR2, which the launcher sends to a rank that hangs, print every thread's stack."""
    faulthandler.register(signal.SIGUSR2, file=sys.__stderr__ or sys.stderr)


def end_with_launcher() -> None:
    """Have Linux kill this rank when its launcher dies, which could no longer end it.

    Without a launcher, do nothing.
    """
    launcher = os.environ.pop(LAUNCHER_PID_VARIABLE, "")
    if launcher:
        end_with_parent(int(launcher))


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process when the thread that started it dies, also by a SIGKILL.

    Args:
        parent: number of the parent's process.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def enable_wandb(project: str) -> None:
    """Name the project that Hugging Face's wandb callback reports to."""
    os.environ[WANDB_PROJECT_VARIABLE] = project
    if os.environ.get(WANDB_DISABLED_VARIABLE, "").lower() in ("1", "true", "yes", "on"):
        os.environ[WANDB_DISABLED_VARIABLE] = "false"


def configure_logging(level: str, runtime: Runtime) -> None:
    """Log to standard output at ``level``; ranks other than 0 report warnings and worse only."""
    names = logging.getLevelNamesMapping()
    if level.upper() not in names:
        raise ConfigError(f"--logger-level {level!r} is unknown; allowed: {', '.join(names)}")
    prefix = "" if runtime.world_size == 1 else f"[rank {runtime.rank}] "
    logging.basicConfig(
        level=names[level.upper()] if runtime.is_main else logging.WARNING,
        format=f"%(asctime)s {prefix}%(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stdout,
        force=True,
    )
    for name in ("httpx", "urllib3", "PIL"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise ConfigError(f"environment variable {name}={text!r} is not a number; unset it")
    return int(text)


def flag_was_given(flag: str) -> bool:
    """Whether the command line of this process names ``flag`` (dashes and underscores alike)."""
    wanted = flag.replace("_", "-")
    return any(word.split("=")[0].replace("_", "-") == wanted for word in sys.argv[1:])


def choose_opengl(backend: str) -> None:
    """Name the OpenGL backend of the simulator, which reads it once, while it is imported."""
    os.environ["MUJOCO_GL"] = backend


def chosen_opengl() -> str:
    """The OpenGL backend that the environment names; empty where it names none."""
    return os.environ.get("MUJOCO_GL", "")
