"""Which episodes are held out of training."""

import hashlib
from collections.abc import Sequence
from typing import Literal

from opendm.data.selection import Episode
from opendm.errors import ConfigError

Split = Literal["train", "val"]


def select_split(
    episodes: Sequence[Episode], jsonl_dir: str, num_held_out: int, split: Split
) -> list[Episode]:
    """The episodes of one split, in the order in which they are given.

    An episode is held out by a hash of its name (its path below ``jsonl_dir``): every run holds out
    the same ones, whatever its seed, and adding an episode exchanges at most one of them.

    Raises:
        ConfigError: the split has no episode.
    """
    if split == "val" and num_held_out == 0:
        raise ConfigError(
            "--data-config.val-episodes is 0, and validation needs held-out episodes; give 1 or "
            "more, or --trainer-config.eval-steps 0"
        )
    if num_held_out >= len(episodes):
        raise ConfigError(
            f"--data-config.val-episodes {num_held_out} leaves no episode to train on: {jsonl_dir} "
            f"has {len(episodes)}; give at most {len(episodes) - 1}"
        )
    ranked = sorted(episodes, key=_order)
    chosen = {episode.name for episode in ranked[:num_held_out]}
    return [episode for episode in episodes if (episode.name in chosen) == (split == "val")]


def _order(episode: Episode) -> bytes:
    return hashlib.sha256(f"held out/{episode.name}".encode()).digest()
