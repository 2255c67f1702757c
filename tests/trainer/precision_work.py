"""One training step under a policy and an engine, and every dtype that can be seen in it."""

import tempfile
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workers import small_batch, small_model

from opendm.model.dm05.dm05_lora import DM05LoraConfig, apply_lora_to_dm05_model
from opendm.optimizer.config import DM05OptimizerConfig
from opendm.trainer.engine import Engine, autocast, clean_name

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
CASTS = {"bf16_mixed": torch.bfloat16, "fp32_mixed": torch.float32}
"""Dtype in which a policy loads weights."""


@dataclass
class Seen:
    """Dtypes of one step, by torch's names."""

    stored: set = field(default_factory=set)
    stored_frozen: set = field(default_factory=set)
    stored_idle: set = field(default_factory=set)
    """Of adapters that no loss reads."""
    buffers: set = field(default_factory=set)
    read: set = field(default_factory=set)
    """Of trained weights while a layer computes."""
    read_frozen: set = field(default_factory=set)
    """Of those that an adapter stands beside."""
    products: Counter = field(default_factory=Counter)
    """Matrix products and convolutions of the forward pass, by the dtype of their factors."""
    condition: set = field(default_factory=set)
    residual: set = field(default_factory=set)
    """Of the text model and the Action Expert."""
    vision: set = field(default_factory=set)
    """The residual stream of the vision tower."""
    angles: set = field(default_factory=set)
    gathered: set = field(default_factory=set)
    reduced: set = field(default_factory=set)
    gradients: set = field(default_factory=set)
    states: set = field(default_factory=set)
    outputs: set = field(default_factory=set)
    stored_after: set = field(default_factory=set)


class Watch(TorchDispatchMode):
    """Note the dtypes of products and of what ranks send each other."""

    def __init__(self):
        super().__init__()
        self.products = Counter()
        self.sent = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        floats = [t for t in tree_leaves((args, kwargs)) if floating(t)]
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.sent |= {(name, t.dtype) for t in floats}
        elif name in PRODUCTS or "dot_product" in name:
            self.products[floats[-1].dtype] += 1
        return func(*args, **(kwargs or {}))


def floating(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def names(dtypes):
    return sorted(str(dtype)[6:] for dtype in dtypes)


def observe_inputs(model, seen):
    """Note what reaches the layers, from inside whatever wraps them."""

    def read(module):
        seen.read |= {p.dtype for p in module.parameters() if p.requires_grad}
        seen.read_frozen |= {
            p.dtype for n, p in module.named_parameters() if n.endswith("base_layer.weight")
        }

    def expert(module, args, kwargs):
        seen.condition.add(kwargs["adarms_cond"].dtype)
        seen.residual.add(kwargs["suffix_embeds"].dtype)

    def expert_layer(module, args):
        seen.residual.add(args[0].dtype)
        read(module.self_attn)

    def text_layer(module, args):
        seen.residual.add(args[0].dtype)
        seen.angles |= {t.dtype for t in args[1]}
        read(module.mlp)

    def vision_layer(module, args):
        seen.vision.add(args[0].dtype)

    for layer in model.visual.encoder.layers:
        layer.register_forward_pre_hook(vision_layer)
    model.model.action_expert.register_forward_pre_hook(expert, with_kwargs=True)
    for layer in model.model.action_expert.layers:
        layer.register_forward_pre_hook(expert_layer)
    for layer in model.language_model.layers:
        layer.register_forward_pre_hook(text_layer)


def step(rank, world_size, engine_name, policy, lora=False):
    """Dtypes of one step of AdamW, by name."""
    model = small_model()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(CASTS[policy])
    model.set_precision_policy(policy)
    model.freeze_vlm_embedding()
    adapter = frozenset()
    if lora:
        with tempfile.TemporaryDirectory() as base:
            model.config.save_pretrained(base)
            config = DM05LoraConfig(r=4)
            adapter = apply_lora_to_dm05_model(model, config, base, base_sha256="").adapter
        adapter = adapter.names
    seen = Seen()
    observe_inputs(model, seen)
    engine = Engine(
        engine_name, torch.device("cpu"), torch.bfloat16,
        shard_in_compute_dtype=policy == "bf16_mixed", frozen_as_loaded=lora,
    )  # fmt: skip
    wrapped = engine.wrap(model.train(), model.fsdp_wrap_modules()).train()
    optimizer = DM05OptimizerConfig(optim="adamw").build_optimizer(wrapped)
    parameters = list(wrapped.parameters())
    seen.stored = {p.dtype for p in parameters if p.requires_grad}
    frozen = [(clean_name(n), p) for n, p in wrapped.named_parameters() if not p.requires_grad]
    seen.stored_frozen = {p.dtype for name, p in frozen if name not in adapter}
    seen.stored_idle = {p.dtype for name, p in frozen if name in adapter}
    seen.buffers = {b.dtype for b in wrapped.buffers() if floating(b)}
    batch = {k: v[rank::world_size] for k, v in small_batch(2 * world_size).items()}
    with Watch() as forward, autocast(engine)():
        outputs = wrapped(**batch)
    with Watch() as backward:
        outputs.loss.backward()
    seen.products = forward.products
    sent = forward.sent | backward.sent
    seen.gathered = {dtype for name, dtype in sent if "gather" in name}
    seen.reduced = {dtype for name, dtype in sent if "reduce" in name}
    seen.gradients = {p.grad.dtype for p in parameters if p.grad is not None}
    engine.clip_grad_norm(wrapped, 1.0)
    optimizer.step()
    states = tree_leaves([list(state.values()) for state in optimizer.state.values()])
    seen.states = {t.dtype for t in states if isinstance(t, torch.Tensor)}
    seen.outputs = {outputs.loss.dtype, outputs.fm_loss.dtype, outputs.per_sample_loss.dtype}
    seen.stored_after = {p.dtype for p in parameters if p.requires_grad}
    return plain(seen)


def plain(seen):
    """``seen`` as something that can be sent between processes."""
    values = {name: getattr(seen, name) for name in Seen.__dataclass_fields__}
    products = {str(dtype)[6:]: count for dtype, count in values.pop("products").items()}
    return {name: names(dtypes) for name, dtypes in values.items()} | {"products": products}


def steps(rank, world_size, cases):
    """:func:`step` of each (engine, policy)."""
    return [step(rank, world_size, *case) for case in cases]
