"""The check of an experiment: as the task ``check``, and in short form before every training."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import transformers

from opendm.check.problem import Problem
from opendm.check.report import CheckReport
from opendm.check.run import CheckedRun, check, check_briefly
from opendm.data.read_once import read_once
from opendm.errors import ConfigError, DataError
from opendm.exp.policy_layout import policy_layout, robot_parts
from opendm.exp.resume import checkpoint_to_continue
from opendm.model.dm05.adapter_folder import is_adapter
from opendm.model.dm05.config import DM05ModelConfig

if TYPE_CHECKING:
    from opendm.exp.dm05_exp import DM05Exp

logger = logging.getLogger(__name__)


def checked_run(exp: "DM05Exp", world_size: int) -> CheckedRun:
    """The parts of an experiment that the check reads."""
    return CheckedRun(
        exp.data_config, exp.model_config, exp.trainer_config, world_size, bool(exp.use_lora)
    )


def continued_model(exp: "DM05Exp") -> DM05ModelConfig:
    """The model that training would begin with: a LoRA run goes on with its checkpoint's adapter.

    That adapter proves a base that was moved; a new one could not.
    """
    folder = checkpoint_to_continue(exp.trainer_config) if exp.use_lora else None
    if folder is None or not is_adapter(folder):
        return exp.model_config
    return replace(exp.model_config, model_name_or_path=str(folder))


def check_experiment(exp: "DM05Exp", world_size: int = 1) -> None:
    """Print all findings, and write them as JSON where that was asked for.

    Raises:
        DataError: there are errors, or in strict mode warnings.
        ConfigError: the JSON file cannot be written.
    """
    transformers.logging.set_verbosity_error()
    run = replace(checked_run(exp, world_size), model=continued_model(exp))
    with read_once():
        report = check(run, exp.check_config)
        report.add(check_layout(exp))
    print(report.text())
    if exp.check_config.json_path:
        path = Path(exp.check_config.json_path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(report.json(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {path} cannot be written: {error}") from error
    _refuse(report, strict=exp.check_config.strict)


def check_layout(exp: "DM05Exp") -> Iterator[Problem]:
    """Whether one checkpoint can serve all robots of the data."""
    data = exp.data_config
    try:
        if data.norm_stats_file is None:
            robot_parts(data)
        else:
            policy_layout(exp, Path(data.norm_stats_file))
    except ConfigError as error:
        yield Problem("data", "robot_type", str(error), code="layout")
    except DataError:
        return  # the file cannot be read, which is a finding of its own


def check_before_training(exp: "DM05Exp", world_size: int) -> str:
    """The short form: warnings are logged, errors end the run before the model is loaded.

    Returns:
        One line about what was found.

    Raises:
        DataError: there are errors, or in strict mode warnings.
        ConfigError: datasets of one robot type show it in different ways.
    """
    robot_parts(exp.data_config)
    report = check_briefly(checked_run(exp, world_size))
    for problem in report.warnings:
        logger.warning("check: %s", problem)
    _refuse(report, strict=exp.check_config.strict)
    return f"{len(report.warnings)} warnings"


def _refuse(report: CheckReport, *, strict: bool) -> None:
    problems: list[Problem] = report.problems if strict else report.errors
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        kind = "problems" if strict else "errors"
        raise DataError(f"the check found {len(problems)} {kind}: {problems[0]}{more}")
