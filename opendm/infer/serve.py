"""One process that serves one checkpoint: checks, loading, the port, and an orderly end."""

import contextlib
import ctypes
import gc
import hashlib
import io
import ipaddress
import logging
import platform
import signal
import socket
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
import uvicorn
from PIL import Image

from opendm.constants.robot import ActionMode
from opendm.errors import CheckpointError, ConfigError
from opendm.infer.config import DM05InferenceConfig
from opendm.infer.connection import TimedConnection
from opendm.infer.cuda_graphs import BUCKETS, use_cuda_graphs
from opendm.infer.layout import LAYOUT_FILE, layout_path
from opendm.infer.limits import MAX_SEED, Limits
from opendm.infer.observation import Observation
from opendm.infer.options import PolicyOptions
from opendm.infer.own_thread import in_own_thread
from opendm.infer.policy import NORM_STATS_FILE, Policy, reserved_tokens
from opendm.infer.request import Contract
from opendm.infer.server import Service, build_app
from opendm.infer.worker import PolicyWorker
from opendm.runtime import INFERENCE_SEED_VARIABLE, inference_seed

logger = logging.getLogger(__name__)

M_TRIM_THRESHOLD: Final = -1
"""This and the next are malloc.h's numbers."""
M_MMAP_THRESHOLD: Final = -3
MAX_MMAP_THRESHOLD: Final = 32 * 2**20
"""The most that glibc takes."""
KEPT_BYTES: Final = 64 * 2**20
DRAIN_TIMEOUT_S: Final = 30
KEEP_ALIVE_S: Final = 15
BACKLOG: Final = 256


def serve(
    checkpoint: "str | Path", config: DM05InferenceConfig, base: "str | Path | None" = None
) -> None:
    """Serve until SIGTERM or SIGINT; what was accepted by then is answered, for 30 s.

    Args:
        checkpoint: folder of a full checkpoint or an adapter.
        config: of the service.
        base: where the base of an adapter is, if it was moved.

    Raises:
        ConfigError: a flag or the checkpoint does not fit, or the port is in use.
    """
    check_access(config)
    config.warn_of_unused()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.backend == "fast" and device.type != "cuda":
        raise ConfigError(
            "--inference-config.backend fast captures CUDA graphs and needs a GPU, and torch finds "
            "none here; use default"
        )
    with bound_socket(config) as listener:
        policy = load_policy(checkpoint, config, device, base)
        worker = PolicyWorker(
            policy,
            num_steps=config.diffusion_steps,
            max_queue=config.max_queue,
            max_batch=1 if config.backend == "fast" else config.max_batch_size,
            window_s=config.batch_window_ms / 1000,
            probe=lambda: warm_up(policy, config.diffusion_steps),
        )
        in_own_thread(lambda: warm_up(policy, config.diffusion_steps))
        settle()
        metadata = describe(policy, checkpoint, config)
        service = Service(worker, make_contract(policy, config), metadata, config.token)
        worker.start()
        try:
            run_server(service, listener)
        finally:
            worker.close()


def check_access(config: DM05InferenceConfig) -> None:
    """Refuse an address that others reach, unless there is a token or that is meant.

    Raises:
        ConfigError: neither token nor ``no_auth``.
    """
    token = config.token
    if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
        raise ConfigError("--inference-config.token must be printable ASCII and not empty")
    if token is not None and token != token.strip():
        raise ConfigError(
            "--inference-config.token has blanks around it, which HTTP drops from a header; leave "
            "them out"
        )
    if is_loopback(config.host) or config.token is not None:
        return
    if not config.no_auth:
        raise ConfigError(
            f"--inference-config.host {config.host} is reached from other machines; give "
            "--inference-config.token, or --inference-config.no-auth to serve anyone"
        )
    logger.warning("anyone who reaches %s:%d can use this service", config.host, config.port)


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine only; names other than localhost are not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def bound_socket(config: DM05InferenceConfig) -> Iterator[socket.socket]:
    """The service's port, taken before the weights are read; it does not listen yet.

    Raises:
        ConfigError: the port or the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio sends small packets at once only on sockets that name TCP; on others a reply's body
    # waits for the client's delayed acknowledgement of its head, which takes 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"port {config.port} of {config.host} cannot be used ({error}); choose another "
                "--inference-config.port"
            ) from error
        yield listener


def load_policy(
    checkpoint: "str | Path",
    config: DM05InferenceConfig,
    device: torch.device,
    base: "str | Path | None" = None,
) -> Policy:
    """The policy that the flags describe; what contradicts the checkpoint is refused.

    Raises:
        CheckpointError: a file of the checkpoint is missing or broken.
        ConfigError: a flag contradicts it.
    """
    policy = Policy.from_checkpoint(
        checkpoint,
        layout_file=config.layout_file,
        norm_stats_file=config.norm_stats_file,
        base=base,
        device=device,
        options=PolicyOptions(
            clip_to_bounds=config.clip_to_bounds,
            clip_actions=config.clip_actions,
            compose_eef_rot=config.compose_eef_rot,
            full_action_mask=config.full_action_mask,
            use_transformed_state=config.use_transformed_state,
            denorm_state=config.denorm_state,
        ),
    )
    check_against_checkpoint(policy, config)
    if config.backend == "fast":
        buckets = tuple(config.prefix_seq_len_buckets or BUCKETS)
        more = () if config.fast_prefix_len is None else (config.fast_prefix_len,)
        use_cuda_graphs(policy, config.diffusion_steps, buckets + more)
    return policy


def warm_up(policy: Policy, num_steps: int) -> None:
    """Act once on black pictures, so that no client waits for the first call.

    They are files, as a client's are: Pillow loads its decoders when the first is opened.

    Raises:
        CheckpointError: the actions are not finite.
    """
    layout = policy.layout
    size = len(policy.norm_stats.select(layout.robot_type)["state"].mean)
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    black = file.getvalue()
    observation = Observation(np.zeros(size), dict.fromkeys(layout.image_keys, black), "Wait")
    policy.act(observation, num_steps=num_steps, generator=torch.Generator().manual_seed(0))


def settle() -> None:
    """Spare requests what the process would do again and again on its own.

    The garbage collector no longer goes through modules, tokenizer and model, which live as long
    as the process and take it tens of milliseconds. The GNU C library keeps up to 64 MB of freed
    memory (mallopt(3)): otherwise each batch of eight gives back and fetches some 30 MB in pages,
    4 % of its time.
    """
    gc.collect()
    gc.freeze()
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def check_against_checkpoint(policy: Policy, config: DM05InferenceConfig) -> None:
    """Cameras and sizes come from the checkpoint; flags that were set must agree with it.

    Raises:
        CheckpointError: the statistics have other sizes than the layout.
        ConfigError: a flag differs from both its default and the checkpoint.
    """
    layout, published = policy.layout, DM05InferenceConfig()
    for flag, given, default, found in (
        ("output-action-dim", config.output_action_dim, published.output_action_dim,
         layout.action_dim),
        ("image-prompts", config.image_prompts, published.image_prompts, layout.image_prompts),
    ):  # fmt: skip
        if given not in (default, found):
            raise ConfigError(
                f"--inference-config.{flag} {given} contradicts the checkpoint, which has {found}; "
                "leave the flag out"
            )
    for robot in layout.robot_types() if layout.robots else [layout.robot_type]:
        of_robot = layout.for_robot(robot)
        profile = policy.norm_stats.select(of_robot.robot_type)
        size = len(profile["action"].mean) if "action" in profile else 0
        if size != of_robot.action_dim:
            raise CheckpointError(
                f"the statistics have {size} action dimensions and opendm.json "
                f"{of_robot.action_dim} for robot type {robot!r}; they belong to different "
                "checkpoints"
            )
        desc = of_robot.state_desc
        if desc is not None and "state" in profile and len(profile["state"].mean) != len(desc):
            raise CheckpointError(
                f"the statistics have {len(profile['state'].mean)} values of the state and "
                f"opendm.json {len(desc)} for robot type {robot!r}; they belong to different "
                "checkpoints"
            )
        if of_robot.action_mode == ActionMode.RELATIVE.value and of_robot.state_desc is None:
            raise CheckpointError(f"relative actions of robot type {robot!r} need state_desc")


def make_contract(policy: Policy, config: DM05InferenceConfig) -> Contract:
    """What requests are held against.

    Raises:
        ConfigError: the environment's seed is no seed.
    """
    side = config.max_image_side**2
    limits = Limits(
        max_body_bytes=config.max_body_mib * 2**20,
        max_image_pixels=side,
        max_request_pixels=max(3, len(policy.layout.image_keys)) * side,
        max_prompt_chars=config.max_prompt_chars,
    )
    history = min(config.max_history_images, policy.layout.max_history_images)
    seed = inference_seed()
    if seed is not None and seed > MAX_SEED:
        raise ConfigError(f"{INFERENCE_SEED_VARIABLE}={seed} is too large; allowed: to {MAX_SEED}")
    return Contract(
        layout=policy.layout,
        num_steps=config.diffusion_steps,
        max_history_images=history,
        shrink=policy.shrink,
        reserved=reserved_tokens(policy.processor),
        limits=limits,
        seed=seed,
    )


def describe(
    policy: Policy, checkpoint: "str | Path", config: DM05InferenceConfig
) -> dict[str, Any]:
    """The content of ``/metadata``."""
    layout = policy.layout
    return {
        "version": version("opendm"),
        "checkpoint": checkpoint_hash(checkpoint, used_instead(config)),
        "cameras": [
            {"key": key, "prompt": prompt}
            for key, prompt in zip(layout.image_keys, layout.image_prompts, strict=True)
        ],
        "state": layout.state_desc,
        "robot_types": layout.robot_types(),
        "action_mode": layout.action_mode,
        "action_dim": layout.action_dim,
        "horizon": layout.chunk_size,
        "num_steps": config.diffusion_steps,
        "history_images": config.max_history_images if layout.is_history else 0,
        "backend": config.backend,
    }


def used_instead(config: DM05InferenceConfig) -> dict[str, Path]:
    """Files that flags name in place of the checkpoint's own, by the own one's name."""
    files = {}
    if config.norm_stats_file is not None:
        files[NORM_STATS_FILE] = Path(config.norm_stats_file)
    if config.layout_file is not None:
        files[LAYOUT_FILE] = layout_path(Path(config.layout_file))
    return files


def checkpoint_hash(
    folder: "str | Path", instead: Mapping[str, Path] = MappingProxyType({})
) -> str:
    """SHA-256 over name and content of the files that decide what a checkpoint does."""
    files = {**{path.name: path for path in Path(folder).iterdir()}, **instead}
    total = hashlib.sha256()
    for name, path in sorted(files.items()):
        if Path(name).suffix in {".json", ".safetensors", ".jinja"} and name != "run.json":
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            total.update(f"{name} {content}\n".encode())
    return total.hexdigest()


class DrainingServer(uvicorn.Server):
    """A server that stops being ready before it stops."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: Any) -> None:
        """On SIGTERM and SIGINT."""
        self.service.is_draining = True
        super().handle_exit(sig, frame)


def make_server(service: Service) -> DrainingServer:
    """A server of the service's routes, not yet running."""
    config = uvicorn.Config(
        build_app(service),
        http=TimedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
        backlog=BACKLOG,
    )
    return DrainingServer(config, service)


def run_server(service: Service, listener: socket.socket) -> None:
    """Serve on a socket until a signal."""
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: None)  # uvicorn raises them again once it has drained
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # warns of every broken form
    host, port = listener.getsockname()[:2]
    logger.info("serving on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    make_server(service).run(sockets=[listener])
    say_end(service)


def say_end(service: Service) -> None:
    """Log whether everyone got an answer."""
    if service.num_dropped:
        logger.warning(
            "stopped; after %d s %d requests were not answered yet and got 503",
            DRAIN_TIMEOUT_S,
            service.num_dropped,
        )
    else:
        logger.info("stopped; every accepted request was answered")
