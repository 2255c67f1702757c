"""How a rank tells the launcher why it exits and what it was doing; needs no framework."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

FILE_VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"
PHASE_BYTES: Final = 80
EARLY_PHASES: Final = frozenset({"", "loading", "statistics"})
"""Those before the first step, when a rank has nothing to save."""


def record_failure(
    message: str, exit_code: int, environ: Mapping[str, str], *, lost_contact: bool = False
) -> None:
    """Tell the launcher why this rank is about to exit; without a launcher, do nothing.

    The layout is the one that torch's ``ProcessFailure`` reads; ``time_s`` and ``lost_contact`` are
    our additions.
    """
    path = environ.get(FILE_VARIABLE, "")
    if not path:
        return
    now_s = time.time()
    details = {"timestamp": str(int(now_s)), "time_s": now_s, "lost_contact": lost_contact}
    failure = {"message": {"message": message, "errorCode": exit_code, "extraInfo": details}}
    partial = Path(f"{path}.{os.getpid()}.partial")
    with suppress(OSError):  # a full disk must not replace the failure that is being reported
        partial.write_text(json.dumps(failure), encoding="utf-8")
        partial.replace(path)


def record_exception(error: Exception, environ: Mapping[str, str]) -> None:
    """Tell the launcher of an exception that nothing handled: its type and its first line."""
    first_line = (str(error).splitlines() or [""])[0]
    lost = lost_contact(error)
    lead = "lost contact with another rank: " if lost else ""
    message = f"{lead}{type(error).__name__}: {first_line}"
    record_failure(message, 1, environ, lost_contact=lost)


def lost_contact(error: BaseException) -> bool:
    """Whether an error says that another rank is gone or silent; the failure began there then.

    Gloo's errors are plain ``RuntimeError``s whose text names a source file of gloo.
    """
    is_torchs = any(base.__name__ == "DistError" for base in type(error).__mro__)
    return is_torchs or (isinstance(error, RuntimeError) and "gloo" in str(error))


def failure_is_consequence(error_file: str) -> bool:
    """Whether the rank of this file recorded that it lost contact with another one."""
    try:
        failure = json.loads(Path(error_file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(failure["message"]["extraInfo"]["lost_contact"])


@contextmanager
def phase(name: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Tell the launcher what this rank does inside ``with``; without a launcher, do nothing.

    The launcher names the phase when the rank fails, also one that was killed and cannot speak. An
    exception leaves the phase standing, since it was raised there.
    """
    path = environ.get(FILE_VARIABLE, "")
    if not path:
        yield
        return
    outer = phase_of(path)
    _write_phase(path, name)
    yield
    _write_phase(path, outer)


def phase_of(error_file: str) -> str:
    """The phase that a rank said last; "" if none."""
    try:
        return _phase_file(error_file).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _write_phase(error_file: str, name: str) -> None:
    text = name.encode()[:PHASE_BYTES].ljust(PHASE_BYTES)
    with suppress(OSError):  # as above
        file = os.open(_phase_file(error_file), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(file, text, 0)  # in place: a reader sees the old or the new name
        finally:
            os.close(file)


def _phase_file(error_file: str) -> Path:
    return Path(f"{error_file}.phase")
