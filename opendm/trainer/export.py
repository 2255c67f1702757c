"""From a checkpoint to a plain folder: what inference and another run start from, and no more."""

import os
import shutil
from pathlib import Path

from opendm.errors import CheckpointError
from opendm.trainer.manifest import MANIFEST, verify
from opendm.trainer.train_state import STATE_FOLDER


def export_checkpoint(checkpoint: Path, output: Path) -> None:
    """Copy a verified checkpoint without its manifest and without what only a resume needs.

    Args:
        checkpoint: ``checkpoint-N`` of a run.
        output: folder to make.

    Raises:
        CheckpointError: the checkpoint does not verify, ``output`` exists, or a file could not be
            written.
    """
    manifest = verify(checkpoint)
    if output.exists():
        raise CheckpointError(f"{output} exists; give --output a folder that does not")
    partial = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        for name in manifest.files:
            if name != MANIFEST and not name.startswith(f"{STATE_FOLDER}/"):
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(checkpoint / name, partial / name)
        os.replace(partial, output)  # noqa: PTH105 - Path.replace hides that it is atomic
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{output} could not be written: {error}") from error
