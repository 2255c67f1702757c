"""``--data-config.*``: which data is trained on, and everything that is built from it.

Importing this module imports no framework; methods do when they are called.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from opendm.constants.robot import ActionMode, desc_value
from opendm.data.dataset import JsonlDataset
from opendm.data.episodes import fingerprint
from opendm.data.norm_stats_job import compute_norm_stats, norm_stats_name, robot_name
from opendm.data.normalize import NormStatsFile
from opendm.dataset.register import dataset_fields
from opendm.errors import ConfigError, DataError
from opendm.flags import enum_flag

if TYPE_CHECKING:
    from opendm.data.augmentations import TransformPipeline
    from opendm.data.collator import TrainingCollator
    from opendm.data.transforms import BuildAction, Pipeline

logger = logging.getLogger(__name__)


@dataclass
class DM05DataConfig:
    """The dataset and how its samples are made."""

    dataset_name: str = "demo"
    """Registered name of the dataset."""
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
    add_state: bool = True
    """Write the state into the prompt."""
    is_history: bool = False
    """Show the model earlier frames of the first camera."""
    allow_outside_root: bool = False
    """Allow image paths that leave the image folder."""

    def _dataset_info(self) -> dict[str, Any]:
        """The registration's fields, with this config's folders."""
        info = dataset_fields(self.dataset_name)
        info["robot_type"] = robot_name(info.get("robot_type"))
        for key, folder in (("jsonl_dir", self.jsonl_dir), ("image_dir", self.image_dir)):
            if folder is not None:
                info[key] = folder
        return info

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
        info = self._dataset_info()
        if self.is_history and not info.get("fps"):
            raise ConfigError(
                f"--data-config.is-history needs fps in the registration of {self.dataset_name!r}"
            )
        if self.action_mode is ActionMode.RELATIVE and not info.get("state_desc"):
            raise ConfigError(
                "--data-config.action-mode RELATIVE needs state_desc in the registration of "
                f"{self.dataset_name!r}; add it or choose ABSOLUTE"
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
        """File of the statistics of this dataset, mode and chunk size."""
        name = norm_stats_name(self.dataset_name, repr(self.action_transform(chunk_size)))
        return Path(self.norm_stats_root) / name

    def build_norm_stats_dataset(self, chunk_size: int) -> JsonlDataset:
        """Samples of states and actions only; no image is opened."""
        info = self._dataset_info()
        transform = self.action_transform(chunk_size)
        return JsonlDataset(info["jsonl_dir"], transform, self.dataset_name, info)

    def compute_norm_stats(self, chunk_size: int) -> Path:
        """Make sure that the statistics file exists and fits, and return its path.

        A file that was computed from other data or settings is replaced; one of the public
        framework, which does not say what it was computed from, is used as it is.
        """
        path = self.norm_stats_path(chunk_size)
        origin = self._norm_stats_origin(chunk_size)
        if path.is_file():
            found = NormStatsFile.load(path).opendm
            if not found:
                logger.info("statistics %s do not name their source; used as they are", path)
            if not found or found == origin:
                return path
            changed = [key for key in origin if origin[key] != found.get(key)]
            logger.info("statistics %s have another %s; computed again", path, ", ".join(changed))
        stats = compute_norm_stats(
            self.build_norm_stats_dataset(chunk_size),
            self.norm_stats_default_robot_type,
            self.compute_norm_stats_max_batches,
        )
        stats.opendm = origin
        stats.save(path)
        return path

    def _norm_stats_origin(self, chunk_size: int) -> dict[str, Any]:
        """All that the statistics depend on, as the file's ``opendm`` entry."""
        info = self._dataset_info()
        desc = info.get("state_desc")
        return {
            "fingerprint": fingerprint(info["jsonl_dir"]),
            "action_mode": self.action_mode.value,
            "action_horizon": chunk_size,
            "max_batches": self.compute_norm_stats_max_batches,
            "robot_type": robot_name(info.get("robot_type")),
            "default_robot_type": self.norm_stats_default_robot_type,
            "state_desc": None if desc is None else [desc_value(part) for part in desc],
        }

    def image_pipeline(self, image_size: int) -> "TransformPipeline":
        """What is done to each picture; benchmarks override it."""
        from opendm.data.augmentations import TrainingTransformPipeline

        return TrainingTransformPipeline(image_size)

    def build_transforms(self, processor: Any, chunk_size: int, max_length: int) -> "Pipeline":
        """From a frame to the model's inputs; the statistics file must exist."""
        from opendm.data import transforms as t
        from opendm.data.processor import image_size

        info = self._dataset_info()
        folder, keys = info["image_dir"], info["image_keys"]
        outside = self.allow_outside_root
        history = [t.LoadHistory(keys[0], folder, allow_outside_root=outside)]
        return t.Pipeline([
            self.action_transform(chunk_size),
            t.LoadImages(keys, folder, allow_outside_root=outside),
            *(history if self.is_history else []),
            t.PixelTransform(self.image_pipeline(image_size(processor))),
            t.Normalize(self.norm_stats_path(chunk_size), ("state", "action")),
            t.ChatTokenization(
                processor,
                self.n_bins,
                max_length,
                info["image_prompts"],
                add_state=self.add_state,
                is_history=self.is_history,
            ),
            t.PadAction(),
        ])  # fmt: skip

    def build_dataset(self, processor: Any, chunk_size: int, max_length: int) -> JsonlDataset:
        """Samples ready for :meth:`build_collator`."""
        info = self._dataset_info()
        transforms = self.build_transforms(processor, chunk_size, max_length)
        return JsonlDataset(info["jsonl_dir"], transforms, self.dataset_name, info)

    def build_collator(self, processor: Any, max_length: int) -> "TrainingCollator":
        """From samples to a batch."""
        from opendm.data.collator import TrainingCollator

        return TrainingCollator(processor.tokenizer.pad_token_id, max_length)
