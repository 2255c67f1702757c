"""Whether normalised values look normalised: a loss in the thousands starts with these."""

from typing import Final

import numpy as np

MAX_MEAN: Final = 5.0
MAX_VALUE: Final = 50.0


def find_scale_problems(
    values: np.ndarray, mask: np.ndarray | None = None, name: str = "action"
) -> list[str]:
    """What is wrong with the scale of a normalised batch; wrong statistics are the usual reason.

    Args:
        values: ``[..., D]``.
        mask: bool, of the same shape: real values; all by default.
        name: what they are, for the texts.

    Returns:
        One line per dimension that has values that are not finite, a mean magnitude above 5, or a
        value beyond 50; none where all is well.
    """
    flat = np.asarray(values, np.float64).reshape(-1, values.shape[-1])
    is_real = np.ones(flat.shape, bool) if mask is None else np.asarray(mask).reshape(flat.shape)
    problems = []
    for dim in range(flat.shape[1]):
        column = np.abs(flat[is_real[:, dim], dim])
        if column.size and (reason := _reason(column)):
            problems.append(f"normalised {name} dimension {dim} {reason}")
    return problems


def _reason(magnitudes: np.ndarray) -> str | None:
    if not np.isfinite(magnitudes).all():
        return "has values that are not finite"
    if magnitudes.max() > MAX_VALUE:
        return f"reaches {magnitudes.max():.4g} (up to {MAX_VALUE:g} is plausible)"
    if magnitudes.mean() > MAX_MEAN:
        return f"has a mean magnitude of {magnitudes.mean():.4g} (up to {MAX_MEAN:g} is plausible)"
    return None
