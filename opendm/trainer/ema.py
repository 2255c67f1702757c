"""A moving average of the trainable weights, kept in pieces as the weights are.

After each step ``average <- decay * average + (1 - decay) * weight`` (exponential form of the
averaging of Polyak and Juditsky 1992, doi:10.1137/0330046; used for sampling from diffusion models
by Ho et al. 2020, arXiv:2006.11239, section B). It starts at the weights that it is given, so that
no correction of its first steps is needed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from opendm.errors import EngineError
from opendm.optimizer.placement import local


class Ema:
    """The average, on the device of the weights; nothing is gathered.

    Args:
        parameters: the trainable parameters of the wrapped model by name, as the optimizer gets
            them; float32.
        decay: share of the old average in the new one, per optimizer step.
    """

    @torch.no_grad()
    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self._parameters = dict(parameters)
        self.tensors: dict[str, Tensor] = {
            name: local(parameter).clone() for name, parameter in self._parameters.items()
        }
        """This rank's pieces by name: what a checkpoint holds, and where a resume puts it."""

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of a finished optimizer step in; a skipped step is none."""
        pieces = self._pieces()
        averages = [average for average, _ in pieces if average.numel()]
        weights = [weight for _, weight in pieces if weight.numel()]
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model has the averages inside and its own weights, bit for bit, afterwards.

        They change places tensor by tensor, so at most one more tensor is in memory. Inside,
        ``tensors`` are the weights of training: write no state for a resume there.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, weight in self._pieces():
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _pieces(self) -> list[tuple[Tensor, Tensor]]:
        """Average and weight of each parameter.

        Raises:
            EngineError: a parameter is gathered, where a copy would not reach the stored piece.
        """
        pieces = []
        for name, parameter in self._parameters.items():
            average, weight = self.tensors[name], local(parameter.detach())
            if average.shape != weight.shape:
                raise EngineError(
                    f"the average of {name} has shape {tuple(average.shape)} and its weight "
                    f"{tuple(weight.shape)}; free gathered weights first"
                )
            pieces.append((average, weight))
        return pieces
