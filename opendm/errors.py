"""The errors that a person can cause, and the exit code that each one ends a command with."""


class OpenDMError(Exception):
    """Base of every error that is reported as one line, without a traceback."""

    exit_code: int = 1


class ConfigError(OpenDMError):
    """A flag, a path or a combination of settings is wrong."""

    exit_code = 2


class CheckpointError(ConfigError):
    """A checkpoint folder is missing, incomplete or does not fit the model."""


class DataError(OpenDMError):
    """A dataset, an episode, a frame, an image or a statistics file is wrong."""

    exit_code = 3


class PictureError(DataError):
    """A file of pictures is missing, broken or too large, or lacks the frame that is asked for.

    Args:
        message: names file, frame and reason.
        file: which one is bad; the same for all frames of a video.
    """

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message)
        self.file = file

    def __reduce__(self) -> tuple[type["PictureError"], tuple[str, str]]:
        """Processes send each other both."""
        return type(self), (str(self), self.file)


class EngineError(OpenDMError):
    """The run did not get the distributed engine that it asked for."""

    exit_code = 4


class NonFiniteError(OpenDMError):
    """Losses or gradients were not finite, so that the run had to stop."""

    exit_code = 5


class Interrupted(OpenDMError):  # noqa: N818 - nothing is wrong
    """A signal stopped the run; what it had reached is saved, and a new start continues."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: schedulers may start the job again
