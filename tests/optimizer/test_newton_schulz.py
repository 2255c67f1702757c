"""Orthogonalisation against an independent float64 reference, its limits and its invariances."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from opendm.optimizer import newton_schulz as ns
from opendm.optimizer.symmetric import LEAF_ROWS, product, symmetric_product, workspace

SHAPES = ((96, 96), (130, 200), (130, 300), (200, 130), (300, 130), (65, 1000))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def quintic_of_singular_values(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Apply the scalar iteration to the singular values; nothing in common with the module."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    norm = s.square().sum().sqrt()
    s = s / norm if norm > 0 else s
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ vt


def relative(result: torch.Tensor, reference: torch.Tensor) -> float:
    return ((result.double() - reference).norm() / reference.double().norm()).item()


def with_singular_values(values: torch.Tensor, cols: int) -> torch.Tensor:
    rows = len(values)
    u, _ = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(cols, rows, dtype=torch.float64))
    return (u * values @ v.T).float()


@pytest.mark.parametrize("shape", SHAPES)
def test_it_applies_the_quintic_to_the_singular_values(shape):
    matrix = torch.randn(shape)
    result = ns.zeropower_via_newtonschulz5(matrix)
    assert result.dtype == torch.float32
    assert result.shape == matrix.shape
    assert relative(result, quintic_of_singular_values(matrix)) < 4e-6


@pytest.mark.parametrize("shape", [(96, 128), (96, 300)])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 10])
def test_any_number_of_steps(steps, shape):
    matrix = torch.randn(shape)
    result = ns.zeropower_via_newtonschulz5(matrix, steps)
    assert relative(result, quintic_of_singular_values(matrix, steps)) < 1e-5


@pytest.mark.parametrize("ns_dtype", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", [(100, 100), (100, 400)])
def test_well_conditioned_input_comes_out_near_orthogonal(shape, ns_dtype):
    values = torch.linspace(0.1, 1, shape[0], dtype=torch.float64)
    unit, _ = ns.scale_to_unit_norm(with_singular_values(values, shape[1]))
    result = ns.newton_schulz(unit, steps=5, ns_dtype=ns_dtype)
    assert result.dtype == torch.float32
    singular = torch.linalg.svdvals(result)
    assert singular.min() > 0.65
    assert singular.max() < 1.25


# relF bounds against float64 of (fp32, fp16), from the measurements of the design.
SPECTRA = {
    "log-spaced": (torch.logspace(0, -4, 128, dtype=torch.float64), 1e-5, 2e-2),
    "one large": (torch.tensor([1.0] + [1e-2] * 127, dtype=torch.float64), 1e-5, 1e-2),
    "rank 8": (torch.tensor([1.0] * 8 + [1e-6] * 120, dtype=torch.float64), 6e-5, 8e-2),
    "rank 1": (torch.tensor([1.0] + [0.0] * 127, dtype=torch.float64), 3e-4, 3e-1),
}


@pytest.mark.parametrize("cols", [128, 512])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("form", [ns.standard_form, ns.gram_form])
def test_hard_spectra_stay_accurate(form, spectrum, cols):
    values, fp32_bound, fp16_bound = SPECTRA[spectrum]
    matrix = with_singular_values(values, cols)
    reference = quintic_of_singular_values(matrix)
    unit, _ = ns.scale_to_unit_norm(matrix)
    assert relative(form(unit.clone(), 5), reference) < fp32_bound
    assert relative(form(unit.half(), 5), reference) < fp16_bound


@pytest.mark.parametrize("cols", [128, 512])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("ns_dtype", ["fp16", "bf16"])
def test_half_precision_never_blows_up(spectrum, cols, ns_dtype):
    matrix = with_singular_values(SPECTRA[spectrum][0], cols)
    unit, _ = ns.scale_to_unit_norm(matrix)
    result = ns.newton_schulz(unit, steps=5, ns_dtype=ns_dtype)
    largest = torch.linalg.matrix_norm(quintic_of_singular_values(matrix), 2)
    assert torch.linalg.matrix_norm(result.double(), 2) < 1.1 * largest


def test_the_two_forms_agree():
    unit, _ = ns.scale_to_unit_norm(torch.randn(160, 640))
    assert relative(ns.gram_form(unit.clone(), 5), ns.standard_form(unit.clone(), 5)) < 5e-6


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e-7, 1e10, 1e20, 1e30, 1e37])
def test_the_scale_of_the_input_is_immaterial(scale):
    matrix = torch.randn(40, 90)
    reference = ns.zeropower_via_newtonschulz5(matrix)
    assert relative(ns.zeropower_via_newtonschulz5(matrix * scale), reference) < 3e-6


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (1, 4)])
def test_zero_in_zero_out(shape):
    assert torch.equal(ns.zeropower_via_newtonschulz5(torch.zeros(shape)), torch.zeros(shape))
    assert ns.scale_to_unit_norm(torch.zeros(shape))[1]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_non_finite_element_gives_zeros_for_its_matrix_alone(bad):
    matrices = torch.randn(3, 40, 20)
    matrices[1, 5, 3] = bad
    _, finite = ns.scale_to_unit_norm(matrices)
    assert finite.tolist() == [True, False, True]
    result = ns.zeropower_via_newtonschulz5(matrices)
    assert torch.equal(result[1], torch.zeros(40, 20))
    for healthy in (0, 2):
        assert torch.equal(result[healthy], ns.zeropower_via_newtonschulz5(matrices[healthy]))


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (50, 1)])
def test_a_single_row_or_column_keeps_its_direction(shape):
    matrix = torch.randn(shape)
    gain = 1.0
    for _ in range(5):
        gain = 3.4445 * gain - 4.7750 * gain**3 + 2.0315 * gain**5
    expected = matrix / matrix.norm() * gain
    torch.testing.assert_close(ns.zeropower_via_newtonschulz5(matrix), expected)


@pytest.mark.parametrize("shape", [(1, 70), (130, 200), (130, 300)])
@pytest.mark.parametrize("ns_dtype", ["fp32", "fp16", "bf16"])
def test_tall_is_the_transpose_of_wide_to_the_bit(shape, ns_dtype):
    wide = torch.randn(shape)
    unit, _ = ns.scale_to_unit_norm(wide)
    tall_unit, _ = ns.scale_to_unit_norm(wide.T.contiguous())
    assert torch.equal(tall_unit, unit.T)
    tall = ns.newton_schulz(tall_unit.contiguous(), steps=5, ns_dtype=ns_dtype)
    assert torch.equal(tall, ns.newton_schulz(unit, steps=5, ns_dtype=ns_dtype).T)


@pytest.mark.parametrize("shape", [(130, 131), (61, 300), (300, 61)])
def test_the_bits_do_not_depend_on_where_the_matrix_lies(shape):
    matrix = torch.randn(shape)
    expected = ns.zeropower_via_newtonschulz5(matrix)
    rows, cols = shape
    for offset in (1, 3, 7):
        flat = torch.randn(matrix.numel() + 16)
        flat[offset : offset + matrix.numel()] = matrix.flatten()
        at_odd_offset = flat[offset : offset + matrix.numel()].view(shape)
        padded = torch.randn(rows + offset, cols + offset)
        padded[offset:, offset:] = matrix
        for view in (at_odd_offset, padded[offset:, offset:], matrix.T.contiguous().T):
            assert torch.equal(ns.zeropower_via_newtonschulz5(view), expected)
            unit, _ = ns.scale_to_unit_norm(view)
            moved = torch.empty(matrix.numel() + 16)[offset:][: matrix.numel()].view(shape)
            assert torch.equal(ns.newton_schulz(moved.copy_(unit), steps=5), expected)


@pytest.mark.parametrize("shape", [(2, 3, 40, 30), (6, 30, 90), (1, 70, 70)])
def test_a_stack_is_its_matrices_one_by_one(shape):
    stack = torch.randn(shape)
    result = ns.zeropower_via_newtonschulz5(stack)
    alone = [ns.zeropower_via_newtonschulz5(matrix) for matrix in stack.flatten(0, -3)]
    assert torch.equal(result, torch.stack(alone).view(shape))


@pytest.mark.parametrize("form", [ns.standard_form, ns.gram_form])
def test_batched_products_agree_with_single_ones(form):
    stack, _ = ns.scale_to_unit_norm(torch.randn(3, 140, 300))
    alone = torch.stack([form(matrix.clone(), 5) for matrix in stack])
    assert relative(form(stack.clone(), 5), alone) < 5e-6


def test_inputs_are_not_modified():
    for shape in SHAPES:
        matrix = torch.randn(shape)
        before = matrix.clone()
        unit, _ = ns.scale_to_unit_norm(matrix)
        unit_before = unit.clone()
        ns.newton_schulz(unit, steps=5)
        assert torch.equal(matrix, before)
        assert torch.equal(unit, unit_before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_read_as_float32(dtype):
    matrix = torch.randn(20, 50).to(dtype)
    expected = ns.zeropower_via_newtonschulz5(matrix.float())
    assert torch.equal(ns.zeropower_via_newtonschulz5(matrix), expected)


def test_autocast_and_gradients_change_nothing():
    matrix = torch.randn(130, 300)
    expected = ns.zeropower_via_newtonschulz5(matrix)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ns.zeropower_via_newtonschulz5(matrix), expected)
    result = ns.zeropower_via_newtonschulz5(matrix.requires_grad_())
    assert torch.equal(result, expected)
    assert not result.requires_grad


@pytest.fixture
def reduced_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_float32_is_ieee_whatever_the_global_setting(device, reduced_precision):
    matmul = {"cpu": torch.backends.mkldnn.matmul, "cuda": torch.backends.cuda.matmul}[device]
    outside = matmul.fp32_precision
    assert outside != "ieee"
    with ns._matmul_precision(device, "fp32"):
        assert matmul.fp32_precision == "ieee"
    assert matmul.fp32_precision == outside
    with ns._matmul_precision(device, "tf32"):
        assert matmul.fp32_precision == ("tf32" if device == "cuda" else "ieee")
    with pytest.raises(KeyError), ns._matmul_precision(device, "fp32"):
        raise KeyError
    assert matmul.fp32_precision == outside
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("ns_dtype", "bound"), [("fp32", 1e-5), ("tf32", 1e-2), ("fp16", 1e-2)])
def test_cuda_reaches_the_accuracy_of_its_dtype(ns_dtype, bound, reduced_precision):
    stack = torch.randn(2, 256, 1024)
    unit, _ = ns.scale_to_unit_norm(stack.cuda())
    result = ns.newton_schulz(unit, steps=5, ns_dtype=ns_dtype).cpu()
    for one, its_result in zip(stack, result, strict=True):
        assert relative(its_result, quintic_of_singular_values(one)) < bound


class _NoHostSync(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert not any(word in name for word in ("_local_scalar_dense", "item", "is_nonzero"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ns_dtype", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", [(70, 70), (70, 150), (150, 70), (2, 70, 150)])
def test_nothing_waits_for_the_device(shape, ns_dtype):
    with _NoHostSync():
        unit, _ = ns.scale_to_unit_norm(torch.randn(shape))
        ns.newton_schulz(unit, steps=5, ns_dtype=ns_dtype)
    with pytest.raises(AssertionError), _NoHostSync():
        bool(torch.ones(()))


@pytest.mark.parametrize("shape", [*SHAPES, (1, 9), (512, 1024)])
@pytest.mark.parametrize("steps", [1, 2, 5, 6])
def test_the_flop_count_is_that_of_the_products(shape, steps):
    rows, cols = shape[-2:]
    with FlopCounterMode(display=False) as counter:
        ns.zeropower_via_newtonschulz5(torch.randn(rows, cols), steps)
    assert counter.get_total_flops() == ns.orthogonalization_flops(rows, cols, steps=steps)


def test_the_flop_count_at_aspect_four_is_half_of_the_plain_form():
    plain = 5 * (4 * 1024**2 * 4096 + 2 * 1024**3)
    assert ns.orthogonalization_flops(4096, 1024, steps=5) < plain / 2


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 300, 513])
@pytest.mark.parametrize("sums", [{}, {"beta": -2.0, "alpha": 0.5}])
def test_a_symmetric_product_is_the_product(rows, sums):
    left, add = torch.randn(rows, 90), torch.randn(rows, rows)
    if sums:
        sums = {"add": add + add.T, **sums}
    out, expected = workspace(left, rows, rows), torch.empty(rows, rows)
    symmetric_product(left, left.T, out=out, **sums)
    product(left, left.T, out=expected, **sums)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    outside_of_leaves = torch.block_diag(*[torch.ones(LEAF_ROWS, LEAF_ROWS)] * 5)[:rows, :rows] == 0
    assert torch.equal(out[outside_of_leaves], out.T[outside_of_leaves])
