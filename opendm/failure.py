"""How a rank tells the launcher why it exits; needs no framework."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def record_failure(message: str, exit_code: int, environ: Mapping[str, str]) -> None:
    """Tell the launcher why this rank is about to exit; without a launcher, do nothing.

    The layout is the one that torch's ``ProcessFailure`` reads; ``time_s`` is our addition.
    """
    path = environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path:
        return
    now_s = time.time()
    details = {"timestamp": str(int(now_s)), "time_s": now_s}
    failure = {"message": {"message": message, "errorCode": exit_code, "extraInfo": details}}
    partial = Path(f"{path}.{os.getpid()}.partial")
    with suppress(OSError):  # a full disk must not replace the failure that is being reported
        partial.write_text(json.dumps(failure), encoding="utf-8")
        partial.replace(path)
