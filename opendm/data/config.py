"""``--data-config.*``: which data is trained on, and everything that is built from it.

Importing this module imports no framework; methods do when they are called.
"""

import copy
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from opendm.constants.robot import ActionMode
from opendm.data.dataset import JsonlDataset, Transform
from opendm.data.formats import dataset_info, open_source, with_folders
from opendm.data.mixture import Mixture
from opendm.data.mixture_weights import MIXTURE_BY, mix, parse_entries
from opendm.data.norm_stats_job import norm_stats_name, robot_name, text_digest
from opendm.data.normalize import NormStatsFile
from opendm.data.part_checks import check_action_mode, check_modes, check_shared_files
from opendm.data.selection import Selection, numbers_in_index, usable_episodes
from opendm.data.stat_file import ensure_statistics, given_statistics, read_statistics
from opendm.data.stat_origin import statistics_origin
from opendm.data.val_split import Split, select_split
from opendm.dataset.register import is_registered
from opendm.errors import ConfigError, DataError
from opendm.flags import choice_flag, enum_flag

if TYPE_CHECKING:
    from opendm.data.augmentations import TransformPipeline
    from opendm.data.collator import TrainingCollator
    from opendm.data.transforms import BuildAction, Pipeline


@dataclass
class DM05DataConfig:
    """The dataset and how its samples are made."""

    dataset_name: str = "demo"
    """Registered name, folder (OpenDM JSONL or LeRobot) or Hub id (org/name) of the dataset."""
    datasets: list[str] = field(default_factory=list)
    """Train on several datasets instead of dataset-name: NAME or NAME=WEIGHT for each."""
    mixture_by: Annotated[str, choice_flag(*MIXTURE_BY)] = "frames"
    """What datasets without weights are drawn by; tasks also balances those of one dataset."""
    jsonl_dir: str | None = None
    """Folder of the episodes, instead of the registered one."""
    image_dir: str | None = None
    """Folder that image paths are relative to, instead of the registered one."""
    n_bins: int = 256
    """Bins of a state value in the prompt."""
    action_mode: Annotated[ActionMode, enum_flag(ActionMode)] = ActionMode.RELATIVE
    """Whether actions are learnt as differences to the state or as they are."""
    compute_norm_stats_max_batches: int | None = None
    """Count at most this many batches of 128 samples for the statistics."""
    norm_stats_root: str = "./norm_stats"
    """Folder of the statistics files."""
    norm_stats_default_robot_type: str | None = None
    """Robot type that a request without one stands for; needed where a dataset has several."""
    norm_stats_file: str | None = None
    """Use this statistics file, which must fit data and settings if it says what it is for."""
    add_state: bool = True
    """Write the state into the prompt."""
    is_history: bool = False
    """Show the model earlier frames of the first camera."""
    augment: bool = True
    """Vary the pictures of training at random."""
    val_episodes: int = 0
    """Episodes of each dataset held out for --trainer-config.eval-steps, the same in every run."""
    allow_outside_root: bool = False
    """Allow image paths that leave the image folder."""
    bad_records: Annotated[Literal["refuse", "skip"], choice_flag("refuse", "skip")] = "refuse"
    """What is bad ends the run, or is skipped: a record ends its episode, a picture is replaced."""
    index_root: str | None = None
    """Folder of the dataset indices; the user's cache folder by default."""
    verify_index: bool = False
    """Compare the contents of all data files with the index, not only their sizes and times."""

    def _dataset_info(self) -> dict[str, Any]:
        """The registration's fields, with this config's folders."""
        info = dataset_info(
            self.dataset_name,
            skip_bad=self.bad_records == "skip",
            allow_outside_root=self.allow_outside_root,
        )
        info["robot_type"] = robot_name(info.get("robot_type"))
        return with_folders(info, self.jsonl_dir, self.image_dir)

    def parts(self) -> "list[DM05DataConfig]":
        """One configuration per dataset: of the mixture, or this one alone.

        A dataset's declared action mode holds for it, and all share the mixture's statistics.
        """
        if not self.datasets:
            return [self]
        if self.jsonl_dir or self.image_dir:
            raise ConfigError(
                "--data-config.jsonl-dir and image-dir name the folders of one dataset; for "
                "--data-config.datasets register each with its folders, or name the folders there"
            )
        parts = []
        for entry in parse_entries(self.datasets):
            part = copy.copy(self)
            part.dataset_name, part.datasets = entry.name, []
            declared = part._dataset_info().get("action_mode")  # noqa: SLF001 - of its own class
            part.action_mode = self.action_mode if declared is None else ActionMode(declared)
            parts.append(part)
        return parts

    def validate(self) -> None:
        """Check flags, registration and folders.

        Raises:
            ConfigError: a flag does not fit, or the dataset is unknown.
            DataError: a folder does not exist.
        """
        if self.n_bins < 2:
            raise ConfigError(f"--data-config.n-bins {self.n_bins} is too small; give 2 or more")
        limit = self.compute_norm_stats_max_batches
        if limit is not None and limit < 1:
            raise ConfigError(
                f"--data-config.compute-norm-stats-max-batches {limit} is too small; give 1 or "
                "more, or None for all"
            )
        if self.val_episodes < 0:
            raise ConfigError(
                f"--data-config.val-episodes {self.val_episodes} is too small; give 0 or more"
            )
        parts = self.parts()
        for part in parts:
            part.check_dataset()
        check_modes(parts)
        check_shared_files(parts)

    def check_dataset(self) -> None:
        """Check the registration and folders of this configuration's one dataset.

        Raises:
            ConfigError: the registration does not fit the flags.
            DataError: a folder does not exist.
        """
        info = self._dataset_info()
        check_action_mode(self, info)
        if self.is_history and not info.get("fps"):
            raise ConfigError(
                f"--data-config.is-history needs fps in the registration of {self.dataset_name!r}"
            )
        for key in ("jsonl_dir", "image_dir"):
            if not Path(info[key]).is_dir():
                raise DataError(
                    f"{key} {info[key]!r} of dataset {self.dataset_name!r} does not exist; check "
                    f"the registration or give --data-config.{key.replace('_', '-')}"
                )

    def action_transform(self, chunk_size: int) -> "BuildAction":
        """From recorded frames to the chunk that is learnt."""
        from opendm.data.transforms.actions import BuildAction

        return BuildAction(chunk_size, self.action_mode)

    def norm_stats_path(self, chunk_size: int) -> Path:
        """File of the statistics of this dataset, mode and chunk size, or the one that is given.

        A registered dataset with default settings has the public framework's name. All else that
        is counted otherwise has a name of its own, so that no run meets the numbers of another.
        """
        if self.norm_stats_file is not None:
            return Path(self.norm_stats_file)
        parts = self.parts()
        names = [part.dataset_name for part in parts]
        dataset = "+".join(Path(name).resolve().name if "/" in name else name for name in names)
        settings = [part._own_settings(chunk_size) for part in parts]  # noqa: SLF001 - of its own class
        is_public = not self.datasets and self._has_public_statistics()
        name = norm_stats_name(
            dataset,
            repr(self.action_transform(chunk_size)),
            "" if is_public else json.dumps(settings, sort_keys=True),
        )
        return Path(self.norm_stats_root) / name

    def _choices(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """What chooses the frames that are counted, where it is not the default."""
        choices = {
            "val_episodes": self.val_episodes,
            "bad_records": self.bad_records if self.bad_records != "refuse" else None,
            **{key: info.get(key) for key in ("episodes", "columns", "angle_dims")},
        }
        return {key: value for key, value in choices.items() if value}

    def _has_public_statistics(self) -> bool:
        """Whether they are those that the public framework computes under its name."""
        return (
            is_registered(self.dataset_name)
            and self.jsonl_dir is None
            and self.compute_norm_stats_max_batches is None
            and not self._choices(self._dataset_info())
        )

    def _own_settings(self, chunk_size: int) -> dict[str, Any]:
        """What sets the statistics of this one dataset apart.

        With the folder, since two folders may have one name, or one name in two working folders.
        """
        info = self._dataset_info()
        return {
            **self._choices(info),
            "max_batches": self.compute_norm_stats_max_batches,
            "default_robot_type": self.norm_stats_default_robot_type,
            "folder": str(Path(info["jsonl_dir"]).resolve()),
            "transform": repr(self.action_transform(chunk_size)),
        }

    def build_norm_stats_dataset(self, chunk_size: int) -> JsonlDataset:
        """Samples of states and actions only; no image is opened, and no held-out episode."""
        return self.split_dataset(self.action_transform(chunk_size), "train")

    def open_source(self, split: Split | Literal["all"] = "all") -> Selection:
        """The dataset's frames, and which episodes a split has.

        Raises:
            ConfigError: the split has no episode, or the registration names one that is not there.
            DataError: the folder is missing, or a record is bad.
        """
        info = self._dataset_info()
        source = open_source(
            info["jsonl_dir"],
            skip_bad=self.bad_records == "skip",
            columns=info.get("columns"),
            index_root=self.index_root,
            verify=self.verify_index,
            allow_outside_root=self.allow_outside_root,
        )
        numbers = info.get("episodes")
        chosen = None if numbers is None else numbers_in_index(source, numbers)
        episodes = usable_episodes(source, chosen)
        if split != "all":
            episodes = select_split(episodes, info["jsonl_dir"], self.val_episodes, split)
        return Selection(source, tuple(episode.number for episode in episodes))

    def fingerprint(self) -> str:
        """Hash of names and contents of the data's files."""
        hashes = [part.open_source().source.index.fingerprint() for part in self.parts()]
        return hashes[0] if len(hashes) == 1 else text_digest("/".join(hashes))

    def split_dataset(self, transforms: Transform, split: Split) -> JsonlDataset:
        """The samples of one split of this configuration's one dataset."""
        info, selected = self._dataset_info(), self.open_source(split)
        return JsonlDataset(
            info["jsonl_dir"],
            transforms,
            self.dataset_name,
            info,
            source=selected.source,
            episodes=selected.episodes,
            replaces_bad_pictures=self.bad_records == "skip",
        )

    def compute_norm_stats(self, chunk_size: int) -> Path:
        """Make sure that the statistics file exists and fits, and return its path.

        A file that was computed from other data or settings is replaced; one of the public
        framework, which does not say what it was computed from, is used as it is. Held-out
        episodes are not counted, so that nothing of them reaches training.
        """
        path, origin = self.norm_stats_path(chunk_size), self._norm_stats_origin(chunk_size)
        if self.norm_stats_file is not None:
            return given_statistics(path, origin)
        return ensure_statistics(path, origin, lambda: self._compute_statistics(chunk_size))

    def read_norm_stats(self, chunk_size: int) -> bytes:
        """The content of the file of :meth:`compute_norm_stats`.

        Raises:
            ConfigError: another run has put other statistics there.
        """
        origin = self._norm_stats_origin(chunk_size)
        return read_statistics(self.norm_stats_path(chunk_size), origin)

    def _compute_statistics(self, chunk_size: int) -> NormStatsFile:
        from opendm.data.statistics import compute_statistics, part_of_dataset

        return compute_statistics(
            [
                part_of_dataset(
                    part.build_norm_stats_dataset(chunk_size),
                    part._dataset_info().get("state_desc"),  # noqa: SLF001 - of its own class
                )
                for part in self.parts()
            ],
            default_robot_type=self.norm_stats_default_robot_type,
            max_batches=self.compute_norm_stats_max_batches,
        )

    def _norm_stats_origin(self, chunk_size: int) -> dict[str, Any]:
        """All that the statistics depend on, as the file's ``opendm`` entry."""
        if self.datasets:
            parts = self.parts()
            return {"datasets": [part._norm_stats_origin(chunk_size) for part in parts]}  # noqa: SLF001
        info = self._dataset_info()
        return statistics_origin(
            fingerprint=self.fingerprint(),
            action_transform=self.action_transform(chunk_size),
            state_desc=info.get("state_desc"),
            robot_types=[info.get("robot_type")],
            default_robot_type=self.norm_stats_default_robot_type,
            max_batches=self.compute_norm_stats_max_batches,
            choices=self._choices(info),
        )

    def image_pipeline(self, image_size: int) -> "TransformPipeline":
        """What is done to each picture in training; a subclass may override it."""
        from opendm.data import augmentations as a

        make = a.TrainingTransformPipeline if self.augment else a.NoAugmentationPipeline
        return make(image_size)

    def build_transforms(
        self, processor: Any, chunk_size: int, max_length: int, *, augment: bool = True
    ) -> "Pipeline":
        """From a frame to the model's inputs; the statistics file must exist.

        Without ``augment`` pictures are treated as by a policy, whatever ``image_pipeline`` does.
        """
        from opendm.data import transforms as t
        from opendm.data.augmentations import NoAugmentationPipeline
        from opendm.data.processor import image_size

        make_pixels = self.image_pipeline if augment else NoAugmentationPipeline
        info = self._dataset_info()
        folder, keys = info["image_dir"], info["image_keys"]
        outside, path = self.allow_outside_root, self.norm_stats_path(chunk_size)
        history = [t.LoadHistory(keys[0], folder, allow_outside_root=outside)]
        return t.Pipeline([
            self.action_transform(chunk_size),
            t.LoadImages(keys, folder, allow_outside_root=outside),
            *(history if self.is_history else []),
            t.PixelTransform(make_pixels(image_size(processor))),
            t.Normalize(path, ("state", "action"), required=("state",) if self.add_state else ()),
            t.ChatTokenization(
                processor,
                self.n_bins,
                max_length,
                info["image_prompts"],
                add_state=self.add_state,
                is_history=self.is_history,
                as_bytes=True,
            ),
            t.PadAction(),
        ])  # fmt: skip

    def build_dataset(
        self, processor: Any, chunk_size: int, max_length: int, *, split: Split = "train"
    ) -> "JsonlDataset | Mixture":
        """Samples ready for :meth:`build_collator`: of training, or of the held-out episodes.

        Raises:
            ConfigError: there are no such episodes.
        """
        statistics = str(self.norm_stats_path(chunk_size))
        augment = split == "train"
        built = []
        for part in self.parts():
            if part is not self:
                part.norm_stats_file = statistics
            transforms = part.build_transforms(processor, chunk_size, max_length, augment=augment)
            built.append(part.split_dataset(transforms, split))
        if not self.datasets and self.mixture_by == "frames":
            return built[0]
        return mix(built, parse_entries(self.datasets), self.mixture_by)

    def build_val_dataset(self, processor: Any, chunk_size: int, max_length: int) -> Any:
        """The held-out samples of :meth:`build_dataset`, which a subclass may override.

        Raises:
            ConfigError: the overriding ``build_dataset`` does not take ``split``.
        """
        parameters = inspect.signature(self.build_dataset).parameters.values()
        if not any(p.name == "split" or p.kind is p.VAR_KEYWORD for p in parameters):
            raise ConfigError(
                "--trainer-config.eval-steps needs held-out samples, and build_dataset of "
                f"{type(self).__name__} does not take split; add split='train' to its parameters "
                "and return other samples for 'val', or set eval-steps to 0"
            )
        return self.build_dataset(processor, chunk_size, max_length, split="val")

    def build_collator(self, processor: Any, max_length: int) -> "TrainingCollator":
        """From samples to a batch."""
        from opendm.data.collator import TrainingCollator

        return TrainingCollator(processor.tokenizer.pad_token_id, max_length)
