"""Where episodes are played: the worlds of a task and the actors, in one process or several.

Seeds are played in groups of fixed size, whose queries are batches of the model: which process
plays a group changes nothing in it.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import torch

from opendm.eval.metaworld.controls import BlindActor, Condition, PolicyActor
from opendm.eval.metaworld.demonstrations import mean_demonstration, recorded_actions
from opendm.eval.metaworld.environment import World, prepare_simulator
from opendm.eval.metaworld.rollout import Actor, Outcome, Rules, run_episodes
from opendm.infer.policy import Policy

GROUP_SIZE: Final = 10
"""Episodes at once: one query of the model serves them all."""
MAX_POLICIES: Final = 2
"""The one that is judged and the untrained one, which alternate from task to task."""

Pending = Callable[[], list[Outcome]]
Play = Callable[[str, Condition, Sequence[int]], Pending]
"""Start a task's episodes under a condition; what it returns waits for their outcomes, and the
first of them keeps what its first camera saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """What all processes share."""

    gl: str
    image_size: int
    rules: Rules
    num_flow_steps: int
    demonstrations: Path


@dataclass(slots=True, eq=False)
class Stage:
    """One process: keeps the worlds of its last task and the last policies that it has loaded."""

    settings: StageSettings
    task: str = ""
    worlds: list[World] = field(default_factory=list)
    policies: dict[Path, Policy] = field(default_factory=dict)
    """At most `MAX_POLICIES`: conditions are played in order."""

    def play(
        self, task: str, condition: Condition, seeds: Sequence[int], *, keeps_frames: bool
    ) -> list[Outcome]:
        """One group of episodes; the first keeps what its first camera saw where that is asked."""
        if task != self.task:
            self.close()
            self.task = task
        while len(self.worlds) < len(seeds):
            self.worlds.append(World.open(task, self.settings.image_size))
        return run_episodes(
            self._actor(condition),
            self.worlds[: len(seeds)],
            seeds,
            self.settings.rules,
            pictures=condition.pictures,
            num_kept=int(keeps_frames),
        )

    def close(self) -> None:
        """Free the worlds."""
        while self.worlds:
            self.worlds.pop().close()

    def _actor(self, condition: Condition) -> Actor:
        path = condition.checkpoint
        if path is None:
            episodes = recorded_actions(self.settings.demonstrations, condition.sentence)
            return BlindActor(mean_demonstration(episodes))
        if path not in self.policies:
            while len(self.policies) >= MAX_POLICIES:
                self.policies.pop(next(iter(self.policies)))
            self.policies[path] = Policy.from_checkpoint(path, layout_from=condition.layout_from)
        return PolicyActor(self.policies[path], condition.sentence, self.settings.num_flow_steps)


@contextmanager
def open_stages(settings: StageSettings, num_processes: int) -> Iterator[Play]:
    """Processes that play what is asked of them, in this order.

    A model computes on one thread, so that its results do not depend on the number of processes.
    """
    # a forked child would share its parent's OpenGL and OpenMP state
    context = get_context("spawn")
    pool = ProcessPoolExecutor(num_processes, context, _open_stage, (settings,))

    def play(task: str, condition: Condition, seeds: Sequence[int]) -> Pending:
        groups = [
            pool.submit(_play, task, condition, seeds[i : i + GROUP_SIZE], keeps_frames=i == 0)
            for i in range(0, len(seeds), GROUP_SIZE)
        ]
        return lambda: list(chain.from_iterable(group.result() for group in groups))

    try:
        yield play
    finally:
        pool.shutdown(cancel_futures=True)  # after an error nobody waits for the others


_stages: Final[list[Stage]] = []
"""The stage of a process that plays."""


def _open_stage(settings: StageSettings) -> None:
    torch.set_num_threads(1)
    prepare_simulator(settings.gl)
    _stages[:] = [Stage(settings)]


def _play(
    task: str, condition: Condition, seeds: Sequence[int], *, keeps_frames: bool
) -> list[Outcome]:
    return _stages[0].play(task, condition, seeds, keeps_frames=keeps_frames)
