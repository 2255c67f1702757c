"""Open-loop error of policies on held-out episodes, against two baselines."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from opendm.errors import ConfigError, DataError
from opendm.eval.action_errors import (
    HOLD,
    TRAINED,
    UNTRAINED,
    MeanError,
    OpenLoopErrors,
    error_table,
    moving_dimensions,
    name_dimensions,
    write_figures,
)
from opendm.eval.held_out import HeldOut, different_tasks, episode_view, hold_last_state
from opendm.eval.report import Report, write_report
from opendm.eval.run_record import read_run, versions
from opendm.infer.policy import Policy

Show = Callable[[str], None]


def evaluate_open_loop(
    *checkpoints: Path,
    untrained: Path,
    dataset_name: str,
    output: Path,
    num_steps: int = 10,
    stride: int = 4,
    batch_size: int = 32,
    num_episode_views: int = 2,
    device: str = "cpu",
    show: Show = print,
) -> Report:
    """Compare predicted with recorded actions and write ``report.html`` and ``open_loop.json``.

    Args:
        checkpoints: folders of trained policies; the page is about the last one, and all of them
            meet the same frames with the same noise.
        untrained: folder that its training started from.
        dataset_name: registered name of the held-out episodes.
        output: folder to write into.
        num_steps: integration steps.
        stride: every how many frames a chunk is predicted.
        batch_size: frames per model call.
        num_episode_views: episodes to show, each of another task.
        device: where the models run.
        show: takes lines of progress and the result.

    Raises:
        CheckpointError: a checkpoint does not load.
        ConfigError: the checkpoints cannot be compared.
        DataError: the episodes do not fit the policy.
    """
    judged = checkpoints[-1]
    names = checkpoint_names(checkpoints)
    policies = {
        name: Policy.from_checkpoint(folder, device=device)
        for name, folder in zip(names, checkpoints, strict=True)
    }
    trained = policies[names[-1]]
    policies[UNTRAINED] = Policy.from_checkpoint(untrained, layout_from=judged, device=device)
    held_out = HeldOut.open(dataset_name, trained.layout)
    for name in names[:-1]:
        check_comparable(name, HeldOut.open(dataset_name, policies[name].layout), held_out)
    indices = range(0, len(held_out.dataset), stride)
    show(f"open loop: {len(indices)} frames of {dataset_name}, horizon {trained.layout.chunk_size}")
    errors = measure(
        held_out, policies, indices, num_steps=num_steps, batch_size=batch_size, show=show
    )
    views = [
        episode_view(held_out, trained, number, num_steps, batch_size)
        for number in different_tasks(held_out, num_episode_views)
    ]
    show(error_table(errors))
    for line in errors.summary():
        show(line)
    training, settings = read_run(judged)
    report = Report(
        title=f"{trained.layout.dataset_name}: {judged.name}",
        settings={
            **_places(names, checkpoints),
            "held-out dataset": dataset_name,
            "sampling steps": str(num_steps),
            "frames": f"{errors.num_frames} (every {stride})",
            **settings,
        },
        versions=versions(),
        training=training,
        errors=errors.rows(),
        summary=errors.summary(),
        episodes=views,
        horizon=errors.horizon(),
    )
    write_report(report, output / "report.html")
    write_figures(errors, output / "open_loop.json", dataset_name, stride, num_steps)
    return report


def checkpoint_names(checkpoints: Sequence[Path]) -> list[str]:
    """Names of checkpoints on the page: their folders' names, or their paths where those clash.

    Raises:
        ConfigError: one is given twice.
    """
    if len(checkpoints) == 1:
        return [TRAINED]
    twice = [str(path) for path, count in Counter(checkpoints).items() if count > 1]
    if twice:
        raise ConfigError(f"--checkpoint names {twice[0]} twice; give each checkpoint once")
    names = [path.name for path in checkpoints]
    if len(set(names)) < len(names) or {UNTRAINED, HOLD} & set(names):
        return [str(path) for path in checkpoints]
    return names


def check_comparable(name: str, other: HeldOut, judged: HeldOut) -> None:
    """Refuse a checkpoint whose chunks cannot stand beside those of the last one.

    Raises:
        ConfigError: its actions have another form, or it sees other cameras.
    """
    for field in ("chunk_size", "action_dim", "state_desc", "image_keys"):
        given, wanted = getattr(other.layout, field), getattr(judged.layout, field)
        if given != wanted:
            raise ConfigError(
                f"--checkpoint {name} has {field} {given} and the last one {wanted}; compare "
                "checkpoints of one kind, or evaluate them one by one"
            )


def _places(names: Sequence[str], checkpoints: Sequence[Path]) -> dict[str, str]:
    if len(checkpoints) == 1:
        return {"checkpoint": str(checkpoints[0])}
    pairs = zip(names, checkpoints, strict=True)
    return {f"checkpoint {name}": str(folder) for name, folder in pairs}


def measure(
    held_out: HeldOut,
    policies: Mapping[str, Policy],
    indices: Sequence[int],
    *,
    num_steps: int,
    batch_size: int,
    show: Show,
) -> OpenLoopErrors:
    """Errors of the policies, of which the last checkpoint is judged, and of holding still."""
    size = held_out.layout.action_dim
    errors = {name: MeanError.zeros(size) for name in (*policies, HOLD)}
    done = 0
    for part, samples in held_out.batches(indices, batch_size):
        true = np.concatenate([sample["action"] for sample in samples])
        mask = np.concatenate([sample["action_mask"] for sample in samples])
        if true.shape[-1] != size:
            raise DataError(f"actions have {true.shape[-1]} dimensions, the policy has {size}")
        predicted = {
            name: held_out.act(policy, part, samples, num_steps)
            for name, policy in policies.items()
        }
        predicted[HOLD] = hold_last_state(samples, true)
        for name, chunks in predicted.items():
            errors[name].add(chunks, true, mask)
        done += len(part)
        show(f"open loop: {done}/{len(indices)} frames")
    dimensions, units = name_dimensions(held_out.layout)
    return OpenLoopErrors(
        dimensions,
        units,
        {name: error.mean().tolist() for name, error in errors.items()},
        moving_dimensions(dimensions, units),
        done,
        {name: error.by_step() for name, error in errors.items()},
        [name for name in policies if name != UNTRAINED][-1],
    )
