"""The statistics file of a run: used where it fits, computed where it does not."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opendm.data.normalize import NormStatsFile
from opendm.data.stat_origin import check_given, differences

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
        logger.info("statistics %s have another %s; computed again", path, ", ".join(changed))
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
