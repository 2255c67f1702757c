"""Attention backends and the rule that picks one."""

import importlib.util
import logging

import pytest
import torch

from opendm.errors import ConfigError
from opendm.model.dm05.attention import ATTENTION, Machine, mask_for, repeat_heads, resolve_backend

CPU_TRAINING = Machine(device="cpu", training=True, half_precision=True)
CPU_EVAL = Machine(device="cpu", training=False, half_precision=True)
CUDA = Machine(device="cuda", training=True, half_precision=True)
CUDA_FP32 = Machine(device="cuda", training=True, half_precision=False)

TABLE = [
    ("llm", "auto", CPU_TRAINING, "sdpa"),
    ("llm", "auto", CPU_EVAL, "sdpa"),
    ("llm", "auto", CUDA, "flex_attention"),
    ("llm", "eager", CPU_TRAINING, "eager"),
    ("llm", "sdpa", CUDA, "sdpa"),
    ("llm", "flex_attention", CPU_TRAINING, "sdpa"),
    ("llm", "flex_attention", CPU_EVAL, "flex_attention"),
    ("action", "auto", CPU_TRAINING, "sdpa"),
    ("action", "auto", CUDA_FP32, "flex_attention"),
    ("action", "flex_attention", CPU_TRAINING, "sdpa"),
    ("action", "flex_attention", CUDA, "flex_attention"),
    ("vision", "auto", CPU_TRAINING, "sdpa"),
    ("vision", "auto", CUDA, "flash_attention_2"),
    ("vision", "auto", CUDA_FP32, "sdpa"),
    ("vision", "eager", CUDA, "eager"),
    ("vision", "flash_attention_2", CPU_EVAL, "sdpa"),
    ("vision", "flash_attention_2", CUDA, "flash_attention_2"),
    ("vision", "flash_attention_2", CUDA_FP32, "sdpa"),
]


@pytest.fixture
def flash_attn(monkeypatch):
    """Pretend that flash-attn is installed, or not."""

    def pretend(*, installed: bool) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if installed else None)

    return pretend


@pytest.mark.parametrize(("site", "wanted", "machine", "expected"), TABLE)
def test_backend_of_each_site(flash_attn, site, wanted, machine, expected):
    flash_attn(installed=True)
    assert resolve_backend(site, wanted, machine, named=False) == expected


@pytest.mark.parametrize("wanted", ["auto", "flash_attention_2"])
def test_vision_uses_sdpa_where_flash_attn_is_not_installed(flash_attn, wanted):
    flash_attn(installed=False)
    assert resolve_backend("vision", wanted, CUDA, named=False) == "sdpa"


@pytest.mark.parametrize(
    ("site", "wanted", "named", "warnings"),
    [
        ("llm", "flex_attention", True, 1),
        ("llm", "flex_attention", False, 0),
        ("vision", "flash_attention_2", True, 1),
        ("vision", "auto", True, 0),
        ("llm", "auto", True, 0),
        ("llm", "sdpa", True, 0),
    ],
)
def test_fallback_warns_once_and_only_about_a_named_backend(caplog, site, wanted, named, warnings):
    with caplog.at_level(logging.WARNING):
        assert resolve_backend(site, wanted, CPU_TRAINING, named=named) == "sdpa"
    assert len(caplog.records) == warnings
    for record in caplog.records:
        assert wanted in record.getMessage()


@pytest.mark.parametrize(
    ("site", "wanted"),
    [("llm", "flash_attention_2"), ("vision", "flex_attention"), ("action", "xformers")],
)
def test_unknown_backend_is_refused_with_the_allowed_ones(site, wanted):
    with pytest.raises(ConfigError, match=f"{site}-attn-implementation '{wanted}'.*eager, sdpa"):
        resolve_backend(site, wanted, CUDA, named=True)


@pytest.fixture
def states():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 6, 32, generator=generator)
    key, value = torch.randn(2, 2, 2, 9, 32, generator=generator)
    visible = torch.rand(2, 1, 6, 9, generator=generator) < 0.6
    visible[..., 0] = True
    return query, key, value, visible


@pytest.mark.parametrize("backend", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("rows", [1, 6])
def test_backends_agree_with_eager(states, backend, rows):
    query, key, value, visible = states
    visible = visible[:, :, :rows]
    with torch.no_grad():
        expected = ATTENTION["eager"](query, key, value, visible, 0.2)
        mask = mask_for(backend, visible, 6)
        torch.testing.assert_close(ATTENTION[backend](query, key, value, mask, 0.2), expected)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_hidden_keys_have_no_influence(states, backend):
    query, key, value, visible = states
    visible[..., 4] = False
    expected = ATTENTION[backend](query, key, value, visible, 0.2)
    key[:, :, 4], value[:, :, 4] = 50.0, 50.0
    assert torch.equal(ATTENTION[backend](query, key, value, visible, 0.2), expected)


def test_consecutive_query_heads_share_a_key_head():
    heads = torch.arange(2.0).reshape(1, 2, 1, 1)
    assert repeat_heads(heads, 4).flatten().tolist() == [0.0, 0.0, 1.0, 1.0]
