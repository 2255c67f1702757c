"""Random states come back as they were, through strict JSON."""

import json
import random

import numpy as np
import pytest
import torch

from opendm.trainer.random_states import capture_random_states, restore_random_states


def draw():
    """Odd numbers of normals leave one cached in Python's and numpy's generators."""
    return (
        random.random(), random.gauss(), np.random.rand(3).tolist(), np.random.standard_normal(),
        torch.randn(5).tolist(),
    )  # fmt: skip


@pytest.mark.parametrize("num_normals", [0, 1, 2])
def test_the_next_numbers_are_the_same_after_restoring(num_normals):
    for _ in range(num_normals):
        draw()
    text = json.dumps(capture_random_states(), allow_nan=False)
    expected = [draw() for _ in range(3)]
    assert draw() not in expected
    restore_random_states(json.loads(text))
    assert [draw() for _ in range(3)] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_next_numbers_of_cuda_are_the_same_after_restoring():
    text = json.dumps(capture_random_states(), allow_nan=False)
    expected = torch.rand(4, device="cuda")
    restore_random_states(json.loads(text))
    assert torch.equal(torch.rand(4, device="cuda"), expected)
