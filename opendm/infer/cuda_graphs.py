"""The ``fast`` backend: the whole Euler loop over the suffix as one CUDA graph per prefix length.

Launching the suffix's many small kernels takes longer than running them; a graph launches once.
The prefix, whose shapes differ with the number of pictures, runs as always and is padded with
invisible tokens to the next captured length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812

from opendm.data.collator import Batch
from opendm.errors import ConfigError
from opendm.infer.euler import integrate
from opendm.infer.policy import Policy
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.prefix import Prefix
from opendm.shapes import ActionMask, Actions

BUCKETS: Final = (576, 704, 768, 896, 1024)
WARM_UPS: Final = 3
"""Runs before a capture, so that libraries have made their workspaces; torch's own number."""

Record = Callable[[Callable[[], Actions]], tuple[Actions, Callable[[], None]]]
"""From work on fixed tensors to the tensor of its result and what fills that again."""


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    prefix: Prefix
    noise: Actions
    mask: ActionMask
    result: Actions
    replay: Callable[[], None]


class SuffixGraphs:
    """A sampler of single requests that replays recorded work; others run as always."""

    def __init__(
        self,
        model: DM05ForConditionalGeneration,
        num_steps: int,
        buckets: Sequence[int],
        record: Record,
    ) -> None:
        self.model = model
        self.num_steps = num_steps
        self.buckets = tuple(buckets)
        self.record = record
        self._captured: dict[int, _Captured] = {}

    def __call__(self, inputs: Batch, noise: Actions, mask: ActionMask, num_steps: int) -> Actions:
        """See :data:`opendm.infer.policy.Sampler`."""
        prefix = run_prefix(self.model, inputs)
        weight = self.model.model.action_in_proj.weight
        noise = noise.to(weight.device, weight.dtype)
        length = prefix.visible.shape[1]
        bucket = next((size for size in self.buckets if size >= length), None)
        if bucket is None or len(noise) > 1 or num_steps != self.num_steps:
            return integrate(self.model, prefix, noise, mask, num_steps=num_steps)
        padded = pad_prefix(prefix, bucket)
        if bucket not in self._captured:
            self._captured[bucket] = self._capture(padded, noise, mask)
        captured = self._captured[bucket]
        _copy_into(captured, padded, noise, mask)
        captured.replay()
        return captured.result.clone()

    def _capture(self, prefix: Prefix, noise: Actions, mask: ActionMask) -> _Captured:
        own = Prefix(
            keys=tuple(key.clone() for key in prefix.keys),
            values=tuple(value.clone() for value in prefix.values),
            visible=prefix.visible.clone(),
        )
        start, shown = noise.clone(), mask.clone()

        def work() -> Actions:
            with uncached_autocast(noise.device):
                return integrate(self.model, own, start, shown, num_steps=self.num_steps)

        result, replay = self.record(work)
        return _Captured(own, start, shown, result, replay)


def uncached_autocast(device: torch.device) -> torch.autocast:
    """Autocast as it is now, but for its cache of cast weights.

    The cache is emptied when sampling ends, while a graph goes on reading what it read then.
    """
    return torch.autocast(
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,
    )


def run_prefix(model: DM05ForConditionalGeneration, inputs: Batch) -> Prefix:
    """Keys and values of a batch's pictures and text."""
    return model.model.prefix(
        inputs["input_ids"],
        inputs.get("attention_mask"),
        inputs.get("token_type_ids"),
        inputs.get("pixel_values"),
        inputs.get("history_pixel_values"),
        inputs.get("history_mask"),
    )


def pad_prefix(prefix: Prefix, length: int) -> Prefix:
    """The same prefix with invisible tokens at its end, ``length`` in all."""
    extra = length - prefix.visible.shape[1]
    return Prefix(
        keys=tuple(F.pad(key, (0, 0, 0, extra)) for key in prefix.keys),
        values=tuple(F.pad(value, (0, 0, 0, extra)) for value in prefix.values),
        visible=F.pad(prefix.visible, (0, extra)),
    )


def record_cuda_graph(work: Callable[[], Actions]) -> tuple[Actions, Callable[[], None]]:
    """Capture ``work`` on the current CUDA device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return result, graph.replay


def use_cuda_graphs(policy: Policy, num_steps: int, buckets: Sequence[int]) -> None:
    """Let a policy on a GPU sample through graphs, each captured when it is first needed.

    Raises:
        ConfigError: the lengths do not rise.
    """
    if not buckets or any(b <= a for a, b in zip((0, *buckets), buckets, strict=False)):
        raise ConfigError(
            f"--inference-config.prefix-seq-len-buckets {list(buckets)} (with fast-prefix-len, if "
            "given, as the last one) must rise from 1 or more"
        )
    policy.sampler = SuffixGraphs(policy.model, num_steps, buckets, record_cuda_graph)


def _copy_into(captured: _Captured, prefix: Prefix, noise: Actions, mask: ActionMask) -> None:
    own = (*captured.prefix.keys, *captured.prefix.values, captured.prefix.visible)
    new = (*prefix.keys, *prefix.values, prefix.visible)
    for target, source in zip(own, new, strict=True):
        target.copy_(source)
    captured.noise.copy_(noise)
    captured.mask.copy_(mask)
