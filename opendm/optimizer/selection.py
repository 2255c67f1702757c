"""Which parameters are orthogonalised: the weight matrices inside the Action Expert's layers."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import nn

WRAPPER_PREFIXES: Final = ("module.", "_fsdp_wrapped_module.", "_orig_mod.")
EXCLUDED: Final = ("embed_tokens", "embedding", "layernorm.weight", "_norm.weight", ".norm.")


def is_default_muon_parameter(name: str, param: "nn.Parameter") -> bool:
    """Whether a parameter is one of the Action Expert's matrices (238 in the released size)."""
    stripped = True
    while stripped:
        stripped = False
        for prefix in WRAPPER_PREFIXES:
            if name.startswith(prefix):
                name, stripped = name.removeprefix(prefix), True
    lowered = name.lower()
    in_expert = (
        name.startswith(("model.action_expert.", "action_expert."))
        or ".model.action_expert." in name
    )
    is_matrix = ".layers." in lowered and lowered.endswith(".weight")
    excluded = any(part in lowered for part in EXCLUDED)
    return param.requires_grad and param.ndim == 2 and in_expert and is_matrix and not excluded
