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
from opendm.eval.metaworld.controls import (
    BlindActor,
    Condition,
    PolicyActor,
    check_fits,
)
from opendm.eval.metaworld.demonstrations import (
    check_unseen,
    mean_demonstration,
    recorded_actions,
)
from opendm.eval.metaworld.environment import World, prepare_simulator
from opendm.eval.metaworld.page import TaskResult, write_page
from opendm.eval.metaworld.rollout import Outcome, Pictures, Rules, run_episodes, success_rate
from opendm.eval.metaworld.statistics import Rate
from opendm.eval.metaworld.tasks import find_task
from opendm.eval.run_record import read_run, versions
from opendm.infer.layout import PolicyLayout
from opendm.infer.policy import Policy

MIN_SEED: Final = 50_000
"""Below lie the seeds of demonstrations."""
MAX_STEPS: Final = 200
NUM_WORLDS: Final = 10
"""Episodes at once: one query of the model serves them all."""

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
        if self.seed < MIN_SEED:
            raise ConfigError(
                f"--seed {self.seed} is too small; give {MIN_SEED} or more: smaller seeds are of "
                "demonstrations"
            )


def evaluate_metaworld(plan: Plan, output: Path, show: Show = print) -> list[TaskResult]:
    """Run every condition and write ``metaworld.html``, ``metaworld.json`` and GIFs.

    Raises:
        ConfigError: the simulator cannot run, a task is unknown or a seed was seen in training.
        CheckpointError: a checkpoint does not load or sees other cameras.
    """
    plan.validate()
    judged = plan.checkpoints[-1]
    for path in plan.checkpoints:
        check_fits(PolicyLayout.load(path), str(path))
    folder = plan.demonstrations or _demonstrations_of(judged)
    seen = check_unseen(plan.seeds, folder)
    prepare_simulator(plan.gl)
    policies = {path: Policy.from_checkpoint(path) for path in plan.checkpoints}
    evaluation = Evaluation(plan, policies, _untrained(plan), folder, show)
    results = [evaluation.task(name) for name in plan.tasks]
    settings = _settings(plan, seen)
    write_page(output / "metaworld.html", f"Meta-World: {judged}", results, settings)
    write_figures(output / "metaworld.json", results, settings)
    show(f"report: {output / 'metaworld.html'}")
    return results


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Policies in the simulator's tasks, one after another."""

    plan: Plan
    policies: Mapping[Path, Policy]
    """By checkpoint; the last one is judged."""
    untrained: Policy | None
    demonstrations: Path
    show: Show

    def task(self, name: str) -> TaskResult:
        """Success of every checkpoint in a task, and of the controls."""
        start, sentence = time.perf_counter(), find_task(name).sentence
        size = image_size(load_processor(str(self.plan.checkpoints[-1])))
        worlds = [World.open(name, size) for _ in range(min(NUM_WORLDS, self.plan.num_episodes))]
        by_step: dict[int, Rate] = {}
        outcomes: list[Outcome] = []
        for path, policy in self.policies.items():
            condition = Condition(str(path), self.actor(policy, sentence))
            outcomes = self.run(name, condition, worlds)
            by_step[training_steps(path)] = success_rate(outcomes)
        controls = {
            condition.name: success_rate(self.run(name, condition, worlds))
            for condition in self.controls(name)
        }
        for world in worlds:
            world.close()
        seconds = time.perf_counter() - start
        return TaskResult(name, sentence, by_step, controls, outcomes[0].frames, seconds)

    @property
    def judged(self) -> Policy:
        """The last checkpoint."""
        return self.policies[self.plan.checkpoints[-1]]

    def actor(self, policy: Policy, sentence: str) -> PolicyActor:
        """A policy that is told a sentence."""
        return PolicyActor(policy, sentence, self.plan.num_flow_steps)

    def run(self, name: str, condition: Condition, worlds: Sequence[World]) -> list[Outcome]:
        """All starts under one condition."""
        rules = Rules(self.plan.actions_per_query, MAX_STEPS)
        start = time.perf_counter()
        outcomes = run_episodes(
            condition.actor,
            worlds,
            self.plan.seeds,
            rules,
            pictures=condition.pictures,
            num_kept=1,
        )
        seconds = time.perf_counter() - start
        self.show(f"{name}: {condition.name}: {success_rate(outcomes)} in {seconds:.0f} s")
        return outcomes

    def controls(self, name: str) -> list[Condition]:
        """What the judged policy is compared with in a task."""
        if not self.plan.use_controls:
            return []
        sentence = find_task(name).sentence
        found = []
        if self.untrained is not None:
            found.append(Condition("untrained", self.actor(self.untrained, sentence)))
        if episodes := recorded_actions(self.demonstrations, sentence):
            blind = BlindActor(mean_demonstration(episodes))
            found.append(Condition("blind mean demonstration", blind))
        told = self.actor(self.judged, sentence)
        found.append(Condition("blank images", told, Pictures.BLANK))
        found.append(Condition("frozen images of another start", told, Pictures.FROZEN))
        if other := other_sentence(name, self.plan.tasks):
            found.append(Condition(f"told “{other}”", self.actor(self.judged, other)))
        return found


def other_sentence(name: str, tasks: Sequence[str]) -> str | None:
    """The sentence of the task that follows, of the same scene where there is one."""
    place = list(tasks).index(name)
    others = [*tasks[place + 1 :], *tasks[:place]]
    alike = [task for task in others if find_task(task).has_disc == find_task(name).has_disc]
    chosen = next(iter(alike or others), None)
    return None if chosen is None else find_task(chosen).sentence


def _untrained(plan: Plan) -> Policy | None:
    """The policy that training started from, if it is still there."""
    if not plan.use_controls:
        return None
    folder = plan.untrained
    if folder is None:
        settings = read_run(plan.checkpoints[-1])[1]
        folder = Path(settings.get("config.model_config.model_name_or_path", ""))
        if not (folder / "config.json").is_file():
            return None
    return Policy.from_checkpoint(folder, layout_from=plan.checkpoints[-1])


def _demonstrations_of(checkpoint: Path) -> Path:
    """The folder of episodes that a checkpoint was trained on, by its record and its layout."""
    given = read_run(checkpoint)[1].get("config.data_config.jsonl_dir", "null")
    if given != "null":
        return Path(given)
    return Path(dataset_fields(PolicyLayout.load(checkpoint).dataset_name)["jsonl_dir"])


def training_steps(checkpoint: Path) -> int:
    """Optimizer steps behind a checkpoint, from its name or its run; -1 where neither says."""
    if found := re.fullmatch(r"checkpoint-(\d+)", checkpoint.name):
        return int(found[1])
    settings = read_run(checkpoint)[1]
    return int(settings.get("config.trainer_config.num_train_steps", "-1"))


def _settings(plan: Plan, seen: str) -> dict[str, str]:
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
            "by_step": {str(step): figures(rate) for step, rate in result.by_step.items()},
            "controls": {name: figures(rate) for name, rate in result.controls.items()},
            "seconds": round(result.seconds, 1),
        }
        for result in results
    }
    text = json.dumps({"tasks": tasks, "settings": settings}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
