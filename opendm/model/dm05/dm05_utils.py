"""The public helper names of the model, each from the file that defines it."""

from opendm.model.dm05.configuration import validate_action_config_compatible
from opendm.model.dm05.flow_matching import (
    fused_linear_euler_update,
    masked_flow_matching_loss,
    posemb_sincos,
)
from opendm.model.dm05.precision import (
    configure_fp32_precision_runtime,
    dm05_autocast,
    linear_fp32,
)
from opendm.model.dm05.visibility import (
    make_suffix_attn_mask,
    mask_history_pad_tokens_in_attention,
)

__all__ = [
    "configure_fp32_precision_runtime",
    "dm05_autocast",
    "fused_linear_euler_update",
    "linear_fp32",
    "make_suffix_attn_mask",
    "mask_history_pad_tokens_in_attention",
    "masked_flow_matching_loss",
    "posemb_sincos",
    "validate_action_config_compatible",
]
