"""``JsonlDataset``: one sample per frame of every episode of a folder."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from opendm.data.episodes import Episode, find_episodes, location, parse_frame, read_lines
from opendm.errors import DataError

Sample = dict[str, Any]
Transform = Callable[[Sample], Sample]

NOT_META: Final = ("jsonl_dir", "image_dir", "image_keys", "image_prompts")


class JsonlDataset:
    """Samples of a folder of JSONL episodes.

    A sample is the frame's fields, ``raw_lines`` (the episode's lines) and ``meta_data`` (the
    registration without its paths and cameras, plus ``frame_index`` and ``episode_path``), put
    through ``transforms``.

    Args:
        jsonl_dir: folder of the episodes.
        transforms: takes and returns a sample; None leaves it as it is.
        dataset_name: name for messages.
        dataset_meta: the registration's fields.
        episodes: of the folder, those to sample; None takes all.
    """

    def __init__(
        self,
        jsonl_dir: str,
        transforms: Transform | None = None,
        dataset_name: str | None = None,
        dataset_meta: Mapping[str, Any] | None = None,
        episodes: Sequence[Episode] | None = None,
    ) -> None:
        self.jsonl_dir = jsonl_dir
        self.transforms = transforms
        self.dataset_name = dataset_name or jsonl_dir
        meta = {} if dataset_meta is None else dataset_meta
        self.meta_data = {key: value for key, value in meta.items() if key not in NOT_META}
        self.episodes = find_episodes(jsonl_dir) if episodes is None else episodes
        self._ends = list(accumulate(episode.num_samples for episode in self.episodes))

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """Episode number and frame index of a sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of dataset {self.dataset_name!r} with {len(self)}")
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def __getitem__(self, index: int) -> Sample:
        number, frame_index = self.locate(index)
        path = self.episodes[number].path
        lines = read_lines(str(path))
        sample = parse_frame(lines[frame_index], path, frame_index)
        sample["raw_lines"] = lines
        sample["meta_data"] = {
            **self.meta_data,
            "frame_index": frame_index,
            "episode_path": str(path),
        }
        if self.transforms is None:
            return sample
        try:
            return self.transforms(sample)
        except DataError as error:
            if str(error).startswith(f"{path}:"):
                raise  # a later frame of the chunk, named already
            raise DataError(f"{location(path, frame_index)}: {error}") from error
