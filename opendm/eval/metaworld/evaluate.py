"""``opendm eval metaworld``: checkpoints in closed loop on unseen starts, with controls."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from opendm.data.processor import image_size, load_processor
from opendm.dataset.register import dataset_fields
from opendm.errors import ConfigError
from opendm.eval.metaworld.controls import Condition, check_fits
from opendm.eval.metaworld.demonstrations import check_unseen, recorded_actions
from opendm.eval.metaworld.environment import prepare_simulator
from opendm.eval.metaworld.page import TaskResult, write_page
from opendm.eval.metaworld.rollout import Outcome, Pictures, Rules, success_rate
from opendm.eval.metaworld.stage import Play, StageSettings, open_stages
from opendm.eval.metaworld.statistics import Rate
from opendm.eval.metaworld.tasks import find_task
from opendm.eval.run_record import read_run, versions
from opendm.infer.layout import PolicyLayout

MIN_SEED: Final = 50_000
"""Below lie the seeds of demonstrations."""
MAX_STEPS: Final = 200
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is evaluated, and how."""

    checkpoints: Sequence[Path]
    """The last one is judged; the others show how success grew."""
    tasks: Sequence[str]
    num_episodes: int = 100
    seed: int = MIN_SEED
    actions_per_query: int = 8
    num_flow_steps: int = 10
    untrained: Path | None = None
    """Where training started; None takes what the run's record names."""
    demonstrations: Path | None = None
    """Folder of the training episodes; None takes that of the checkpoint's dataset."""
    use_controls: bool = True
    gl: str = "osmesa"
    num_processes: int = 1
    """Episodes are shared among them; the outcome is the same for any number."""

    @property
    def seeds(self) -> range:
        """One per start."""
        return range(self.seed, self.seed + self.num_episodes)

    def validate(self) -> None:
        """Check what needs neither model nor simulator.

        Raises:
            ConfigError: a flag is wrong.
        """
        for name in self.tasks:
            find_task(name)
        if self.num_episodes < 1 or self.actions_per_query < 1 or self.num_flow_steps < 1:
            raise ConfigError(
                "--episodes, --actions-per-query and --flow-steps must each be 1 or more"
            )
        if self.num_processes < 1:
            raise ConfigError(f"--processes {self.num_processes} is too small; give 1 or more")
        if self.seed < MIN_SEED:
            raise ConfigError(
                f"--seed {self.seed} is too small; give {MIN_SEED} or more: smaller seeds are of "
                "demonstrations"
            )


def evaluate_metaworld(plan: Plan, output: Path, show: Show = print) -> list[TaskResult]:
    """Run every condition and write ``metaworld.html``, ``metaworld.json`` and GIFs.

    Episodes are played in spawned processes, so a script must call this below
    ``if __name__ == "__main__"``.

    Raises:
        ConfigError: the simulator cannot run, a task is unknown or a seed was seen in training.
        CheckpointError: a checkpoint does not load or sees other cameras.
    """
    plan.validate()
    judged = plan.checkpoints[-1]
    for path in plan.checkpoints:
        check_fits(PolicyLayout.load(path), str(path), plan.actions_per_query)
    check_distinct_steps(plan.checkpoints)
    folder = _demonstrations(plan)
    _untrained(plan)  # a wrong path is better found before the judged policy has played
    seen = check_unseen(plan.seeds, folder)
    prepare_simulator(plan.gl)
    settings = StageSettings(
        gl=plan.gl,
        image_size=image_size(load_processor(str(judged))),
        rules=Rules(plan.actions_per_query, MAX_STEPS),
        num_flow_steps=plan.num_flow_steps,
        demonstrations=folder,
    )
    with open_stages(settings, plan.num_processes) as play:
        results = [evaluate_task(plan, name, folder, play, show) for name in plan.tasks]
    facts = _facts(plan, seen)
    write_page(output / "metaworld.html", f"Meta-World: {judged}", results, facts)
    write_figures(output / "metaworld.json", results, facts)
    show(f"report: {output / 'metaworld.html'}")
    return results


def evaluate_task(
    plan: Plan, name: str, demonstrations: Path, play: Play, show: Show
) -> TaskResult:
    """Success of every checkpoint in a task, and of the controls."""
    start = time.perf_counter()
    played = [
        (condition, play(name, condition, plan.seeds))
        for condition in (*_progress(plan, name), *_controls(plan, name, demonstrations, show))
    ]
    rates: list[Rate] = []
    outcomes: list[list[Outcome]] = []
    for condition, pending in played:
        outcomes.append(pending())
        rates.append(success_rate(outcomes[-1]))
        seconds = time.perf_counter() - start
        show(f"{name}: {condition.name}: {rates[-1]} after {seconds:.0f} s")
    num_checkpoints = len(plan.checkpoints)
    return TaskResult(
        name,
        find_task(name).sentence,
        rates[num_checkpoints - 1],
        dict(zip(map(training_steps, plan.checkpoints), rates, strict=False)),
        {
            condition.name: rate
            for (condition, _), rate in list(zip(played, rates, strict=True))[num_checkpoints:]
        },
        outcomes[num_checkpoints - 1][0].frames,
        time.perf_counter() - start,
    )


def _progress(plan: Plan, name: str) -> list[Condition]:
    """Every checkpoint under the task's own sentence."""
    sentence = find_task(name).sentence
    return [Condition(str(path), path, sentence) for path in plan.checkpoints]


def _controls(plan: Plan, name: str, demonstrations: Path, show: Show) -> list[Condition]:
    """What the judged policy is compared with in a task."""
    if not plan.use_controls:
        return []
    sentence, judged = find_task(name).sentence, plan.checkpoints[-1]
    found = []
    if (start := _untrained(plan)) is not None:
        found.append(Condition("untrained", start, sentence, layout_from=judged))
    if recorded_actions(demonstrations, sentence):
        blind = Condition("blind mean demonstration", None, sentence, Pictures.BLANK)
        found.append(blind)
    else:
        show(
            f"{name}: no blind control, as {demonstrations} has no episode of “{sentence}”; "
            "--demonstrations names another folder"
        )
    found += [
        Condition("blank images", judged, sentence, Pictures.BLANK),
        Condition("frozen images of another start", judged, sentence, Pictures.FROZEN),
    ]
    if other := other_sentence(name, plan.tasks):
        found.append(Condition(f"told “{other}”", judged, other))
    return found


def other_sentence(name: str, tasks: Sequence[str]) -> str | None:
    """The sentence of the task that follows, of the same scene where there is one."""
    place = list(tasks).index(name)
    others = [*tasks[place + 1 :], *tasks[:place]]
    alike = [task for task in others if find_task(task).has_disc == find_task(name).has_disc]
    chosen = next(iter(alike or others), None)
    return None if chosen is None else find_task(chosen).sentence


def _untrained(plan: Plan) -> Path | None:
    """The checkpoint that training started from, if it is still there."""
    if plan.untrained is not None:
        if not (plan.untrained / "config.json").is_file():
            raise ConfigError(
                f"--untrained {plan.untrained} is no checkpoint: no config.json in it"
            )
        return plan.untrained
    settings = read_run(plan.checkpoints[-1])[1]
    folder = Path(settings.get("config.model_config.model_name_or_path", ""))
    return folder if (folder / "config.json").is_file() else None


def _demonstrations(plan: Plan) -> Path:
    """The folder of episodes: the given one, or the judged checkpoint's by record and layout."""
    if plan.demonstrations is not None:
        if not plan.demonstrations.is_dir():
            raise ConfigError(f"--demonstrations {plan.demonstrations} is no folder")
        return plan.demonstrations
    checkpoint = plan.checkpoints[-1]
    given = read_run(checkpoint)[1].get("config.data_config.jsonl_dir", "null")
    if given != "null":
        return Path(given)
    name = PolicyLayout.load(checkpoint).dataset_name
    try:
        return Path(dataset_fields(name)["jsonl_dir"])
    except ConfigError as error:
        raise ConfigError(
            f"{checkpoint} was trained on dataset {name!r}, which is not known here; give the "
            f"folder of its training episodes as --demonstrations ({error})"
        ) from None


def check_distinct_steps(checkpoints: Sequence[Path]) -> None:
    """Check that success can be shown by training steps.

    Raises:
        ConfigError: two checkpoints have the same number, or neither says it.
    """
    found: dict[int, Path] = {}
    for path in checkpoints:
        steps = training_steps(path)
        if steps in found:
            known = f"{steps} training steps" if steps >= 0 else "an unknown number of steps"
            raise ConfigError(
                f"--checkpoint {found[steps]} and {path} both have {known}; evaluate them in two "
                "calls with --output of their own"
            )
        found[steps] = path


def training_steps(checkpoint: Path) -> int:
    """Optimizer steps behind a checkpoint, from its name or its run; -1 where neither says."""
    if found := re.fullmatch(r"checkpoint-(\d+)", checkpoint.name):
        return int(found[1])
    settings = read_run(checkpoint)[1]
    return int(settings.get("config.trainer_config.num_train_steps", "-1"))


def _facts(plan: Plan, seen: str) -> dict[str, str]:
    last = plan.seed + plan.num_episodes - 1
    return {
        "checkpoint": str(plan.checkpoints[-1]),
        "seeds": f"{plan.seed} to {last}; {seen}",
        "episode": f"at most {MAX_STEPS} control steps, ends at the first success",
        "actions per query": str(plan.actions_per_query),
        "flow steps": str(plan.num_flow_steps),
        "interval": "Wilson, 95 %",
        **versions(),
    }


def write_figures(path: Path, results: Sequence[TaskResult], settings: Mapping[str, str]) -> None:
    """The figures as JSON."""

    def figures(rate: Rate) -> dict[str, Any]:
        return {
            "successes": rate.num_successes,
            "episodes": rate.num_trials,
            "interval": list(rate.interval()),
        }

    tasks = {
        result.name: {
            "judged": figures(result.trained),
            "by_step": {str(step): figures(rate) for step, rate in result.by_step.items()},
            "controls": {name: figures(rate) for name, rate in result.controls.items()},
            "seconds": round(result.seconds, 1),
        }
        for result in results
    }
    text = json.dumps({"tasks": tasks, "settings": settings}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
