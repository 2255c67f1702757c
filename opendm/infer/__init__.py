"""From a checkpoint folder and an observation to the robot's actions.

``opendm.infer.Policy`` is loaded when it is first asked for: the client of the service, which needs
no torch, lives here too.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opendm.infer.observation import Observation
    from opendm.infer.policy import Policy

__all__ = ["Observation", "Policy"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from opendm.infer.observation import Observation
    from opendm.infer.policy import Policy

    return {"Observation": Observation, "Policy": Policy}[name]
