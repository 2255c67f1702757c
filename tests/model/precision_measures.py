"""What a precision policy costs: error of the velocity, and weights that a small step cannot move.

The reference is the network in numpy and float64 (``reference.py``), with the checkpoint's float32
weights; so the rounding of weights to bfloat16 counts as error, too.
"""

import contextlib
import copy
from dataclasses import dataclass

import numpy as np
import torch
from reference import Reference

from opendm.model.dm05.precision import dm05_autocast
from opendm.optimizer.config import DM05OptimizerConfig
from opendm.trainer.materialize import materialize

CPU = torch.device("cpu")
PROMPT = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")


@dataclass(frozen=True)
class Case:
    """How weights are loaded and kept, and what surrounds the computation."""

    policy: str
    load: torch.dtype
    store: torch.dtype
    autocast: bool

    def model(self, checkpoint):
        """``checkpoint`` (a float32 model) under this case."""
        model = copy.deepcopy(checkpoint)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.load).to(self.store)
        model.set_precision_policy(self.policy)
        return model

    def context(self):
        return dm05_autocast(CPU) if self.autocast else contextlib.nullcontext()


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
CASES = {
    "float32 throughout": Case("bf16_mixed", FLOAT32, FLOAT32, autocast=False),
    "fp32_mixed": Case("fp32_mixed", FLOAT32, FLOAT32, autocast=True),
    "bf16_mixed, float32 weights (one process, DDP)": Case(
        "bf16_mixed", BFLOAT16, FLOAT32, autocast=True
    ),
    "bf16_mixed, bfloat16 weights (gathered by FSDP)": Case(
        "bf16_mixed", BFLOAT16, BFLOAT16, autocast=True
    ),
    "bf16_mixed, bfloat16 weights, no autocast (policy)": Case(
        "bf16_mixed", BFLOAT16, BFLOAT16, autocast=False
    ),
}


def velocity(model, prompt, x_t, time):
    """The field at ``x_t``, as an array of float64."""
    with torch.no_grad():
        found = model.model.velocity(x_t, time, model.model.prefix(*prompt.values()))
    assert found.dtype == torch.float32
    return found.double().numpy()


def velocity_errors(checkpoint, prompt, x_t, time):
    """Relative error (of root mean squares) of each case against float64."""
    tensors = {name: tensor.numpy() for name, tensor in checkpoint.state_dict().items()}
    reference = Reference(tensors, checkpoint.config.to_dict())
    arrays = {name: tensor.numpy() for name, tensor in prompt.items()}
    expected = reference.velocity(
        x_t.numpy(),
        time.numpy(),
        reference.prefix(*arrays.values()),
        arrays["input_ids"],
        arrays["attention_mask"],
    )
    errors = {}
    for name, case in CASES.items():
        with case.context():
            found = velocity(case.model(checkpoint), prompt, x_t, time)
        errors[name] = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return errors


def unmoved(model, batch, *, lr, autocast):
    """Fraction of the weights with a gradient that one step of AdamW leaves as they are."""
    with dm05_autocast(CPU) if autocast else contextlib.nullcontext():
        loss = model(**batch).loss
    loss.backward()
    optimizer = DM05OptimizerConfig(optim="adamw", base_lr=lr).build_optimizer(model)
    with_gradient = [p for p in model.parameters() if p.grad is not None]
    before = [p.detach().clone() for p in with_gradient]
    optimizer.step()
    still = sum(
        int(((p == old) & (p.grad != 0)).sum())
        for p, old in zip(with_gradient, before, strict=True)
    )
    return still / sum(int((p.grad != 0).sum()) for p in with_gradient)


def unmoved_by_storage(checkpoint, batch, lr):
    """:func:`unmoved` for weights in bfloat16, and under each policy as an engine stores them."""
    fractions = {}
    stored = CASES["bf16_mixed, bfloat16 weights (gathered by FSDP)"].model(checkpoint)
    fractions["bfloat16, no float32 copy"] = unmoved(stored, batch, lr=lr, autocast=True)
    for policy, load in (("bf16_mixed", BFLOAT16), ("fp32_mixed", FLOAT32)):
        model = Case(policy, load, load, autocast=True).model(checkpoint)
        materialize(model.modules(), torch.device("cpu"), frozen_too=False)
        fractions[f"{policy}, as every engine stores it"] = unmoved(
            model, batch, lr=lr, autocast=True
        )
    return fractions
