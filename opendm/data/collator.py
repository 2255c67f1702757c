"""From samples to batches."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from opendm.data.dataset import Sample
from opendm.data.norm_stats_job import robot_name
from opendm.errors import DataError
from opendm.pixels import scale_bytes

Batch = dict[str, torch.Tensor]


class TrainingCollator:
    """Pad prompts on the right to the batch's longest and stack the rest.

    Args:
        pad_token_id: fills ``input_ids``.
        max_length: most tokens of a prompt; a longer one is refused, never cut.
        pad_to_multiple_of: lengths are rounded up to a multiple of it, but not above max_length.
    """

    def __init__(
        self, pad_token_id: int, max_length: int = 1024, pad_to_multiple_of: int = 16
    ) -> None:
        self.pad_token_id = pad_token_id
        self.max_length = max_length
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        """The batch; ``action`` ``[B, H, D]`` float32 and ``action_mask`` bool where given."""
        length = self.padded_length([len(sample["input_ids"]) for sample in samples])
        batch = {
            key: _pad_rows([sample[key] for sample in samples], length, value)
            for key, value in (
                ("input_ids", self.pad_token_id),
                ("attention_mask", 0),
                ("token_type_ids", 0),
            )
        }
        pixels = _present(samples, "pixel_values")
        if pixels:
            batch["pixel_values"] = _join(pixels)
        return {**batch, **_actions(samples), **_history(samples, length)}

    def padded_length(self, lengths: Sequence[int]) -> int:
        """Length of the rows of a batch.

        Raises:
            DataError: a prompt is longer than ``max_length``.
        """
        longest = max(lengths)
        if longest > self.max_length:
            raise DataError(
                f"a prompt has {longest} tokens, the limit is {self.max_length}; raise "
                "--trainer-config.model-max-length"
            )
        step = self.pad_to_multiple_of
        return min(-(-longest // step) * step, self.max_length)


def _present(samples: Sequence[Sample], key: str) -> list[Any]:
    return [sample[key] for sample in samples if sample.get(key) is not None]


def as_float(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels as the model sees them: bytes scaled to [-1, 1], float32."""
    return scale_bytes(pixels) if pixels.dtype == torch.uint8 else pixels.float()


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts along their first axis, ``[sum, 3, H, W]``: uint8 if all are, otherwise float32.

    Bytes have their channels last in memory, and keep them there, which makes the copy a plain one.
    """
    if any(part.dtype != torch.uint8 for part in parts):
        parts = [as_float(part) for part in parts]
    if len({part.shape for part in parts}) > 1:
        return torch.cat(list(parts))
    # torch's own collation writes into shared memory in a worker, which saves a copy on the way out
    rows = default_collate([part.permute(0, 2, 3, 1) for part in parts])
    return rows.flatten(0, 1).permute(0, 3, 1, 2)


def _pad_rows(rows: Sequence[torch.Tensor], length: int, value: int) -> torch.Tensor:
    padded = torch.full((len(rows), length), value, dtype=torch.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def _actions(samples: Sequence[Sample]) -> Batch:
    actions, masks = _present(samples, "action"), _present(samples, "action_mask")
    if not actions:
        return {}
    shapes = {tuple(np.shape(array)) for array in (*actions, *masks)}
    if len(actions) != len(samples) or len(masks) != len(samples) or len(shapes) != 1:
        raise DataError(
            f"{len(samples)} samples with {len(actions)} actions and {len(masks)} masks of shapes "
            f"{sorted(shapes)}; every sample of a batch needs both, of one shape"
        )
    return {
        "action": torch.cat([torch.as_tensor(action) for action in actions]).float(),
        "action_mask": torch.cat([torch.as_tensor(mask) for mask in masks]).bool(),
    }


def _history(samples: Sequence[Sample], length: int) -> Batch:
    if not _present(samples, "history_mask"):
        return {}
    empty = torch.zeros(0, dtype=torch.bool)
    masks = [empty if (m := sample.get("history_mask")) is None else m for sample in samples]
    batch = {"history_mask": _pad_rows(masks, length, 0).bool()}
    pixels = _present(samples, "history_pixel_values")
    if pixels:
        batch["history_pixel_values"] = _join(pixels)
    return batch


class NormStatsCollator:
    """Group states and action chunks by robot type, for callers that count statistics in batches.

    Returns ``{"robot_batches": {robot type or None: {"state": [n, D], "action": [n, H, D]}}}``.
    """

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The groups.

        Raises:
            DataError: a sample has no action.
        """
        groups: dict[str | None, list[Sample]] = defaultdict(list)
        for sample in samples:
            if sample.get("action") is None:
                raise DataError("a sample without action; statistics need it in every sample")
            groups[robot_name(sample["meta_data"].get("robot_type"))].append(sample)
        return {
            "robot_batches": {
                robot: {
                    "state": np.stack([sample["state"] for sample in group]),
                    "action": np.concatenate([sample["action"] for sample in group]),
                }
                for robot, group in groups.items()
            }
        }
