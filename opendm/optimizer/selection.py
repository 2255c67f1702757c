"""Which parameters are orthogonalised, and the mark that tells it after sharding."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from opendm.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

Predicate = Callable[[str, "nn.Parameter"], bool]

WRAPPER_PARTS: Final = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
NOT_A_MATRIX: Final = ("embed_tokens", "embedding", "layernorm.weight", "_norm.weight", ".norm.")
ADAPTER: Final = "lora_"
EDGE_LAYERS: Final = (
    "embed", "wte", "wpe", "norm",
    "lm_head", "head.", "output.weight", "classifier", "score.", "qa_outputs",
)  # fmt: skip
"""Parts of names of first layers, norms and last layers in common libraries."""
SHAPE_MARK: Final = "_opendm_muon_shape"
NAME_MARK: Final = "_opendm_muon_name"


def canonical_name(name: str) -> str:
    """A parameter's name without what DDP, FSDP, checkpointing and ``torch.compile`` add."""
    for part in WRAPPER_PARTS:
        name = name.replace(part, "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def is_default_muon_parameter(name: str, param: "nn.Parameter") -> bool:
    """Whether a parameter is one of the Action Expert's matrices (238 in the released size).

    Adapters of LoRA are not: their two thin factors are no matrix of the network.
    """
    name = canonical_name(name)
    lowered = name.lower()
    in_expert = (
        name.startswith(("model.action_expert.", "action_expert."))
        or ".model.action_expert." in name
    )
    is_matrix = ".layers." in lowered and lowered.endswith(".weight")
    excluded = ADAPTER in lowered or any(part in lowered for part in NOT_A_MATRIX)
    return param.requires_grad and param.ndim == 2 and in_expert and is_matrix and not excluded


def is_hidden_matrix(name: str, param: "nn.Parameter") -> bool:
    """A predicate for other networks: trainable matrices but embeddings, heads, norms, LoRA."""
    lowered = canonical_name(name).lower()
    excluded = ADAPTER in lowered or any(part in lowered for part in EDGE_LAYERS)
    return param.requires_grad and param.ndim == 2 and lowered.endswith("weight") and not excluded


def mark_muon_parameters(model: "nn.Module", predicate: Predicate | None = None) -> list[str]:
    """Write name and shape of each selected matrix on its parameter, before a model is sharded.

    FSDP1 with ``use_orig_params`` and DDP keep the marks. Marks of an earlier call are removed.

    Args:
        model: the model, not yet wrapped.
        predicate: name and parameter to whether Muon takes it; the Action Expert's matrices if
            it is None.

    Returns:
        The names of the marked parameters.

    Raises:
        ConfigError: nothing is selected, or something that is no matrix.
    """
    chosen = predicate or is_default_muon_parameter
    marked = []
    for name, param in model.named_parameters():
        vars(param).pop(SHAPE_MARK, None)
        vars(param).pop(NAME_MARK, None)
        if chosen(name, param):
            check_is_matrix(name, tuple(param.shape))
            vars(param)[SHAPE_MARK] = tuple(param.shape)
            vars(param)[NAME_MARK] = canonical_name(name)
            marked.append(canonical_name(name))
    if not marked:
        raise ConfigError(nothing_selected([name for name, _ in model.named_parameters()]))
    return marked


def check_is_matrix(name: str, shape: tuple[int, ...]) -> None:
    """Refuse what cannot be orthogonalised.

    Raises:
        ConfigError: the shape has not two axes, or an axis is empty.
    """
    if len(shape) != 2 or 0 in shape:
        raise ConfigError(
            f"Muon cannot take {name} of shape {shape}: it orthogonalises matrices with two "
            "non-empty axes; leave it out in the predicate, so that AdamW takes it"
        )


def nothing_selected(names: list[str]) -> str:
    """What to say when a predicate selects nothing."""
    examples = ", ".join(names[:3]) or "none at all"
    if any(ADAPTER in name.lower() for name in names):
        return (
            f"no parameter is selected for Muon among {len(names)} ({examples}, ...): LoRA's "
            "adapters go to AdamW. Use AdamW (--optimizer-config.optim adamw), or give a predicate "
            "(should_use_muon) that takes them"
        )
    return (
        f"no parameter is selected for Muon among {len(names)} ({examples}, ...); the default "
        "takes the matrices of an Action Expert. For another network give "
        "predicate=is_hidden_matrix of opendm.optimizer, or a function of name and parameter"
    )
