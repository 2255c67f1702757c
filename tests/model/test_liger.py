"""Fused kernels change neither numbers nor names, and are left out where they cannot run."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F

from opendm.model.dm05 import liger
from opendm.model.dm05.config import DM05ModelConfig
from opendm.model.dm05.liger import Kernels, fuse, reason_against, use_liger_kernels
from opendm.model.dm05.rotary import rotate

PER_LAYER_NORMS = 4 + 2  # of a Gemma 3 layer, and of its queries and keys
LAYERS = 4


def plain_kernels(calls):
    """The formulas in plain torch, counting their calls."""

    def counted(name, function):
        def run(*args):
            calls[name] = calls.get(name, 0) + 1
            return function(*args)

        return run

    return Kernels(
        rms_norm=counted("rms_norm", lambda x, w, eps: F.rms_norm(x, w.shape, 1.0 + w, eps)),
        geglu=counted("geglu", lambda gate, up: F.gelu(gate, approximate="tanh") * up),
        layer_norm=counted("layer_norm", lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps)),
        rotate=counted("rotate", rotate),
    )


def loss_and_gradients(model, batch, draw):
    loss = model(**batch, **draw).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_fused_model_has_the_same_loss_and_gradients(model, batch, draw):
    calls = {}
    fused = copy.deepcopy(model)
    fuse(fused, plain_kernels(calls))
    loss, gradients = loss_and_gradients(model, batch, draw)
    fused_loss, fused_gradients = loss_and_gradients(fused, batch, draw)
    assert fused_loss == pytest.approx(loss, rel=1e-6)
    assert gradients.keys() == fused_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    # the last VLM layer stops at its keys; the norms that AdaRMS replaces are not called
    assert calls == {
        "rms_norm": 1 + (LAYERS - 1) * PER_LAYER_NORMS + 2 + LAYERS * (PER_LAYER_NORMS - 2),
        "geglu": 2 * LAYERS - 1,
        "layer_norm": 2 * LAYERS + 1,
        "rotate": 2 * LAYERS,
    }


def test_fused_model_holds_the_same_parameters_under_the_same_names(model):
    before, mode = dict(model.named_parameters()), [m.training for m in model.modules()]
    counts = fuse(model, plain_kernels({}))
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert [m.training for m in model.modules() if list(m.parameters())].count(True) == sum(mode)
    assert counts == {
        "FusedLayerNorm": 2 * LAYERS + 1,
        "FusedRMSNorm": 2 * (LAYERS * PER_LAYER_NORMS + 1) + 1,
        "FusedGeGLU": 2 * LAYERS,
        "rotary embeddings": 2 * LAYERS,
    }


def test_another_activation_is_not_fused(model):
    for layer in model.model.action_expert.layers:
        layer.mlp.config.hidden_activation = "silu"
    assert fuse(model, plain_kernels({}))["FusedGeGLU"] == LAYERS


def test_one_tensor_as_query_and_key_is_turned_once(monkeypatch):
    """A layer that needs its keys alone gives them twice, and Liger's kernel may write in place."""
    ops = pytest.importorskip("liger_kernel.ops")

    class InPlace:
        @staticmethod
        def apply(query, key, cos, sin):
            for states in (query, key):
                states.copy_(rotate(states, states, cos, sin)[0])
            return query, key

    monkeypatch.setattr(ops, "LigerRopeFunction", InPlace)
    key, angles = torch.randn(2, 1, 3, 8), torch.randn(2, 3, 4).repeat(1, 1, 2)
    expected = rotate(key, key, angles.cos(), angles.sin())[1]
    found = liger.liger_kernels().rotate(key, key, angles.cos(), angles.sin())[1]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("device", "package", "reason"),
    [
        ("cpu", "liger_kernel", "they need a CUDA device"),
        ("mps", "liger_kernel", "they need a CUDA device"),
        ("cuda", "no_such_package", "they need the package liger-kernel"),
        ("cuda", "torch", None),
    ],
)
def test_why_the_kernels_are_left_out(device, package, reason, monkeypatch):
    monkeypatch.setattr(liger, "PACKAGE", package)
    assert reason_against(device) == reason


@pytest.mark.parametrize(("named", "level"), [(True, "WARNING"), (False, "INFO")])
def test_elsewhere_one_line_says_why_and_nothing_changes(model, named, level, caplog):
    caplog.set_level(logging.INFO)
    before = [type(module) for module in model.modules()]
    assert not use_liger_kernels(model, "cpu", named=named)
    assert [type(module) for module in model.modules()] == before
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [(
        level,
        "Liger kernels are not used: they need a CUDA device; the same is computed by plain torch",
    )]  # fmt: skip


@pytest.mark.parametrize("wanted", [True, False])
def test_the_flag_reaches_the_model(tiny_checkpoint, wanted, monkeypatch):
    asked = []
    monkeypatch.setattr(liger, "use_liger_kernels", lambda *args, **options: asked.append(args[1]))
    DM05ModelConfig(model_name_or_path=str(tiny_checkpoint), liger_kernel=wanted).build_model()
    assert asked == (["cuda" if torch.cuda.is_available() else "cpu"] if wanted else [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("policy", "autocast", "tolerance"),
    [("fp32_mixed", False, 1e-5), ("fp32_mixed", True, 2e-2), ("bf16_mixed", True, 2e-2)],
)
def test_results_with_and_without_agree_on_cuda(model, batch, draw, policy, autocast, tolerance):
    model.set_precision_policy(policy)
    model.set_attention_implementation(
        llm_attn_implementation="sdpa",
        vision_attn_implementation="sdpa",
        action_attn_implementation="sdpa",
        bf16=True,
    )
    found = []
    for use in (False, True):
        copied = copy.deepcopy(model).cuda().train()
        assert use_liger_kernels(copied, "cuda", named=True) if use else True
        inputs = {name: tensor.cuda() for name, tensor in batch.items()}
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss, gradients = loss_and_gradients(copied, inputs, draw)
        found.append((loss, torch.cat([g.flatten().float() for g in gradients.values()])))
    (loss, gradient), (fused_loss, fused_gradient) = found
    difference = (fused_gradient - gradient).norm() / gradient.norm()
    print(f"Liger, {policy}, autocast {autocast}: gradient off by {difference:.1e}")
    assert fused_loss == pytest.approx(loss, rel=tolerance)
    assert difference < tolerance
