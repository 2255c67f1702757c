"""Orthogonalisation of a matrix by the quintic Newton-Schulz iteration, in the cheapest exact form.

With ``X`` of ``n`` rows and at least as many columns, one step is ``X <- (aI + bR + cR^2) X`` where
``R = X X^T``. The *standard* form is that. The *gram* form leaves ``X`` alone for two or three
steps: ``R`` is carried by ``R <- S R S`` with ``S = aI + bR + cR^2``, the product of all ``S`` is
gathered in ``Q``, and only then ``X <- Q X``, after which ``R`` is computed anew (the restart that
keeps rounding from growing). Everything but ``Q X`` is a polynomial of ``R``, hence symmetric.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from opendm.optimizer.symmetric import product, symmetric_flops, symmetric_product, workspace

NsDtype = Literal["fp32", "tf32", "fp16", "bf16"]

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""``a, b, c`` of the quintic: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/."""
GRAM_ASPECT: Final = 2
"""Columns per row from which the gram form costs fewer operations than the standard one."""
STEPS_PER_SEGMENT: Final = 2
"""Gram steps between restarts, where rounding errors of ``R`` grow by a^2 a step against the small
singular values. An odd step is taken in the first segment, where ``R`` is smallest: three and two
steps are 8 times as accurate as two and three on log-spaced singular values, at equal cost."""
TORCH_DTYPES: Final = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@torch.no_grad()
def scale_to_unit_norm(
    matrix: Float[Tensor, "*batch rows cols"], eps: float = 1e-7
) -> tuple[Float32[Tensor, "*batch rows cols"], Bool[Tensor, "*batch"]]:
    """Divide a matrix by its largest magnitude, then by its Frobenius norm, in float32.

    The first division makes the result independent of scale from 1e-38 to 1e30; after it ``eps``
    only keeps a zero matrix at zero.

    Args:
        matrix: any floating dtype and strides; not modified.
        eps: the least norm that is divided by.

    Returns:
        The scaled matrix (zeros where some element is not finite), and whether all elements are
        finite. The bits depend on the values alone, not on strides or alignment, and those of a
        transposed matrix are the transposed bits.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if is_tall else matrix
    unit = torch.empty(wide.shape, dtype=torch.float32, device=wide.device).copy_(wide)
    # Not abs(): it would write a third matrix. Both extremes propagate NaN.
    largest = torch.maximum(unit.amax(dim=(-2, -1)), -unit.amin(dim=(-2, -1)))[..., None, None]
    finite = largest.isfinite()
    unit.masked_fill_(~finite, 0.0)
    unit.div_(torch.where(finite & (largest > 0), largest, 1.0))
    # Row by row: torch's float32 norm of all elements at once is off by 1e-4 at 1024x4096 (CPU).
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(unit, dim=-1), dim=-1)
    unit.div_(norm.clamp_min(eps)[..., None, None])
    return unit.mT if is_tall else unit, finite[..., 0, 0]


@torch.no_grad()
def newton_schulz(
    unit: Float[Tensor, "*batch rows cols"], *, steps: int, ns_dtype: NsDtype = "fp32"
) -> Float32[Tensor, "*batch rows cols"]:
    """Move the singular values of a matrix towards one.

    Args:
        unit: matrix of Frobenius norm one (or zero), as ``scale_to_unit_norm`` returns it; not
            modified. Leading axes are a batch.
        steps: quintic steps; five bring most singular values into 0.7 ... 1.2.
        ns_dtype: dtype of the products. ``fp32`` is IEEE float32 whatever the global TF32 setting;
            ``tf32`` allows TF32 on CUDA and equals ``fp32`` elsewhere.

    Returns:
        The result in float32. The bits of a tall matrix are the transposed bits of the wide one.
    """
    is_tall = unit.shape[-2] > unit.shape[-1]
    wide = unit.mT if is_tall else unit
    result = torch.empty(wide.shape, dtype=torch.float32, device=wide.device)
    with (
        torch.autocast(unit.device.type, enabled=False),
        _matmul_precision(unit.device.type, ns_dtype),
    ):
        if wide.ndim == 2:
            result.copy_(_iterate(wide, steps, ns_dtype))
        elif wide.device.type == "cpu":
            # One after another is faster there than batched products.
            for one, its_result in zip(wide.flatten(0, -3), result.flatten(0, -3), strict=True):
                its_result.copy_(_iterate(one, steps, ns_dtype))
        else:
            result.flatten(0, -3).copy_(_iterate(wide.flatten(0, -3), steps, ns_dtype))
    return result.mT if is_tall else result


def zeropower_via_newtonschulz5(
    matrix: Float[Tensor, "*batch rows cols"], steps: int = 5, eps: float = 1e-7
) -> Float32[Tensor, "*batch rows cols"]:
    """Orthogonalise a matrix of any scale approximately: ``U S V^T`` becomes about ``U V^T``.

    Args:
        matrix: any floating dtype; leading axes are a batch.
        steps: quintic Newton-Schulz steps.
        eps: guards 0/0 only.

    Returns:
        The result in float32; zeros for a matrix that is zero or holds a non-finite element.
    """
    unit, _ = scale_to_unit_norm(matrix, eps)
    return newton_schulz(unit, steps=steps)


def orthogonalization_flops(rows: int, cols: int, *, steps: int) -> int:
    """Floating-point operations of ``newton_schulz`` in float32 on one matrix."""
    n, m = min(rows, cols), max(rows, cols)
    gram, square, apply = symmetric_flops(n, m), symmetric_flops(n, n), 2 * n * n * m
    if not _uses_gram_form(n, m, "fp32"):
        return steps * (gram + square + apply)
    # R, then per step a square, and per step but the first R <- S R S and Q <- Q S, then Q X.
    return sum(
        gram + length * square + (length - 1) * 3 * square + apply for length in _segments(steps)
    )


def _uses_gram_form(rows: int, cols: int, ns_dtype: NsDtype) -> bool:
    # bfloat16 has too few bits for R: twice the error of the standard form on Gaussian matrices.
    return cols >= GRAM_ASPECT * rows and ns_dtype != "bf16"


def _segments(steps: int) -> list[int]:
    first = min(steps, STEPS_PER_SEGMENT + steps % STEPS_PER_SEGMENT)
    return [first] * (first > 0) + [STEPS_PER_SEGMENT] * ((steps - first) // STEPS_PER_SEGMENT)


def _iterate(
    wide: Float[Tensor, "*batch rows cols"], steps: int, ns_dtype: NsDtype
) -> Float[Tensor, "*batch rows cols"]:
    rows, cols = wide.shape[-2:]
    # A copy of its own: kernels may round differently with other strides or another alignment.
    like = wide.new_empty(0, dtype=TORCH_DTYPES[ns_dtype])
    work = workspace(like, *wide.shape).copy_(wide)
    form = gram_form if _uses_gram_form(rows, cols, ns_dtype) else standard_form
    return form(work, steps)


def standard_form(
    wide: Float[Tensor, "*batch rows cols"], steps: int
) -> Float[Tensor, "*batch rows cols"]:
    """``steps`` times ``X <- aX + (bR + cR^2) X``; may overwrite its argument."""
    a, b, c = COEFFICIENTS
    square = (*wide.shape[:-1], wide.shape[-2])
    gram, poly, spare = (workspace(wide, *shape) for shape in (square, square, wide.shape))
    for _ in range(steps):
        symmetric_product(wide, wide.mT, out=gram)
        symmetric_product(gram, gram, out=poly, add=gram, beta=b, alpha=c)
        product(poly, wide, out=spare, add=wide, beta=a)
        wide, spare = spare, wide
    return wide


def gram_form(
    wide: Float[Tensor, "*batch rows cols"], steps: int
) -> Float[Tensor, "*batch rows cols"]:
    """As ``standard_form``, with ``X`` touched only where a segment begins and ends."""
    a, b, c = COEFFICIENTS
    square = (*wide.shape[:-1], wide.shape[-2])
    gram, poly, total, spare = (workspace(wide, *square) for _ in range(4))
    spare_wide = workspace(wide, *wide.shape)
    for length in _segments(steps):
        symmetric_product(wide, wide.mT, out=gram)
        for step in range(length):
            symmetric_product(gram, gram, out=poly, add=gram, beta=b, alpha=c)
            if step == 0:
                total.copy_(poly).diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                symmetric_product(total, poly, out=spare, add=total, beta=a)
                total, spare = spare, total
            if step + 1 < length:
                symmetric_product(gram, poly, out=spare, add=gram, beta=a)
                symmetric_product(spare, poly, out=gram, add=spare, beta=a)
        product(total, wide, out=spare_wide)
        wide, spare_wide = spare_wide, wide
    return wide


@contextmanager
def _matmul_precision(device_type: str, ns_dtype: NsDtype) -> Iterator[None]:
    is_cuda = device_type == "cuda"
    backends = torch.backends.cuda if is_cuda else torch.backends.mkldnn
    matmul = backends.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if is_cuda and ns_dtype == "tf32" else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
