"""Array types with named axes, and what the axis letters mean.

Letters: ``B`` samples of a batch, ``L`` prefix tokens (images and text), ``T`` action steps of a
chunk, ``A`` action dimensions (32 after padding), ``D`` dimensions of one robot, ``V`` camera views
of a batch, ``H`` attention heads, ``K`` key/value heads, ``E`` head size.
"""

from typing import TypeAlias

from jaxtyping import Bool, Float, Int
from torch import Tensor

Tokens: TypeAlias = Int[Tensor, "B L"]
TokenMask: TypeAlias = Bool[Tensor, "B L"]
Actions: TypeAlias = Float[Tensor, "B T A"]
ActionMask: TypeAlias = Bool[Tensor, "B #T A"]
Time: TypeAlias = Float[Tensor, " B"]
Loss: TypeAlias = Float[Tensor, " B"]
