"""The two precision policies by name, and the dtypes that each one fixes.

Dtypes are named by strings so that the configuration layer stays free of torch; the model turns
them into ``torch.dtype`` where it needs them.
"""

from typing import Final

BF16_MIXED_PRECISION_POLICY: Final = "bf16_mixed"
FP32_MIXED_PRECISION_POLICY: Final = "fp32_mixed"
PRECISION_POLICIES: Final = (BF16_MIXED_PRECISION_POLICY, FP32_MIXED_PRECISION_POLICY)

# Of fp32_mixed: weights are stored in float32, autocast computes in bfloat16, FSDP casts nothing,
# and what autocast leaves in float32 is not rounded to TF32 either.
MODEL_DTYPE: Final = "float32"
COMPUTE_DTYPE: Final = "bfloat16"
FSDP_MIXED_PRECISION: Final = "fp32"
TF32_ENABLED: Final = False
