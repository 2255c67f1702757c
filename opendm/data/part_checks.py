"""What must hold for the datasets of a configuration, and between those of a mixture."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opendm.constants.robot import ActionMode
from opendm.errors import ConfigError

if TYPE_CHECKING:
    from opendm.data.config import DM05DataConfig


def check_modes(parts: "Sequence[DM05DataConfig]") -> None:
    """Refuse a mixture in which one robot's actions would be learnt in two ways.

    Raises:
        ConfigError: names both datasets.
    """
    first: dict[str | None, DM05DataConfig] = {}
    for part in parts:
        robot = part._dataset_info().get("robot_type")  # noqa: SLF001 - the public hook
        other = first.setdefault(robot, part)
        if other.action_mode is not part.action_mode:
            raise ConfigError(
                f"datasets {other.dataset_name!r} ({other.action_mode.name}) and "
                f"{part.dataset_name!r} ({part.action_mode.name}) have robot type {robot!r}, whose "
                "statistics need one action mode; give them robot types of their own"
            )


def check_action_mode(part: "DM05DataConfig", info: Mapping[str, Any]) -> None:
    """Compare the action mode of one dataset with its registration.

    Raises:
        ConfigError: names the flag and the registration.
    """
    declared = info.get("action_mode")
    if declared is not None and ActionMode(declared) is not part.action_mode:
        raise ConfigError(
            f"--data-config.action-mode {part.action_mode.name} contradicts the registration "
            f"of {part.dataset_name!r}, which says action_mode {ActionMode(declared).name}; "
            "give that one, or correct the registration"
        )
    check_angle_dims(part.dataset_name, info)
    if part.action_mode is ActionMode.RELATIVE and not info.get("state_desc"):
        raise ConfigError(
            "--data-config.action-mode RELATIVE needs state_desc in the registration of "
            f"{part.dataset_name!r}; add it or choose ABSOLUTE"
        )


def check_angle_dims(name: str, info: Mapping[str, Any]) -> None:
    """Refuse ``angle_dims`` that are not numbers of dimensions of ``state_desc``.

    Raises:
        ConfigError: names the dataset and what is allowed.
    """
    dims, desc = info.get("angle_dims") or (), info.get("state_desc") or ()
    if any(type(dim) is not int or not 0 <= dim < len(desc) for dim in dims):
        raise ConfigError(
            f"angle_dims {list(dims)} in the registration of {name!r}: expected numbers of "
            f"dimensions of state_desc, 0 to {len(desc) - 1}"
        )


def check_shared_files(parts: "Sequence[DM05DataConfig]") -> None:
    """Refuse a mixture in which two datasets hold one file.

    Each holds out episodes of its own, so that one would train on what the other holds out.
    Registrations of one folder with different ``episodes`` are two datasets.

    Raises:
        ConfigError: names both datasets and the file.
    """
    if len(parts) < 2:
        return
    first: dict[tuple[int, int], tuple[DM05DataConfig, Path]] = {}
    for part in parts:
        for path in _data_files(Path(_info(part)["jsonl_dir"])):
            entry = path.stat()
            other, its_path = first.setdefault((entry.st_dev, entry.st_ino), (part, path))
            if other is part or _are_disjoint(other, part):
                continue
            raise ConfigError(
                f"datasets {other.dataset_name!r} and {part.dataset_name!r} both hold the file "
                f"{its_path} ({path}), so that an episode held out of one could be trained on in "
                "the other; name each folder once, or register each with other episodes"
            )


def _info(part: "DM05DataConfig") -> dict[str, Any]:
    return part._dataset_info()  # noqa: SLF001 - the public hook


def _data_files(root: Path) -> Iterator[Path]:
    """Files of the episodes, in either format."""
    is_lerobot = (root / "meta" / "info.json").is_file()
    found = (root / "data").rglob("*.parquet") if is_lerobot else root.rglob("*.jsonl")
    return (path for path in sorted(found) if path.is_file())


def _are_disjoint(one: "DM05DataConfig", other: "DM05DataConfig") -> bool:
    """Whether both are registrations of one folder that choose different episodes of it."""
    infos = _info(one), _info(other)
    folders = {Path(info["jsonl_dir"]).resolve() for info in infos}
    chosen = [set(info.get("episodes") or ()) for info in infos]
    return len(folders) == 1 and all(chosen) and chosen[0].isdisjoint(chosen[1])
