"""Random states of a process as values that JSON knows: Python, numpy, torch on CPU and CUDA."""

import random
from typing import Any

import numpy as np
import torch


def capture_random_states() -> dict[str, Any]:
    """The states of all generators that this process uses by default."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - what others draw from
    states = {
        "python": [version, list(words), gauss],
        "numpy": {**numpy_state, "state": _plain_numpy(numpy_state["state"])},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """The inverse of :func:`capture_random_states`; CUDA's is left alone if it is missing."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    saved = states["numpy"]
    key = np.array(saved["state"]["key"], dtype=np.uint32)
    np.random.set_state({**saved, "state": {**saved["state"], "key": key}})  # noqa: NPY002
    torch.set_rng_state(_bytes(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(states["cuda"]))


def _plain_numpy(state: dict[str, Any]) -> dict[str, Any]:
    return {"key": state["key"].tolist(), "pos": int(state["pos"])}


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
