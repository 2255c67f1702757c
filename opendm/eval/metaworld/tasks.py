"""Which Meta-World tasks there are, what is said of them, and how their starts are drawn."""

import difflib
from dataclasses import dataclass
from typing import Final

from opendm.errors import ConfigError

Range = tuple[tuple[float, ...], tuple[float, ...]]
"""Lowest and highest values, in metres."""


@dataclass(frozen=True, slots=True)
class Task:
    """A Meta-World task, recorded and evaluated alike."""

    sentence: str
    """Prompt of every frame, without a final period."""
    environment: str = ""
    """Meta-World's name where it is not the task's own."""
    steps_after_success: int = 0
    """Control steps recorded after the first success, so that the arrival is seen to be held."""
    command_noise: float = 0.4
    """Standard deviation of what disturbs the recorded expert, in units of a full command."""
    holding_noise: float | None = None
    """The same once the gripper is told to close; None keeps `command_noise`."""
    hand_range: Range | None = None
    """Where the hand of half the recorded episodes starts; evaluations start as the others do."""
    start_range: Range | None = None
    """Object position, and goal position where Meta-World draws one; None keeps its own range."""
    goal_radius_m: float | None = None
    """Radius at which the goal marker is drawn; None keeps Meta-World's 2 cm."""
    has_disc: bool = False
    """Show a disc on the table under the goal instead of Meta-World's marker, and a bright puck."""


def _on_the_table(goal_height_m: float) -> Range:
    """Meta-World's puck and goal ranges with the goal at one height, the puck settled."""
    low, high = (-0.1, 0.6, 0.0194), (0.1, 0.7, 0.0194)
    return (*low, -0.1, 0.8, goal_height_m), (*high, 0.1, 0.9, goal_height_m)


_OVER_THE_TABLE: Final[Range] = (-0.15, 0.5, 0.1), (0.15, 0.9, 0.25)
"""A policy whose hand was never recorded beside its goal takes wherever it comes to rest for it."""

TASKS: Final[dict[str, Task]] = {
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
    # One scene for three tasks: a puck and a disc, drawn from the same ranges. Meta-World tells
    # them apart by the marker's colour and height; here only the sentence does. Much noise makes
    # the expert lose the puck once it has it (at 0.4 it fails 25 of 30 pushes), and none before
    # that leaves nothing to learn about hands that come down beside it.
    "alike-reach-v3": Task(
        "Hold the gripper above the disc",
        "reach-v3",
        8,
        hand_range=_OVER_THE_TABLE,
        start_range=_on_the_table(0.15),
        has_disc=True,
    ),
    "alike-push-v3": Task(
        "Push the puck onto the disc",
        "push-v3",
        8,
        holding_noise=0.1,
        hand_range=_OVER_THE_TABLE,
        start_range=_on_the_table(0.02),
        has_disc=True,
    ),
    "alike-pick-place-v3": Task(
        "Lift the puck above the disc",
        "pick-place-v3",
        8,
        holding_noise=0.1,
        hand_range=_OVER_THE_TABLE,
        start_range=_on_the_table(0.15),
        has_disc=True,
    ),
}


def find_task(name: str) -> Task:
    """The task of a name.

    Raises:
        ConfigError: there is none; the message has the nearest names.
    """
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=3, cutoff=0.5) or list(TASKS)
        raise ConfigError(f"unknown task {name!r}; near matches: {', '.join(near)}")
    return TASKS[name]
