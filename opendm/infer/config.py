"""``--inference-config.*``."""

import logging
from dataclasses import dataclass, field
from typing import Final, Literal

from opendm.errors import ConfigError

logger = logging.getLogger(__name__)

STATE_LAYOUT: Final = "identity"
"""The only order of a state: as the checkpoint's data had it."""
AT_LEAST_ONE: Final = (
    "diffusion_steps", "max_batch_size", "max_queue", "max_body_mib", "max_image_side",
    "max_prompt_chars", "output_action_dim",
)  # fmt: skip


@dataclass
class DM05InferenceConfig:
    """How a trained policy is served."""

    host: str = "127.0.0.1"
    """Address that the service listens on; any but loopback needs a token or no-auth."""
    port: int = 7891
    """Port of the HTTP service; 0 takes a free one."""
    token: str | None = field(default=None, repr=False)
    """What clients send as Authorization: Bearer; none means no check."""
    no_auth: bool = False
    """Serve other machines without a token."""
    max_batch_size: int = 8
    """Most requests that the model works on at once; 1 makes replies independent bit for bit."""
    batch_window_ms: float = 3.0
    """How long a batch waits for each further request while several clients are active."""
    max_queue: int = 32
    """Requests that may wait for the model; more are answered 503."""
    max_body_mib: int = 16
    """Size of a request's body."""
    max_image_side: int = 2048
    """Longer side of a request's pictures in pixels."""
    max_prompt_chars: int = 2000
    """Length of a request's prompt."""
    norm_stats_file: str | None = None
    """Statistics instead of the checkpoint's norm_stats.json."""
    layout_file: str | None = None
    """Layout instead of the checkpoint's opendm.json."""
    clip_actions: bool = False
    """Clip actions to their 1 % and 99 % quantiles, in relative mode before the state is added."""
    diffusion_steps: int = 10
    """Integration steps from noise to action, fixed for the life of the service."""
    max_history_images: int = 5
    """Most history images of a request, and the history slots of the prompt."""
    output_action_dim: int = 14
    """Dimensions of the returned action; must equal those of the statistics."""
    image_prompts: list[str] = field(default_factory=lambda: ["Head", "Left wrist", "Right wrist"])
    """Labels of the images of a request, in order."""
    backend: Literal["default", "fast"] = "default"
    """default, or fast: the integration as CUDA graphs, on a GPU, one request at a time."""
    vision_trt_engine_path: str | None = None
    """Without effect but a warning, for files of the public framework: there is no such engine."""
    force_rebuild: bool = False
    """Without effect but a warning, likewise."""
    prefix_seq_len_buckets: list[int] | None = None
    """Prefix lengths that the fast backend captures; none means 576 704 768 896 1024."""
    clip_to_bounds: bool = True
    """Clip the state to its 1 % and 99 % quantiles before scaling."""
    compose_eef_rot: bool = False
    """End effector: roll, pitch, yaw in, and rotations composed instead of added."""
    full_action_mask: bool = False
    """Sample all dimensions of the model instead of the robot's only."""
    use_transformed_state: bool = False
    """Add relative actions to the normalised state instead of the state as received."""
    state_layout: str = "identity"
    """Order of a request's state; identity, that of training, is the only one."""
    denorm_state: bool = False
    """Denormalise the state, too, before relative actions are added to it."""
    fast_prefix_len: int | None = None
    """A further prefix length that the fast backend captures, above the buckets."""

    def validate(self) -> None:
        """Check the flags without importing a framework.

        Raises:
            ConfigError: a number is out of range.
        """
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise ConfigError(
                    f"--inference-config.{flag} {getattr(self, name)} is too small; give 1 or more"
                )
        if self.state_layout != STATE_LAYOUT:
            raise ConfigError(
                f"--inference-config.state-layout {self.state_layout!r} is unknown; states come in "
                f"the order of training: leave the flag out, or give {STATE_LAYOUT}"
            )
        if not 0 <= self.port <= 65_535:
            raise ConfigError(
                f"--inference-config.port {self.port} is no port; allowed: 0 to 65535"
            )
        if not 0 <= self.batch_window_ms <= 1000:
            raise ConfigError(
                f"--inference-config.batch-window-ms {self.batch_window_ms} is out of range; "
                "allowed: 0 to 1000"
            )

    def warn_of_unused(self) -> None:
        """Say once which flags were given and change nothing."""
        engine = {
            "vision-trt-engine-path": self.vision_trt_engine_path is not None,
            "force-rebuild": self.force_rebuild,
        }
        graphs = {
            "prefix-seq-len-buckets": self.prefix_seq_len_buckets is not None,
            "fast-prefix-len": self.fast_prefix_len is not None,
        }
        for flags, reason in (
            (engine, "OpenDM has no TensorRT engine; vision runs in torch on both backends"),
            ({} if self.backend == "fast" else graphs, "only the fast backend captures lengths"),
        ):
            given = [flag for flag, is_given in flags.items() if is_given]
            if given:
                logger.warning(
                    "--inference-config.%s has no effect: %s", " and ".join(given), reason
                )
