"""``JsonlDataset``: one sample per frame of every episode of a folder."""

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from opendm.data.formats import open_source
from opendm.data.selection import numbers_in_index, usable_episodes
from opendm.data.source import Source
from opendm.errors import DataError, PictureError

Sample = dict[str, Any]
Transform = Callable[[Sample], Sample]

NOT_META: Final = (
    "jsonl_dir", "image_dir", "image_keys", "image_prompts", "columns", "action_mode", "episodes",
)  # fmt: skip

BAD_PICTURES: Final = "bad_pictures"
"""Field of a sample that was drawn in place of others: file and error of each of these."""
MAX_BAD_IN_A_ROW: Final = 32
"""Samples with bad pictures after which a run ends: with half of all bad, one draw in 4e9."""

PICTURE_ADVICE: Final = (
    ". opendm check names all such pictures before a run; correct them, or let other samples be "
    "drawn in their place by --data-config.bad-records skip"
)


class JsonlDataset:
    """Samples of a folder of episodes, in any of the formats that are read.

    A sample is the frame's fields, ``raw_lines`` (the episode's lines, each read when it is asked
    for) and ``meta_data`` (the registration without its paths and cameras, plus ``frame_index`` and
    ``episode_path``), put through ``transforms``. Its cost does not depend on the episode's length.

    Args:
        jsonl_dir: folder of the episodes.
        transforms: takes and returns a sample; None leaves it as it is.
        dataset_name: name for messages.
        dataset_meta: the registration's fields.
        source: the folder, where it is open already.
        episodes: numbers in the source's index; None takes those of the registration, or all.
        replaces_bad_pictures: draw another sample where a picture cannot be read.

    Raises:
        ConfigError: there is no episode of a given number.
        DataError: the folder is missing, a record is bad, or there is no frame to train on.
    """

    def __init__(
        self,
        jsonl_dir: str,
        transforms: Transform | None = None,
        dataset_name: str | None = None,
        dataset_meta: Mapping[str, Any] | None = None,
        *,
        source: Source | None = None,
        episodes: Sequence[int] | None = None,
        replaces_bad_pictures: bool = False,
    ) -> None:
        self.jsonl_dir = jsonl_dir
        self.transforms = transforms
        self.dataset_name = dataset_name or jsonl_dir
        self.replaces_bad_pictures = replaces_bad_pictures
        meta = {} if dataset_meta is None else dataset_meta
        self.meta_data = {key: value for key, value in meta.items() if key not in NOT_META}
        if source is None:
            source = open_source(jsonl_dir, columns=meta.get("columns"))
        if episodes is None and meta.get("episodes") is not None:
            episodes = numbers_in_index(source, meta["episodes"])
        self.source = source
        self.episodes = usable_episodes(source, episodes)
        self._ends = list(accumulate(episode.num_samples for episode in self.episodes))

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Place in ``episodes`` and frame index of a sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of dataset {self.dataset_name!r} with {len(self)}")
        place = bisect_right(self._ends, index)
        return place, index - (self._ends[place - 1] if place else 0)

    def __getitem__(self, index: int) -> Sample:
        if not self.replaces_bad_pictures:
            return self._sample(index)
        try:
            return self._sample(index)
        except PictureError as error:
            return self._replacement(index, error)

    def _replacement(self, index: int, error: PictureError) -> Sample:
        """Another sample, which follows from the index and torch's seed alone.

        A run sets that seed for every draw, so that neither workers, ranks nor resuming matter.
        """
        import torch

        draws = random.Random(f"{torch.initial_seed()}/{index}")
        bad = [(error.file, str(error))]
        while len(bad) < MAX_BAD_IN_A_ROW:
            try:
                sample = self._sample(draws.randrange(len(self)))
            except PictureError as another:
                bad.append((another.file, str(another)))
            else:
                return {**sample, BAD_PICTURES: bad}
        raise DataError(
            f"dataset {self.dataset_name!r}: {len(bad)} samples in a row, drawn at random, have "
            f"pictures that cannot be read; the last: {bad[-1][1]}. So many are not replaced: "
            "opendm check names them all; correct image_dir or the files, or leave their episodes "
            "out"
        )

    def _sample(self, index: int) -> Sample:
        place, frame_index = self.locate(index)
        episode = self.episodes[place]
        sample = self.source.record(episode.number, frame_index)
        sample["raw_lines"] = self.source.frames(episode.number)
        sample["meta_data"] = {
            **self.meta_data,
            "frame_index": frame_index,
            "episode_path": str(episode.path),
        }
        if self.transforms is None:
            return sample
        try:
            return self.transforms(sample)
        except PictureError as error:
            where = self.source.location(episode.number, frame_index)
            advice = "" if self.replaces_bad_pictures else PICTURE_ADVICE
            raise PictureError(f"{where}: {error}{advice}", error.file) from error
        except DataError as error:
            if str(error).startswith(f"{episode.path}"):
                raise  # names the file already
            where = self.source.location(episode.number, frame_index)
            raise DataError(f"{where}: {error}") from error
