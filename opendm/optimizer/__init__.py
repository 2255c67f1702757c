"""Optimizers and the choice of parameters that each one gets.

The names load on first use: configurations are read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from opendm.optimizer.checkpoint import load_optimizer_state, save_optimizer_state
    from opendm.optimizer.muon_adamw import MuonAdamW
    from opendm.optimizer.newton_schulz import zeropower_via_newtonschulz5
    from opendm.optimizer.selection import (
        is_default_muon_parameter,
        is_hidden_matrix,
        mark_muon_parameters,
    )
    from opendm.optimizer.shard_plan import MuonShardPlan

__all__ = [
    "MuonAdamW",
    "MuonShardPlan",
    "is_default_muon_parameter",
    "is_hidden_matrix",
    "load_optimizer_state",
    "mark_muon_parameters",
    "save_optimizer_state",
    "zeropower_via_newtonschulz5",
]

HOMES: Final = {
    "MuonAdamW": "muon_adamw",
    "MuonShardPlan": "shard_plan",
    "is_default_muon_parameter": "selection",
    "is_hidden_matrix": "selection",
    "load_optimizer_state": "checkpoint",
    "mark_muon_parameters": "selection",
    "save_optimizer_state": "checkpoint",
    "zeropower_via_newtonschulz5": "newton_schulz",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
