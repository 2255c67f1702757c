"""The statistics file of a run: used where it fits, computed where it does not."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opendm.data.normalize import NormStatsFile
from opendm.data.stat_origin import check_given, differences
from opendm.errors import ConfigError

logger = logging.getLogger(__name__)


def ensure_statistics(
    path: Path, origin: Mapping[str, Any], compute: Callable[[], NormStatsFile]
) -> Path:
    """Return ``path``, where the statistics of ``origin`` lie afterwards.

    A file that was computed from other data or settings is replaced; one of the public framework,
    which does not say what it was computed from, is used as it is.
    """
    if path.is_file():
        found = NormStatsFile.load(path).opendm
        if not found:
            logger.info("statistics %s do not name their source; used as they are", path)
            return path
        changed = differences(found, origin)
        if not changed:
            return path
        logger.info(
            "statistics %s are computed again because of another %s", path, ", ".join(changed)
        )
    stats = compute()
    stats.opendm = {**stats.opendm, **origin}
    stats.save(path)
    return path


def given_statistics(path: Path, origin: Mapping[str, Any]) -> Path:
    """Return ``path``, a file that was given by hand, if it fits or does not say what it is for.

    Raises:
        DataError: the file is missing or malformed.
        ConfigError: it was computed from something else.
    """
    found = NormStatsFile.load(path).opendm
    if found:
        check_given(path, found, origin)
    else:
        logger.info("statistics %s do not name their source; used as they are", path)
    return path


def read_statistics(path: Path, origin: Mapping[str, Any]) -> bytes:
    """The content of the file that :func:`ensure_statistics` returned.

    Raises:
        ConfigError: since then another run has put other statistics there.
    """
    content = path.read_bytes()
    found = json.loads(content).get("opendm")
    if found and differences(found, origin):
        raise ConfigError(_replaced(path))
    return content


def check_unchanged(path: Path, content: bytes) -> None:
    """Make sure that what others read from the file until now is ``content``.

    Raises:
        ConfigError: another run has put other statistics there.
    """
    if path.read_bytes() != content:
        raise ConfigError(_replaced(path))


def _replaced(path: Path) -> str:
    return (
        f"statistics {path} were replaced while this run was starting, perhaps by another run on "
        "other data; start again, with a --data-config.norm-stats-root of its own"
    )
