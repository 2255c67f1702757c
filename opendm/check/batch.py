"""One batch through the model, as training would put it through."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from opendm.check.episodes import spread_rows
from opendm.check.problem import Problem
from opendm.constants.precision import FP32_MIXED_PRECISION_POLICY
from opendm.errors import DataError, OpenDMError
from opendm.trainer.sampling import BAD_PICTURES, SampleKey, SeededCollator, SeededDataset

if TYPE_CHECKING:
    from opendm.check.run import CheckedRun


SEED: Final = 0
EPOCH: Final = -1
"""Training counts from 0, so that none of its draws is anticipated."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What came of it."""

    problems: list[Problem]
    loss: float | None = None


def make_batch(dataset: Any, collator: Any, size: int) -> dict[str, torch.Tensor]:
    """A batch of samples from all over the dataset, the same one every time.

    Raises:
        DataError: a sample is bad.
    """
    samples = SeededDataset(dataset, SEED)
    rows = spread_rows(len(dataset), size)
    batch = SeededCollator(collator)([samples[SampleKey(EPOCH, row)] for row in rows])
    if isinstance(batch, OpenDMError):
        raise batch
    batch.pop(BAD_PICTURES, None)  # a finding of the pictures' own check
    return batch


def check_loss(model: Any, batch: dict[str, torch.Tensor], *, half: bool, name: str) -> BatchResult:
    """The loss of a batch, without gradients.

    Args:
        model: as training builds it.
        batch: of :func:`make_batch`.
        half: compute in bfloat16.
        name: of the dataset.
    """
    device = next(model.parameters()).device
    inputs = {key: value.to(device) for key, value in batch.items()}
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
            loss = float(model(**inputs)["loss"])
    except (OpenDMError, RuntimeError, ValueError) as error:
        reason = f"refuses one batch: {error}"
        return BatchResult([Problem(name, "model", reason, code="batch")])
    if not math.isfinite(loss):
        return BatchResult([Problem(name, "loss", f"of one batch is {loss}", code="loss")], loss)
    return BatchResult([], loss)


def check_batch(run: "CheckedRun", processor: Any) -> BatchResult:
    """Statistics, samples, collator and model of a run, with one batch.

    Args:
        run: what is checked.
        processor: of the checkpoint.
    """
    data, trainer, name = run.data, run.trainer, run.name
    chunk, max_length = run.model.chunk_size, trainer.model_max_length
    try:
        data.compute_norm_stats(chunk)
        dataset = data.build_dataset(processor, chunk, max_length)
        collator = data.build_collator(processor, max_length)
        batch = make_batch(dataset, collator, trainer.per_device_train_batch_size)
    except DataError as error:
        return BatchResult([Problem(name, "sample", str(error), code="sample")])
    model = run.model.build_model(use_lora=run.use_lora)
    if torch.cuda.is_available():
        model = model.cuda()
    half = trainer.bf16 or run.model.precision_policy == FP32_MIXED_PRECISION_POLICY
    return check_loss(model, batch, half=half, name=name)
