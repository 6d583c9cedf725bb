"""The C++ kernel of linear_scan against the formula in torch. Shapes: B rows, T steps, H channels."""

import pytest
import torch

from lightning_accel.ops import linear_scan
from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.scan import linear_scan_reference

pytestmark = pytest.mark.usefixtures("native")

SHAPES = [(5, 7, 3), (1, 1, 2), (1, 211, 37), (2, 1000, 18), (3, 64, 1), (33, 20, 65)]


def inputs(shape, dtype=torch.float64, optional=True):
    num_rows, num_steps, num_channels = shape
    gate = (torch.rand(shape, dtype=torch.float64) * 1.05).to(dtype)
    value = torch.randn(shape, dtype=torch.float64).to(dtype)
    state = torch.randn(num_rows, num_channels, dtype=torch.float64).to(dtype) if optional else None
    starts = torch.rand(num_rows, num_steps) < 0.2 if optional else None
    return [None if x is None else x.requires_grad_(x.is_floating_point()) for x in (gate, value, state, starts)]


def results(scan, arguments, probe):
    learned = [x for x in arguments if x is not None and x.requires_grad]
    out = scan(*arguments)
    return out, *torch.autograd.grad(out, learned, probe)


def native_scan(gate, value, state, starts):
    assert KERNELS.serves(gate.device)
    return torch.ops.lightning_accel_native.linear_scan(gate, value, state, starts)


def both(arguments):
    """What the kernel gives, and what the formula does."""
    probe = torch.randn_like(arguments[1])
    with KERNELS.switched_off():
        expected = results(linear_scan, arguments, probe)
    return results(linear_scan, arguments, probe), expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("optional", [False, True], ids=["plain", "state and starts"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_matches_the_formula(shape, optional, dtype):
    actual, expected = both(inputs(shape, dtype, optional))
    half = dtype in (torch.bfloat16, torch.float16)
    torch.testing.assert_close(actual, expected, **({"rtol": 0.02, "atol": 0.02} if half else {}))
    assert [x.stride() for x in actual] == [x.stride() for x in expected]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_time_major_memory_and_its_gradient(shape, threads):
    arguments = inputs(shape)
    arguments[:2] = (x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in arguments[:2])
    probe = torch.randn(shape[1], shape[0], shape[2], dtype=torch.float64).transpose(0, 1)
    torch.set_num_threads(threads)
    try:
        actual = results(linear_scan, arguments, probe)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(actual, results(linear_scan_reference, arguments, probe))
    assert actual[0].stride() == arguments[1].stride() == actual[1].stride()


def test_any_strides_do():
    gate, _, state, starts = inputs((4, 9, 3))
    wide = torch.randn(3, 9, 8, dtype=torch.float64, requires_grad=True)
    state, starts = state.detach().T.contiguous().T.requires_grad_(), starts.T.contiguous().T
    torch.testing.assert_close(*both([gate[:1, :, :1].expand(4, 9, 3), wide.permute(2, 1, 0)[::2], state, starts]))
    out = linear_scan(gate, gate, state, starts)  # of a sum, whose gradient is one number
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), gate),
        torch.autograd.grad(linear_scan_reference(gate, gate, state, starts).sum(), gate),
    )


@pytest.mark.parametrize("shape", [(1, 4000, 8), (1, 2000, 200), (40, 300, 64), (3, 1000, 50)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_threads_gives_equal_bits(shape, dtype):
    arguments = inputs(shape, dtype)
    probe = torch.randn(shape).to(dtype)
    expected = results(linear_scan, arguments, probe)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        try:
            actual = results(linear_scan, arguments, probe)
        finally:
            torch.set_num_threads(1)
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("shape", [(1, 16384, 8), (40, 2000, 64)], ids=str)
def test_float32_is_as_near_to_float64_as_the_formula(shape):
    gate = torch.sigmoid(torch.randn(shape, dtype=torch.float64) + 3)
    arguments = [gate, torch.randn(shape, dtype=torch.float64), None, torch.rand(shape[:2]) < 1e-3]
    exact = linear_scan(*arguments)
    narrow = [x.float() if x is not None and x.is_floating_point() else x for x in arguments]
    with KERNELS.switched_off():
        bound = (linear_scan(*narrow) - exact).abs().max()
    assert (linear_scan(*narrow) - exact).abs().max() < 1.2 * bound


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_what_is_not_finite_stays_in_its_sequence(bad):
    gate, value, state, starts = inputs((2, 40, 20), torch.float32)
    starts[:] = False
    starts[:, 10] = starts[:, 30] = True
    state.data[:] = bad
    gate.data[:, 10] = bad  # at a start no gate counts
    value.data[0, 20, 5] = bad
    out = linear_scan(gate, value, state, starts)
    assert out[:, 30:].isfinite().all()
    assert out[1, 10:].isfinite().all()
    assert not out[0, 20:30, 5].isfinite().any()
    assert not out[:, :10].isfinite().any()
    d_gate, d_value = torch.autograd.grad(out, (gate, value), torch.ones_like(out))
    assert d_value[:, 10:].isfinite().all()
    assert d_gate[:, 30:].isfinite().all()
    assert (d_gate[:, 10] == 0).all()


def test_native_op_is_registered_right():
    assert KERNELS.serves(torch.device("cpu"))
    time_major = [x.detach().transpose(0, 1).requires_grad_() for x in inputs((5, 3, 2), torch.float32, False)[:2]]
    for arguments in (inputs((3, 5, 2), torch.float32), (*time_major, None, None), inputs((2, 0, 3), torch.float32)):
        torch.library.opcheck(torch.ops.lightning_accel_native.linear_scan.default, arguments)
    gate, value, state, starts = (x.detach() for x in inputs((3, 5, 2)))
    operation = torch.ops.lightning_accel_native.linear_scan_backward.default
    torch.library.opcheck(operation, (value, gate, value, state, starts))


def test_native_op_has_derivatives_of_any_order():
    *learned, starts = inputs((2, 5, 3))
    torch.autograd.gradcheck(lambda *x: native_scan(*x, starts), learned)
    torch.autograd.gradgradcheck(lambda *x: native_scan(*x, starts), learned)


def test_native_op_refuses_what_does_not_fit():
    gate, value, state, starts = (x.detach() for x in inputs((3, 5, 2)))
    for wrong, message in [
        ((gate[:, :4], value, None, None), r"gate and value must both be \(B, T, H\)"),
        ((gate.float(), value, None, None), "must have one dtype"),
        ((gate, value, state[:2], None), r"state must be \(B, H\)"),
        ((gate, value, None, starts.long()), r"starts must be \(B, T\) bool"),
        ((gate.long(), value.long(), None, None), "needs float32"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            native_scan(*wrong)
