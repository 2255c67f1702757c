"""What statistics were computed from: noted in their file, compared before they are used."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from opendm.constants.robot import desc_value
from opendm.data.stat_columns import Desc, standard_plan
from opendm.data.stat_floors import FLOORED_KEY, FLOORS_VERSION
from opendm.errors import ConfigError

RESULTS: Final = (FLOORED_KEY,)
"""Keys of a file's ``opendm`` entry that follow from the others."""


def statistics_origin(
    *,
    fingerprint: str,
    action_transform: object,
    state_desc: Desc | None,
    robot_types: Sequence[str | None],
    default_robot_type: str | None = None,
    max_batches: int | None = None,
    choices: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All that statistics depend on, as a file's ``opendm`` entry.

    Args:
        fingerprint: hash of names and contents of the data files.
        action_transform: what training learns is its output.
        state_desc: kind of each dimension.
        robot_types: of all data.
        default_robot_type: profile for a request without a type.
        max_batches: the cap, None without one.
        choices: settings that choose what is counted; noted where they are not None or 0.
    """
    plan = standard_plan(action_transform)
    actions: dict[str, Any] = {"action_transform": repr(action_transform)}
    if plan is not None:
        ids = plan.non_delta_ids
        actions = {
            "action_mode": "absolute" if ids is None else "relative",
            "action_horizon": plan.horizon,
            "non_delta_ids": None if ids is None else [desc_value(part) for part in ids],
        }
    return {
        "fingerprint": fingerprint,
        **actions,
        "max_batches": max_batches,
        "robot_types": sorted({str(robot) for robot in robot_types if robot is not None}),
        "default_robot_type": default_robot_type,
        "state_desc": None if state_desc is None else [desc_value(part) for part in state_desc],
        "floors_version": FLOORS_VERSION,
        **{key: value for key, value in (choices or {}).items() if value},
    }


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What two ``opendm`` entries disagree on: key, and the value on each side."""
    keys = [key for key in {**wanted, **found} if key not in RESULTS]
    pairs = {key: (found.get(key), wanted.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def check_given(path: "str | Path", found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a file that was given by hand and was computed from something else.

    Raises:
        ConfigError: the entries differ; the message has every difference.
    """
    different = differences(found, wanted)
    if different:
        listed = "; ".join(
            f"{key} is {_short(theirs)} in the file and {_short(ours)} in this run"
            for key, (theirs, ours) in different.items()
        )
        raise ConfigError(
            f"--data-config.norm-stats-file {path} was computed from something else: {listed}. "
            "Leave the flag out, and statistics are computed; or remove the file's key 'opendm' to "
            "use its numbers all the same"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
