"""``MuonPiece``: the part of one matrix that this rank holds, with its momentum and master."""

from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from opendm.optimizer.masters import reconcile_
from opendm.optimizer.placement import local, local_gradient
from opendm.optimizer.update_rules import apply_, commit_, direction_, muon_rate

APPLY: Final = 1.0
NON_FINITE: Final = 2.0


@dataclass(frozen=True, slots=True)
class MuonPiece:
    """One matrix of the optimizer, as far as it lies here.

    Flat arguments hold elements in the order of the whole matrix, its cut axis first.
    """

    optimizer: torch.optim.Optimizer
    param: nn.Parameter
    group_index: int
    shape: tuple[int, int]
    """Of the whole matrix."""
    dim: int
    """The axis that is cut."""

    @property
    def options(self) -> dict[str, Any]:
        """The parameter group, which loading a state replaces."""
        return self.optimizer.param_groups[self.group_index]

    @property
    def device(self) -> torch.device:
        """Where the piece lies."""
        return local(self.param).device

    def check_gradient(self) -> None:
        """Refuse a gradient of another size.

        Raises:
            ConfigError: as ``local_gradient``.
        """
        local_gradient(self.param)

    def reconcile(self) -> None:
        """Let the master follow weights that were changed from outside."""
        state = self.optimizer.state[self.param]
        if "master" in state:
            reconcile_(local(state["master"]), local(self.param.detach()))

    def write_direction(self, out: Float32[Tensor, " n"]) -> bool:
        """Write the direction of the piece; returns whether there was a gradient."""
        grad = local_gradient(self.param)
        direction_(
            self._as_piece(out),
            local(self.optimizer.state[self.param]["exp_avg"]),
            grad,
            mu=self.options["muon_momentum"],
            nesterov=self.options["muon_nesterov"],
        )
        return grad is not None

    def take(self, update: Float32[Tensor, " n"], verdict: Float32[Tensor, ""]) -> None:
        """Commit the momentum and apply ``update`` if the owner's verdict is ``APPLY``."""
        state, options, active = self.optimizer.state[self.param], self.options, verdict == APPLY
        commit_(
            local(state["exp_avg"]),
            local_gradient(self.param),
            mu=options["muon_momentum"],
            active=active,
        )
        weight = local(self.param.detach())
        target = local(state["master"]) if "master" in state else weight
        apply_(
            target,
            self._as_piece(update),
            lr=options["lr"],
            rate=muon_rate(
                options["lr"],
                lr_scale=options["muon_lr_scale"],
                moonlight_coefficient=options["muon_moonlight_coefficient"],
                shape=self.shape,
            ),
            weight_decay=options["weight_decay"],
            active=active,
        )
        if target is not weight:
            weight.copy_(target)

    def _as_piece(self, flat: Tensor) -> Tensor:
        shape = local(self.param).shape
        return flat.view(shape[::-1]).t() if self.dim else flat.view(shape)
