"""A small model with random weights everywhere, one batch for it, and its numpy reference."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from reference import Reference

from opendm.model.dm05.configuration import DM05Config
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.tiny import RESERVED, TOKENS_PER_IMAGE, random_model, tiny_config

IMAGE = RESERVED.index("<image_soft_token>")
UNUSED1, CHUNK, ACTION_DIM, LENGTHS, LONGEST = 7, 5, 32, (52, 43), 55
TIMES = (0.4, 0.9)


@pytest.fixture(scope="session")
def config() -> DM05Config:
    """Expert and text model differ in width; the window is shorter than one image."""
    config = tiny_config(100, chunk_size=CHUNK, num_layers=4, hidden_size=64)
    config.action_config.hidden_size, config.action_config.intermediate_size = 48, 80
    config.vlm_config.text_config.sliding_window = 11
    config.vlm_config.text_config.query_pre_attn_scalar = 24
    config.action_config.query_pre_attn_scalar = 24
    return config


@pytest.fixture(scope="session")
def build() -> Callable[[DM05Config], DM05ForConditionalGeneration]:
    """Make a model whose every parameter matters: fresh ones hold zeros and ones."""

    def make(config: DM05Config, seed: int = 0) -> DM05ForConditionalGeneration:
        model = random_model(copy.deepcopy(config)).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                std = 0.3 if p.ndim == 1 else p[0].numel() ** -0.5
                p.copy_(torch.randn(p.shape, generator=generator) * std)
        return model

    return make


@pytest.fixture(scope="session")
def shared_model(build, config) -> DM05ForConditionalGeneration:
    return build(config)


@pytest.fixture
def model(shared_model) -> DM05ForConditionalGeneration:
    """A copy that a test may change."""
    return copy.deepcopy(shared_model)


@pytest.fixture(scope="session")
def reference(shared_model) -> Reference:
    tensors = {name: t.numpy() for name, t in shared_model.state_dict().items()}
    return Reference(tensors, shared_model.config.to_dict())


@pytest.fixture(scope="session")
def batch() -> dict[str, torch.Tensor]:
    """Two right-padded prompts with two images each; the first has unused history slots."""
    rng = np.random.default_rng(4)
    ids = rng.integers(20, 90, (2, LONGEST))
    for row, starts in enumerate(((13, 33), (3, 20))):
        for start in starts:
            ids[row, start : start + TOKENS_PER_IMAGE] = IMAGE
    ids[0, 5:9] = UNUSED1
    mask = np.arange(LONGEST) < np.array(LENGTHS)[:, None]
    ids[~mask] = 0
    action_mask = np.zeros((2, CHUNK, ACTION_DIM), dtype=bool)
    action_mask[0, :, :7] = True
    action_mask[1, :3, :14] = True  # the last two rows repeat the end of an episode
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask.astype(np.int64)),
        "token_type_ids": torch.tensor((ids == IMAGE).astype(np.int64)),
        "pixel_values": torch.tensor(rng.normal(size=(4, 3, 112, 112)), dtype=torch.float32),
        "action": torch.tensor(rng.normal(size=(2, CHUNK, ACTION_DIM)), dtype=torch.float32),
        "action_mask": torch.tensor(action_mask),
    }


@pytest.fixture(scope="session")
def draw() -> dict[str, torch.Tensor]:
    """Noise and time, so that nothing is drawn."""
    rng = np.random.default_rng(5)
    noise = torch.tensor(rng.normal(size=(2, CHUNK, ACTION_DIM)), dtype=torch.float32)
    return {"noise": noise, "time": torch.tensor(TIMES)}


@pytest.fixture(scope="session")
def prompt(batch) -> dict[str, torch.Tensor]:
    """The part of the batch that the VLM reads."""
    names = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
    return {name: batch[name] for name in names}
