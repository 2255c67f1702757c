"""Angles that are recorded within one turn."""

import numpy as np


def wrap_angle(angle: np.ndarray) -> np.ndarray:
    """The same angles in [-pi, pi), in radians."""
    return (angle + np.pi) % (2 * np.pi) - np.pi
