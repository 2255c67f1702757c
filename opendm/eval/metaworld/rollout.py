"""Episodes of an actor in several worlds at once: a query serves them all, each then acts alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from opendm.eval.metaworld.environment import CAMERAS, Image, Vector, relative_command
from opendm.eval.metaworld.statistics import Rate

OTHER_START: Final = 1_000_003
"""Added to a seed for the start whose picture is shown instead."""


class Pictures(Enum):
    """What the actor is shown."""

    LIVE = "live"
    BLANK = "blank"
    """Black ones."""
    FROZEN = "frozen"
    """For the whole episode the first ones of another start."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What an actor may know when it is asked."""

    seed: int
    """Of the episode; for noise, not for looking anything up."""
    step: int
    state: Vector
    images: Mapping[str, Image]


@runtime_checkable
class Simulator(Protocol):
    """What an episode needs of a :class:`~opendm.eval.metaworld.environment.World`."""

    @property
    def image_size(self) -> int:
        """Pixels per side."""
        ...

    def reset(self, seed: int) -> Vector:
        """Start an episode; the observation."""
        ...

    def step(self, command: NDArray[np.floating]) -> tuple[Vector, bool]:
        """Execute a command; the observation and whether the task is solved."""
        ...

    def look(self) -> dict[str, Image]:
        """Pictures by camera."""
        ...


@runtime_checkable
class Actor(Protocol):
    """Decides what to do next."""

    def act(self, views: Sequence[View]) -> Sequence[NDArray[np.floating]]:
        """For each view the next absolute actions, ``[steps, 4]``."""
        ...


@dataclass(frozen=True, slots=True)
class Rules:
    """How episodes are run."""

    actions_per_query: int = 8
    max_steps: int = 200


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One finished episode."""

    seed: int
    is_success: bool
    num_steps: int
    frames: list[Image] = field(default_factory=list)
    """What the first camera showed at each query, where it was kept."""


@dataclass(slots=True, eq=False)
class _Episode:
    """One world in the middle of an episode."""

    world: Simulator
    seed: int
    pictures: Pictures
    shown: dict[str, Image]
    state: Vector
    step: int = 0
    is_success: bool = False
    frames: list[Image] = field(default_factory=list)

    @classmethod
    def start(cls, world: Simulator, seed: int, pictures: Pictures) -> "_Episode":
        shown: dict[str, Image] = {}
        if pictures is Pictures.FROZEN:
            world.reset(seed + OTHER_START)
            shown = {camera: image.copy() for camera, image in world.look().items()}
        elif pictures is Pictures.BLANK:
            size = world.image_size
            shown = {camera: np.zeros((size, size, 3), np.uint8) for camera in CAMERAS}
        return cls(world, seed, pictures, shown, world.reset(seed)[:4].copy())

    def view(self, *, keep: bool) -> View:
        """Look, and keep the picture of the first camera."""
        images = self.world.look() if self.pictures is Pictures.LIVE else self.shown
        if keep:
            self.frames.append(images[CAMERAS[0]].copy())
        return View(self.seed, self.step, self.state, images)

    def execute(self, actions: NDArray[np.floating], max_steps: int) -> None:
        """Aim at each action from where the hand is by then; stop at the first success."""
        for action in actions:
            if self.is_success or self.step >= max_steps:
                return
            observation, self.is_success = self.world.step(relative_command(self.state, action))
            self.state = observation[:4].copy()
            self.step += 1


def run_episodes(
    actor: Actor,
    worlds: Sequence[Simulator],
    seeds: Sequence[int],
    rules: Rules,
    *,
    pictures: Pictures = Pictures.LIVE,
    num_kept: int = 0,
) -> list[Outcome]:
    """Run one episode per seed, as many at once as there are worlds of the task.

    The first ``num_kept`` episodes keep what the first camera saw.
    """
    outcomes: list[Outcome] = []
    for first in range(0, len(seeds), len(worlds)):
        part = seeds[first : first + len(worlds)]
        episodes = [
            _Episode.start(world, seed, pictures) for world, seed in zip(worlds, part, strict=False)
        ]
        kept = max(0, num_kept - first)
        _play(actor, episodes, rules, set(map(id, episodes[:kept])))
        outcomes += [Outcome(e.seed, e.is_success, e.step, e.frames) for e in episodes]
    return outcomes


def _play(actor: Actor, episodes: Sequence[_Episode], rules: Rules, kept: set[int]) -> None:
    while running := [e for e in episodes if not e.is_success and e.step < rules.max_steps]:
        chunks = actor.act([e.view(keep=id(e) in kept) for e in running])
        for episode, chunk in zip(running, chunks, strict=True):
            episode.execute(chunk[: rules.actions_per_query], rules.max_steps)
    for episode in episodes:
        if id(episode) in kept and episode.pictures is Pictures.LIVE:
            episode.frames.append(episode.world.look()[CAMERAS[0]].copy())


def success_rate(outcomes: Sequence[Outcome]) -> Rate:
    """Share of solved episodes."""
    return Rate(sum(outcome.is_success for outcome in outcomes), len(outcomes))
