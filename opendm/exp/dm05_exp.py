"""``DM05Exp``: the configuration of a run, and the tasks that it can run.

A playground file subclasses these dataclasses and ends in ``main(MyExp)``.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, NoReturn

import tyro

from opendm.check.config import DM05CheckConfig
from opendm.data.config import DM05DataConfig
from opendm.errors import ConfigError, OpenDMError
from opendm.failure import record_exception, record_failure
from opendm.flags import choice_flag, unknown_flag
from opendm.infer.config import DM05InferenceConfig
from opendm.model.dm05.adapter_folder import check_output_folder
from opendm.model.dm05.config import DM05ModelConfig
from opendm.model.dm05.dm05_lora import DM05LoraConfig
from opendm.optimizer.config import DM05OptimizerConfig
from opendm.runtime import (
    Runtime,
    configure_logging,
    end_with_launcher,
    environment,
    show_stacks_on_signal,
    validate_only,
)
from opendm.trainer.config import DM05TrainerConfig

__all__ = [
    "DM05CheckConfig",
    "DM05DataConfig",
    "DM05Exp",
    "DM05InferenceConfig",
    "DM05LoraConfig",
    "DM05ModelConfig",
    "DM05OptimizerConfig",
    "DM05TrainerConfig",
    "main",
    "run",
]

SERVE_PACKAGES: Final = ("starlette", "uvicorn", "h11", "python_multipart")

logger = logging.getLogger(__name__)


@dataclass
class DM05Exp:
    """A fine-tuning run of DM0.5."""

    use_lora: bool | None = False
    """Train low-rank adapters instead of the full model."""
    task: Annotated[str, choice_flag("train", "inference", "check")] = "train"
    """train; inference: serve a checkpoint; or check: say what would fail in training."""
    model_config: DM05ModelConfig = field(default_factory=DM05ModelConfig)
    """The model."""
    optimizer_config: DM05OptimizerConfig = field(default_factory=DM05OptimizerConfig)
    """The optimizer."""
    trainer_config: DM05TrainerConfig = field(default_factory=DM05TrainerConfig)
    """The run."""
    data_config: DM05DataConfig = field(default_factory=DM05DataConfig)
    """The data."""
    inference_config: DM05InferenceConfig = field(default_factory=DM05InferenceConfig)
    """The inference service."""
    check_config: DM05CheckConfig = field(default_factory=DM05CheckConfig)
    """The check before training."""
    logger_level: str = "INFO"
    """Least severe messages shown: DEBUG, INFO, WARNING or ERROR."""

    def validate(self) -> None:
        """Check the whole configuration without importing a framework.

        Raises:
            ConfigError: a flag is wrong.
            DataError: the dataset is.
        """
        self.optimizer_config.validate()
        self.trainer_config.validate()
        self.model_config.validate(use_lora=bool(self.use_lora))
        self.data_config.validate()
        check_output_folder(self.trainer_config.output_dir, use_lora=bool(self.use_lora))

    def run(self) -> None:
        """Run the task."""
        if self.task == "train":
            self.train()
        elif self.task == "check":
            self.check()
        else:
            self.inference()

    def train(self) -> None:
        """Train, from configuration to the final weights in the output folder."""
        self.validate()
        if validate_only():
            return
        from opendm.exp.training import train

        train(self)

    def check(self) -> None:
        """Look for all that would fail in training, and print it.

        Raises:
            DataError: there is something.
        """
        self.validate()
        if validate_only():
            return
        from opendm.exp.checking import check_experiment

        check_experiment(self, Runtime.from_env().world_size)

    def inference(self) -> None:
        """Serve a checkpoint over HTTP until a signal ends it.

        Raises:
            ConfigError: a flag or the checkpoint does not fit, or the port is in use.
        """
        self.inference_config.validate()
        if validate_only():
            return
        if self.model_config.model_name_or_path is None:
            raise ConfigError("--model-config.model-name-or-path is needed to serve a checkpoint")
        try:
            from opendm.infer.serve import serve
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in SERVE_PACKAGES:
                raise
            raise ConfigError(
                f"serving needs the package {package}, which is not installed; it comes with an "
                "extra: pip install 'opendm[serve]'"
            ) from error
        base = self.model_config.lora_config.base_model
        serve(self.model_config.model_name_or_path, self.inference_config, base)


def parse(exp_type: type[DM05Exp], argv: Sequence[str] | None = None) -> DM05Exp:
    """The experiment that a command line describes; a wrong one exits with 2."""
    words = sys.argv[1:] if argv is None else argv
    if problem := unknown_flag(exp_type(), words):
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    return tyro.cli(exp_type, args=words, description=exp_type.__doc__)


def run(exp: DM05Exp) -> int:
    """Run an experiment; what a person did wrong becomes one line and an exit code."""
    runtime = Runtime.from_env()
    end_with_launcher()
    show_stacks_on_signal()
    try:
        configure_logging(exp.logger_level, runtime)
        exp.run()
    except OpenDMError as error:
        message = " ".join(str(error).split())
        record_failure(message, error.exit_code, environment())
        sys.stdout.flush()
        if runtime.world_size == 1:
            print(f"error: {message}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        record_exception(error, environment())
        raise
    return 0


def main(exp: type[DM05Exp] | DM05Exp, argv: Sequence[str] | None = None) -> NoReturn:
    """Entry of every playground file: parse the command line, run, exit."""
    sys.exit(run(parse(exp, argv) if isinstance(exp, type) else exp))
