"""``Policy``: the training pipeline run backwards, from observations to action chunks."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from opendm.constants.robot import ActionMode
from opendm.data.augmentations import NoAugmentationPipeline
from opendm.data.collator import TrainingCollator
from opendm.data.dataset import Sample
from opendm.data.episodes import check_vector
from opendm.data.normalize import NormStatsFile
from opendm.data.processor import image_size, load_processor
from opendm.data.transforms.actions import ActionAbsolute, unpad_action
from opendm.data.transforms.images import PixelTransform
from opendm.data.transforms.normalization import Denormalize, Normalize
from opendm.data.transforms.pipeline import Pipeline
from opendm.data.transforms.prompt import PROMPT_LAYOUT_VERSION, ChatTokenization
from opendm.errors import CheckpointError, DataError
from opendm.infer.layout import PolicyLayout
from opendm.model.dm05.checkpoint_files import load_config
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.precision import inference_autocast
from opendm.shapes import Actions

NORM_STATS_FILE: Final = "norm_stats.json"
MODEL_INPUTS: Final = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")

Picture = Image.Image | bytes | np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What the robot sees, feels and shall do."""

    state: Sequence[float] | np.ndarray
    """In the robot's units."""
    images: Mapping[str, Picture]
    """By camera key: a picture, an encoded file, or uint8 ``[height, width, 3]``."""
    prompt: str
    robot_type: str | None = None
    """None means the checkpoint's; so do the two below."""
    speed: str | None = None
    control_mode: str | None = None


class Policy:
    """A checkpoint that acts."""

    def __init__(
        self,
        model: DM05ForConditionalGeneration,
        processor: Any,
        layout: PolicyLayout,
        norm_stats: NormStatsFile,
    ) -> None:
        self.model = model
        self.layout = layout
        self.norm_stats = norm_stats
        pixels = NoAugmentationPipeline(image_size(processor))
        tokenization = ChatTokenization(
            processor,
            n_bins=layout.n_bins,
            max_length=layout.max_length,
            image_prompts=layout.image_prompts,
            add_state=layout.add_state,
        )
        normalize = Normalize(None, ["state"], norm_stats_file=norm_stats)
        self._before = Pipeline([PixelTransform(pixels), normalize, tokenization])
        self._collate = TrainingCollator(processor.tokenizer.pad_token_id, layout.max_length)
        after: list[Any] = [Denormalize(None, ["action"], norm_stats_file=norm_stats)]
        if layout.action_mode == ActionMode.RELATIVE.value:
            after.append(ActionAbsolute())
        self._after = Pipeline(after)

    @classmethod
    def from_checkpoint(
        cls,
        path: "str | PathLike[str]",
        *,
        layout_from: "str | PathLike[str] | None" = None,
        device: "str | torch.device" = "cpu",
        dtype: torch.dtype | None = None,
    ) -> "Policy":
        """Load a checkpoint folder.

        Args:
            path: a folder with weights, ``opendm.json``, ``norm_stats.json`` and the processor.
            layout_from: the folder of everything but the weights, where ``path`` has weights only
                (a checkpoint that was not trained).
            device: where the model runs.
            dtype: dtype of the weights; the file's when absent.

        Raises:
            CheckpointError: a file is missing or does not fit.
        """
        source = Path(path if layout_from is None else layout_from)
        layout = PolicyLayout.load(source)
        if layout.prompt_layout != PROMPT_LAYOUT_VERSION:
            raise CheckpointError(
                f"{source}: key 'prompt_layout' of opendm.json is {layout.prompt_layout}; this "
                f"OpenDM writes prompts of version {PROMPT_LAYOUT_VERSION}"
            )
        stats_file = source / NORM_STATS_FILE
        if not stats_file.is_file():
            raise CheckpointError(f"{stats_file} does not exist; is the copy complete?")
        norm_stats = NormStatsFile.load(stats_file)
        config = load_config(path)
        if layout.action_dim > config.action_dim:
            raise CheckpointError(
                f"{source}: key 'action_dim' of opendm.json is {layout.action_dim}, but the model "
                f"has {config.action_dim} dimensions"
            )
        config.chunk_size = layout.chunk_size
        model = DM05ForConditionalGeneration.from_pretrained(path, config=config, dtype=dtype)
        model.to(torch.device(device))
        model.set_attention_implementation(
            llm_attn_implementation="sdpa",
            vision_attn_implementation="sdpa",
            action_attn_implementation="sdpa",
            bf16=model.dtype == torch.bfloat16,
            training=False,
        )
        return cls(model.eval(), load_processor(source), layout, norm_stats)

    def act(
        self,
        observation: Observation,
        *,
        num_steps: int = 10,
        generator: torch.Generator | None = None,
        noise: Actions | None = None,
    ) -> np.ndarray:
        """The next actions ``[horizon, dim]`` in the robot's units, float32.

        Args:
            observation: the present.
            num_steps: integration steps.
            generator: what the noise is drawn from; torch's global one when absent.
            noise: the start itself, ``[1, horizon, model dimensions]``.
        """
        return self.act_batch([observation], num_steps=num_steps, generator=generator, noise=noise)[
            0
        ]

    def act_batch(
        self,
        observations: Sequence[Observation],
        *,
        num_steps: int = 10,
        generator: torch.Generator | None = None,
        noise: Actions | None = None,
    ) -> np.ndarray:
        """One chunk per observation, ``[B, horizon, dim]``; arguments as of :meth:`act`.

        Raises:
            DataError: an observation lacks a camera, or its state does not fit.
            CheckpointError: the model's output is not finite.
        """
        if not observations:
            raise DataError("act_batch() got no observation")
        samples = [self._sample(observation) for observation in observations]
        raw = [(sample["state"], sample["meta_data"]) for sample in samples]
        batch = self._collate([self._before(sample) for sample in samples])
        device = self.model.device
        inputs = {k: batch[k].to(device) for k in MODEL_INPUTS if batch.get(k) is not None}
        with inference_autocast(device, self.model.precision_policy):
            actions = self.model.inference_action(
                **inputs,
                diffusion_steps=num_steps,
                action_mask=self._action_mask(),
                noise=noise,
                generator=generator,
            )
        chunks = unpad_action(actions.float().cpu().numpy(), self.layout.action_dim)
        return np.stack(
            [
                self._robot_units(chunk, state, meta)
                for chunk, (state, meta) in zip(chunks, raw, strict=True)
            ]
        )

    def noise_for(self, seeds: Sequence[int]) -> Actions:
        """Starts ``[B, horizon, model dimensions]``, each from its own seed."""
        shape = (self.layout.chunk_size, self.model.config.action_dim)
        draws = [
            torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds
        ]
        return torch.stack(draws)

    def _action_mask(self) -> torch.Tensor:
        dims = torch.arange(self.model.config.action_dim, device=self.model.device)
        return (dims < self.layout.action_dim)[None, None]

    def _sample(self, observation: Observation) -> Sample:
        layout = self.layout
        meta = {
            "state_desc": layout.state_desc,
            "robot_type": observation.robot_type or layout.robot_type,
            "speed": observation.speed or layout.speed,
            "control_mode": observation.control_mode or layout.control_mode,
        }
        meta = {key: value for key, value in meta.items() if value is not None}
        values = np.asarray(observation.state, dtype=np.float64).tolist()
        size = None if layout.state_desc is None else len(layout.state_desc)
        state = check_vector({"state": values}, "state", size, "observation")
        missing = [key for key in layout.image_keys if key not in observation.images]
        if missing:
            raise DataError(
                f"observation: camera {missing[0]!r} is missing; the policy needs "
                f"{layout.image_keys}"
            )
        return {
            "state": np.asarray(state, dtype=np.float32),
            "images": [to_picture(key, observation.images[key]) for key in layout.image_keys],
            "prompt": observation.prompt,
            "meta_data": meta,
        }

    def _robot_units(
        self, chunk: np.ndarray, state: np.ndarray, meta: dict[str, Any]
    ) -> np.ndarray:
        sample = {"action": chunk, "state": state, "meta_data": meta}
        actions = np.asarray(self._after(sample)["action"], dtype=np.float32)
        if not np.isfinite(actions).all():
            raise CheckpointError(
                "the policy's action is not finite; weights or statistics of the checkpoint hold "
                "NaN or infinity, or overflow in its dtype"
            )
        return actions


def to_picture(key: str, picture: Picture) -> Image.Image:
    """An RGB picture from any form that an observation may hold.

    Raises:
        DataError: it is none of them; the message names the camera.
    """
    if isinstance(picture, Image.Image):
        return picture.convert("RGB")
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise DataError(
                f"observation: image {key!r} is {picture.dtype} {list(picture.shape)}; expected "
                "uint8 [height, width, 3]"
            )
        return Image.fromarray(picture)
    try:
        with Image.open(io.BytesIO(picture)) as image:
            return image.convert("RGB")
    except (OSError, TypeError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"observation: image {key!r} cannot be decoded: {error}") from error
