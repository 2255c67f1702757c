"""``Policy``: the training pipeline run backwards, from observations to action chunks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from opendm.constants.robot import HISTORY_PAD_TOKEN, HISTORY_TOKEN, ActionMode
from opendm.data.augmentations import NoAugmentationPipeline
from opendm.data.collator import Batch, TrainingCollator
from opendm.data.dataset import Sample
from opendm.data.episodes import check_vector
from opendm.data.normalize import NormStatsFile
from opendm.data.processor import image_size, load_processor
from opendm.data.transforms.actions import ActionAbsolute, ArrangeState, unpad_action
from opendm.data.transforms.images import PixelTransform
from opendm.data.transforms.normalization import Denormalize, Normalize
from opendm.data.transforms.prompt import PROMPT_LAYOUT_VERSION, ChatTokenization
from opendm.errors import CheckpointError, DataError
from opendm.infer.layout import PolicyLayout, check_words, layout_path
from opendm.infer.observation import Observation, Picture, to_picture
from opendm.infer.options import PolicyOptions
from opendm.infer.own_thread import in_own_thread
from opendm.model.dm05.checkpoint_files import load_config
from opendm.model.dm05.dm05_arch import DM05ForConditionalGeneration
from opendm.model.dm05.dm05_lora import load_dm05_model_for_inference
from opendm.model.dm05.lora_merge import config_folder
from opendm.model.dm05.precision import inference_autocast
from opendm.shapes import ActionMask, Actions

__all__ = ["Observation", "Picture", "Policy", "PolicyOptions", "Prepared", "to_picture"]

NORM_STATS_FILE: Final = "norm_stats.json"
MODEL_INPUTS: Final = (
    "input_ids", "attention_mask", "token_type_ids", "pixel_values",
    "history_pixel_values", "history_mask",
)  # fmt: skip

Sampler = Callable[[Batch, Actions, ActionMask, int], Actions]
"""From model inputs, noise, mask and number of steps to normalised actions."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """An observation as the model reads it, and what its actions need on the way back."""

    inputs: Sample
    state: np.ndarray
    """What relative actions are added to."""
    meta: dict[str, Any]
    layout: PolicyLayout


class Policy:
    """A checkpoint that acts."""

    def __init__(
        self,
        model: DM05ForConditionalGeneration,
        processor: Any,
        layout: PolicyLayout,
        norm_stats: NormStatsFile,
        options: PolicyOptions = PolicyOptions(),  # noqa: B008 - frozen
    ) -> None:
        self.model = model
        self.processor = processor
        self.layout = layout
        self.norm_stats = norm_stats
        self.options = options
        self.sampler: Sampler = self._sample_actions
        self._collate = TrainingCollator(processor.tokenizer.pad_token_id, layout.max_length)
        self.shrink = NoAugmentationPipeline(image_size(processor))
        """From a picture to the size that the model sees; again, it changes nothing."""
        self._pixels = PixelTransform(self.shrink)
        self._normalize = Normalize(
            None, ["state"], norm_stats_file=norm_stats, clip_to_bounds=options.clip_to_bounds
        )
        self._denormalize = Denormalize(None, ["action"], norm_stats_file=norm_stats)
        self._denormalize_state = Denormalize(None, ["state"], norm_stats_file=norm_stats)
        self._absolute = ActionAbsolute(compose_eef_rot=options.compose_eef_rot)

    @classmethod
    def from_checkpoint(
        cls,
        path: "str | PathLike[str]",
        *,
        layout_from: "str | PathLike[str] | None" = None,
        layout_file: "str | PathLike[str] | None" = None,
        norm_stats_file: "str | PathLike[str] | None" = None,
        base: "str | PathLike[str] | None" = None,
        device: "str | torch.device" = "cpu",
        dtype: torch.dtype | None = None,
        options: PolicyOptions = PolicyOptions(),  # noqa: B008 - frozen
    ) -> "Policy":
        """Load a checkpoint folder.

        Args:
            path: a folder with weights, ``opendm.json``, ``norm_stats.json`` and the processor.
            layout_from: the folder of everything but the weights, where ``path`` has weights only
                (a checkpoint that was not trained).
            layout_file: instead of the folder's ``opendm.json``.
            norm_stats_file: instead of the folder's ``norm_stats.json``.
            base: where the base of an adapter is, if it was moved.
            device: where the model runs.
            dtype: dtype of the weights; the file's when absent.
            options: deviations from the training pipeline.

        Raises:
            CheckpointError: a file is missing or does not fit.
        """
        source = Path(path if layout_from is None else layout_from)
        layout = load_layout(source if layout_file is None else Path(layout_file))
        stats_file = source / NORM_STATS_FILE if norm_stats_file is None else Path(norm_stats_file)
        if not stats_file.is_file():
            raise CheckpointError(f"{stats_file} does not exist; is the copy complete?")
        norm_stats = NormStatsFile.load(stats_file)
        check_statistics(norm_stats, str(stats_file))
        config = load_config(config_folder(Path(path), base))
        if layout.action_dim > config.action_dim:
            raise CheckpointError(
                f"{source}: key 'action_dim' of opendm.json is {layout.action_dim}, but the model "
                f"has {config.action_dim} dimensions"
            )
        overrides = {"chunk_size": layout.chunk_size}
        place = torch.device(device)
        if place.type == "cuda" and place.index is None:  # another thread has its own current one
            place = torch.device("cuda", torch.cuda.current_device())
        model = in_own_thread(
            lambda: load_dm05_model_for_inference(path, overrides, base=base, dtype=dtype).to(place)
        )
        model.set_attention_implementation(
            llm_attn_implementation="sdpa",
            vision_attn_implementation="sdpa",
            action_attn_implementation="sdpa",
            bf16=model.dtype == torch.bfloat16,
            training=False,
        )
        processor = load_processor(source)
        where = str(layout_path(source if layout_file is None else Path(layout_file)))
        check_words(layout, reserved_tokens(processor), where)
        return cls(model.eval(), processor, layout, norm_stats, options)

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
        generators = None if generator is None else [generator]
        return self.act_batch([observation], generators, num_steps=num_steps, noise=noise)[0]

    def act_batch(
        self,
        observations: Sequence[Observation],
        generators: Sequence[torch.Generator] | None = None,
        *,
        num_steps: int = 10,
        noise: Actions | None = None,
    ) -> np.ndarray:
        """One chunk per observation of one robot, ``[B, horizon, dim]``.

        Each observation's noise comes from its own generator, so that no result depends on the
        others. Arguments as of :meth:`act`.

        Raises:
            DataError: an observation lacks a camera, or its state does not fit.
            CheckpointError: the model's output is not finite.
        """
        if not observations:
            raise DataError("act_batch() got no observation")
        prepared = [self.prepare(observation) for observation in observations]
        if noise is None and generators is not None:
            noise = self.draw_noise(generators)
        return np.stack(self.act_prepared(prepared, num_steps=num_steps, noise=noise))

    def prepare(self, observation: Observation) -> Prepared:
        """Pictures, tokens and normalised state of an observation.

        Raises:
            DataError: the observation does not fit the checkpoint; the message says where.
        """
        layout = self.layout.for_robot(observation.robot_type)
        sample = self._sample(observation, layout)
        if self.options.compose_eef_rot:
            sample = ArrangeState()(sample)
        state, meta = sample["state"], sample["meta_data"]
        sample = self._normalize(self._pixels(sample))
        if self.options.use_transformed_state:
            state = sample["state"]
            if self.options.denorm_state:
                again = {"state": state, "meta_data": meta}
                state = self._denormalize_state(again)["state"]
        inputs = self._tokenization(layout)(sample)
        return Prepared(inputs, state, meta, layout)

    def act_prepared(
        self,
        prepared: Sequence[Prepared],
        *,
        num_steps: int = 10,
        noise: Actions | None = None,
        sampler: Sampler | None = None,
    ) -> list[np.ndarray]:
        """One chunk ``[horizon, dim]`` per prepared observation; robots may differ.

        ``sampler`` replaces the policy's own for this call.

        Raises:
            CheckpointError: the model's output is not finite.
        """
        batch = self._collate([one.inputs for one in prepared])
        device = self.model.device
        inputs = {k: batch[k].to(device) for k in MODEL_INPUTS if batch.get(k) is not None}
        if noise is None:
            noise = torch.randn(len(prepared), *self._noise_shape())
        with torch.no_grad(), inference_autocast(device, self.model.precision_policy):
            actions = (sampler or self.sampler)(
                inputs, noise, self.action_mask(prepared), num_steps
            )
        chunks = actions.float().cpu().numpy()
        return [self._robot_units(*pair) for pair in zip(chunks, prepared, strict=True)]

    def draw_noise(self, generators: Sequence[torch.Generator]) -> Actions:
        """Starts ``[B, horizon, model dimensions]``, each from its own generator."""
        shape = self._noise_shape()
        draws = [torch.randn(shape, generator=one, device=one.device) for one in generators]
        return torch.stack([draw.cpu() for draw in draws])

    def noise_for(self, seeds: Sequence[int]) -> Actions:
        """Starts ``[B, horizon, model dimensions]``, each from its own seed."""
        return self.draw_noise([torch.Generator().manual_seed(seed) for seed in seeds])

    def _noise_shape(self) -> tuple[int, int]:
        return self.layout.chunk_size, self.model.config.action_dim

    def _sample_actions(
        self, inputs: Batch, noise: Actions, mask: ActionMask, num_steps: int
    ) -> Actions:
        arguments: dict[str, Any] = dict(inputs)
        return self.model.inference_action(
            **arguments, diffusion_steps=num_steps, action_mask=mask, noise=noise
        )

    def action_mask(self, prepared: Sequence[Prepared]) -> ActionMask:
        """Which dimensions are sampled, bool ``[B, 1, model dimensions]``."""
        size = self.model.config.action_dim
        full = self.options.full_action_mask
        counts = [size if full else one.layout.action_dim for one in prepared]
        mask = torch.arange(size)[None, None] < torch.tensor(counts)[:, None, None]
        return mask.to(self.model.device)

    def _tokenization(self, layout: PolicyLayout) -> ChatTokenization:
        return ChatTokenization(
            self.processor,
            n_bins=layout.n_bins,
            max_length=layout.max_length,
            image_prompts=layout.image_prompts,
            add_state=layout.add_state,
            is_history=layout.is_history,
            max_history_images=layout.max_history_images,
        )

    def _sample(self, observation: Observation, layout: PolicyLayout) -> Sample:
        meta = {
            "state_desc": layout.state_desc,
            "angle_dims": layout.angle_dims,
            "robot_type": layout.robot_type,
            "speed": observation.speed or layout.speed,
            "control_mode": observation.control_mode or layout.control_mode,
        }
        meta = {key: value for key, value in meta.items() if value is not None}
        values = np.asarray(observation.state, dtype=np.float64).tolist()
        state = check_vector({"state": values}, "state", self._state_size(layout), "observation")
        missing = [key for key in layout.image_keys if key not in observation.images]
        if missing:
            raise DataError(
                f"observation: camera {missing[0]!r} is missing; the policy needs "
                f"{layout.image_keys}"
            )
        sample = {
            "state": np.asarray(state, dtype=np.float32),
            "images": [to_picture(key, observation.images[key]) for key in layout.image_keys],
            "prompt": observation.prompt,
            "meta_data": meta,
        }
        if observation.history_images:
            if not layout.is_history:
                raise DataError("observation: this checkpoint was trained without history images")
            sample["history_images"] = [
                to_picture(f"history {number}", picture)
                for number, picture in enumerate(observation.history_images, start=1)
            ]
        return sample

    def _state_size(self, layout: PolicyLayout) -> int | None:
        if layout.state_desc is not None:
            return len(layout.state_desc)
        profile = self.norm_stats.select(layout.robot_type)
        return len(profile["state"].mean) if "state" in profile else None

    def _robot_units(self, chunk: np.ndarray, prepared: Prepared) -> np.ndarray:
        """Normalised ``[horizon, model dimensions]`` to the robot's ``[horizon, dim]``."""
        layout = prepared.layout
        action = unpad_action(chunk, layout.action_dim)
        sample: Sample = {"action": action, "state": prepared.state, "meta_data": prepared.meta}
        sample = self._denormalize(sample)
        if self.options.clip_actions:
            stats = self.norm_stats.select(layout.robot_type)["action"]
            low, high = stats.q01.astype(np.float32), stats.q99.astype(np.float32)
            sample["action"] = np.clip(sample["action"], low, high)
        if layout.action_mode == ActionMode.RELATIVE.value:
            sample = self._absolute(sample)
        actions = np.asarray(sample["action"], dtype=np.float32)
        if not np.isfinite(actions).all():
            raise CheckpointError(
                "the policy's action is not finite; weights or statistics of the checkpoint hold "
                "NaN or infinity, or overflow in its dtype"
            )
        return actions


def check_statistics(norm_stats: NormStatsFile, where: str) -> None:
    """Refuse statistics without a part that acting needs.

    Raises:
        CheckpointError: a robot has no statistics of its state or action; the message names the
            file and the key.
    """
    for robot, profile in norm_stats.profiles.items():
        for key in ("state", "action"):
            if key not in profile:
                entry = "norm_stats" if robot is None else f"norm_stats_by_robot[{robot!r}]"
                raise CheckpointError(
                    f"{where}: {entry} has no key {key!r}, without which the {key} cannot be "
                    "scaled as in training; compute the statistics again"
                )


def reserved_tokens(processor: Any) -> frozenset[str]:
    """Tokens of a checkpoint that no text may hold."""
    tokens = processor.tokenizer.added_tokens_decoder.values()
    special = frozenset(token.content for token in tokens if token.special)
    return special | {HISTORY_TOKEN, HISTORY_PAD_TOKEN}


def load_layout(source: Path) -> PolicyLayout:
    """The layout of a folder or file, in the prompt version that this package writes.

    Raises:
        CheckpointError: it is missing, broken or of another prompt version.
    """
    layout = PolicyLayout.load(source)
    if layout.prompt_layout != PROMPT_LAYOUT_VERSION:
        raise CheckpointError(
            f"{source}: key 'prompt_layout' of opendm.json is {layout.prompt_layout}; this "
            f"OpenDM writes prompts of version {PROMPT_LAYOUT_VERSION}"
        )
    return layout
