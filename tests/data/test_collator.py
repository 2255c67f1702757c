"""Batches: padding, shapes, types, and what is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from opendm.data.collator import NormStatsCollator, TrainingCollator
from opendm.data.transforms.prompt_encoding import scale_pixels, stack_pixels
from opendm.errors import DataError
from opendm.pixels import scale_bytes


def row(length, history=None, images=1):
    out = {
        "input_ids": torch.arange(1, length + 1),
        "attention_mask": torch.ones(length, dtype=torch.int64),
        "token_type_ids": torch.zeros(length, dtype=torch.int64),
        "pixel_values": torch.ones(2, 3, 4, 4),
        "action": np.ones((1, 5, 32), np.float64),
        "action_mask": np.ones((1, 5, 32), bool),
        "history_mask": None,
        "history_pixel_values": None,
    }
    if history is not None:
        out["history_mask"] = torch.ones(length, dtype=torch.bool)
        out["history_pixel_values"] = torch.ones(history, 3, 4, 4) if history else None
    return out


def test_rows_are_padded_on_the_right_to_a_multiple():
    batch = TrainingCollator(9)([row(5), row(18)])
    assert batch["input_ids"].shape == (2, 32)
    assert batch["input_ids"][0].tolist() == [1, 2, 3, 4, 5] + [9] * 27
    assert batch["attention_mask"].sum(1).tolist() == [5, 18]
    assert {batch[k].dtype for k in ("input_ids", "attention_mask", "token_type_ids")} == {
        torch.int64
    }
    assert batch["pixel_values"].shape == (4, 3, 4, 4)
    assert batch["action"].shape == batch["action_mask"].shape == (2, 5, 32)
    assert batch["action"].dtype == torch.float32
    assert batch["action_mask"].dtype == torch.bool
    assert "history_mask" not in batch


def test_padding_stays_below_the_limit_and_nothing_is_cut():
    assert TrainingCollator(0, 20)([row(18)])["input_ids"].shape == (1, 20)
    with pytest.raises(DataError, match="18 tokens, the limit is 17"):
        TrainingCollator(0, 17)([row(18)])


def test_bytes_of_pictures_stay_in_their_order_and_become_contiguous_floats():
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(p) for p in rng.integers(0, 256, (4, 6, 6, 3), dtype=np.uint8)]
    samples = [row(3), row(5)]
    for sample, pair in zip(samples, (pictures[:2], pictures[2:]), strict=True):
        sample["pixel_values"] = stack_pixels(pair)
    batch = TrainingCollator(0)(samples)["pixel_values"]
    assert batch.shape == (4, 3, 6, 6)
    assert batch.permute(0, 2, 3, 1).is_contiguous()
    assert torch.equal(scale_bytes(batch), scale_pixels(pictures))
    assert scale_bytes(batch).is_contiguous()


def test_pixels_are_bytes_where_all_are_and_floats_otherwise():
    made, other = row(4), row(4)
    made["pixel_values"] = torch.full((1, 3, 4, 4), 255, dtype=torch.uint8)
    other["pixel_values"] = torch.full((1, 3, 4, 4), -1.0)
    collate = TrainingCollator(0)
    assert collate([made, made])["pixel_values"].dtype == torch.uint8
    mixed = collate([made, other])["pixel_values"]
    assert mixed.dtype == torch.float32
    assert mixed[0].unique().tolist() == [1.0]
    assert mixed[1].unique().tolist() == [-1.0]


def test_history_of_some_samples():
    batch = TrainingCollator(0)([row(5), row(7, history=3), row(4, history=0)])
    assert batch["history_mask"].dtype == torch.bool
    assert batch["history_mask"].sum(1).tolist() == [0, 7, 4]
    assert batch["history_pixel_values"].shape == (3, 3, 4, 4)
    assert "history_pixel_values" not in TrainingCollator(0)([row(4, history=0)])


def test_actions_of_all_or_none():
    none = {"action": None, "action_mask": None}
    assert "action" not in TrainingCollator(0)([{**row(4), **none}])
    with pytest.raises(DataError, match="1 actions"):
        TrainingCollator(0)([row(4), {**row(4), **none}])


def test_norm_stats_collator_groups_by_robot():
    samples = [
        {"state": np.zeros(2), "action": np.zeros((1, 3, 2)), "meta_data": {"robot_type": robot}}
        for robot in ("A", None, "A")
    ]
    groups = NormStatsCollator()(samples)["robot_batches"]
    assert groups["A"]["state"].shape == (2, 2)
    assert groups["A"]["action"].shape == (2, 3, 2)
    assert groups[None]["action"].shape == (1, 3, 2)
    with pytest.raises(DataError, match="without action"):
        NormStatsCollator()([{**samples[0], "action": None}])
