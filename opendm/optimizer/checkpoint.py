"""The state of ``MuonAdamW`` in a folder, by name.

``optimizer.json`` holds the options, every parameter's whole shape, and which file has which
elements of its state. It is written last: a folder without it is not complete.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch import nn

from opendm.errors import CheckpointError
from opendm.optimizer.group_options import plain_options, restore_options
from opendm.optimizer.pieces import Piece, PieceReader, PieceWriter, on_every_rank
from opendm.optimizer.placement import is_distributed, local
from opendm.optimizer.states import check_same_names, restore_state

if TYPE_CHECKING:
    from opendm.optimizer.muon_adamw import MuonAdamW

INDEX_FILE: Final = "optimizer.json"
STEM: Final = "optimizer"
FORMAT: Final = 1


def save_optimizer_state(optimizer: "MuonAdamW", folder: str | Path) -> None:
    """Write the whole state into ``folder``. Every rank must call it.

    Raises:
        CheckpointError: a shard's position is unknown, because the optimizer never saw the model,
            or a file could not be written; on every rank.
    """
    folder = Path(folder)
    writer = PieceWriter(STEM, lambda: _pieces(optimizer))
    _on_rank_0(lambda: (folder / INDEX_FILE).unlink(missing_ok=True))
    on_every_rank(lambda: writer.write(folder))  # every file is complete before the index names it
    index = writer.index()
    for group, name, _ in _named(optimizer):
        index[name]["options"] = plain_options(group)
    _on_rank_0(lambda: _write_index(folder, {"format": FORMAT, "parameters": index}))


def load_optimizer_state(optimizer: "MuonAdamW", folder: str | Path) -> None:
    """Restore what :func:`save_optimizer_state` wrote, from any engine and number of ranks.

    Raises:
        CheckpointError: the folder is not complete, or holds another model's state.
        ConfigError: the names of parameters differ.
    """
    folder = Path(folder)
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(
            f"{folder} holds no {INDEX_FILE}; give a folder that save_optimizer_state completed"
        )
    index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    if index["format"] != FORMAT:
        raise CheckpointError(
            f"{folder / INDEX_FILE} has format {index['format']}; this version reads {FORMAT}"
        )
    saved = index["parameters"]
    check_same_names((name for _, name, _ in _named(optimizer)), saved)
    reader = PieceReader(folder, STEM, saved)
    for _, name, param in _named(optimizer):
        reader.check_shape(name, optimizer.placement(param).shape)
    for group, name, param in _named(optimizer):
        tensors = reader.read(name, optimizer.placement(param), local(param).shape)
        if tensors:
            state = {key: local(tensor) for key, tensor in optimizer.state[param].items()}
            restore_state(state, tensors, local(param.detach()))
        restore_options(group, saved[name]["options"])


def _pieces(optimizer: "MuonAdamW") -> dict[str, Piece]:
    return {
        name: Piece(optimizer.placement(param), optimizer.state[param])
        for _, name, param in _named(optimizer)
    }


def _named(optimizer: "MuonAdamW") -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            yield group, name, param


def _on_rank_0(action: Callable[[], None]) -> None:
    is_first = not is_distributed() or dist.get_rank() == 0
    on_every_rank(action if is_first else lambda: None)


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    partial = folder / f".{INDEX_FILE}.partial"
    partial.write_text(json.dumps(index) + "\n", encoding="utf-8")
    os.replace(partial, folder / INDEX_FILE)  # noqa: PTH105 - Path.replace hides that it is atomic
