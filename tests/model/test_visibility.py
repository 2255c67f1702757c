"""Which tokens exist, who sees whom, and positions."""

import numpy as np
import pytest
import reference
import torch

from opendm.model.dm05.visibility import (
    MASKED,
    additive,
    image_blocks,
    make_suffix_attn_mask,
    mask_history_pad_tokens_in_attention,
    prefix_positions,
    prefix_visibility,
    suffix_positions,
    suffix_visibility,
    visible_tokens,
)

IDS = torch.tensor([[2, 20, 7, 7, 21, 0], [2, 22, 23, 7, 24, 25]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
SEEN = [[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 1, 1]]


def test_unused_history_and_padding_are_not_visible():
    assert visible_tokens(IDS, MASK, 0).int().tolist() == SEEN


def test_padding_is_found_by_its_id_without_a_mask():
    assert visible_tokens(IDS, None, 0).int().tolist() == SEEN
    assert visible_tokens(IDS, None, 25).int().tolist() == [
        [1, 1, 0, 0, 1, 1],
        [1, 1, 1, 0, 1, 0],
    ]


def test_the_mask_decides_whatever_id_a_token_has():
    """A visible token may have the id of padding."""
    assert visible_tokens(torch.tensor([[0, 5]]), torch.tensor([[1, 0]]), 0).tolist() == [
        [True, False]
    ]


def test_history_masking_leaves_its_argument_alone():
    mask = MASK.clone()
    assert mask_history_pad_tokens_in_attention(IDS, mask).tolist() == SEEN
    assert torch.equal(mask, MASK)


def test_positions_count_visible_tokens_and_go_on_in_the_suffix():
    visible = torch.tensor(SEEN).bool()
    assert prefix_positions(visible).tolist() == [[0, 1, 1, 1, 2, 2], [0, 1, 2, 2, 3, 4]]
    assert suffix_positions(visible, 2).tolist() == [[3, 4], [5, 6]]


def test_positions_never_fall_below_zero():
    assert prefix_positions(torch.tensor([[False, False, True]])).tolist() == [[0, 0, 0]]


def test_each_run_of_image_tokens_is_one_block():
    types = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]])
    like = torch.ones(2, 5, dtype=torch.bool)
    assert image_blocks(types, like).tolist() == [[-1, 0, 0, -1, 1], [0, 0, -1, -1, -1]]
    assert image_blocks(None, like).tolist() == [[-1] * 5] * 2


@pytest.mark.parametrize("window", [None, 2, 5])
def test_prefix_visibility_is_the_reference(window):
    rng = np.random.default_rng(0)
    visible = rng.random((4, 20)) < 0.8
    types = np.repeat(rng.random((4, 5)) < 0.5, 4, axis=1).astype(np.int64)
    blocks = image_blocks(torch.tensor(types), torch.tensor(visible))
    ours = prefix_visibility(torch.tensor(visible), blocks, window)
    theirs = reference.prefix_visibility(visible, reference.image_blocks(types), window)
    assert np.array_equal(ours[:, 0].numpy(), theirs)


def test_suffix_sees_the_visible_prefix_and_itself():
    seen = suffix_visibility(torch.tensor(SEEN).bool(), 2)
    assert seen.shape == (2, 1, 1, 8)
    assert seen[:, 0, 0].int().tolist() == [[*row, 1, 1] for row in SEEN]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_additive_mask_is_zero_where_seen_and_finite(dtype):
    mask = additive(torch.tensor([[True, False]]), dtype)
    assert mask.dtype == dtype
    assert mask[0, 0] == 0
    assert torch.isfinite(mask).all()
    assert mask[0, 1] <= -6e4


def test_public_suffix_mask_hides_padding_and_named_ids():
    mask = make_suffix_attn_mask(
        IDS, 6, 2, 2, torch.device("cpu"), torch.float32, invisible_prefix_token_ids=(7,)
    )
    assert mask.shape == (2, 1, 2, 8)
    assert mask.unique().tolist() == [pytest.approx(MASKED), 0.0]
    assert (mask[:, 0, 1] == 0).int().tolist() == [[*row, 1, 1] for row in SEEN]
