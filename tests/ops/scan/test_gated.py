from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import func
from torch.autograd import gradcheck, gradgradcheck

from lightning_accel.ops import gated_scan, linear_scan
from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.scan.linear import NUM_GATES, gated_scan_reference
from tests.tolerance import rounding

SHAPES = [(5, 7, 3), (1, 1, 2), (1, 211, 37), (2, 300, 18), (3, 64, 1), (33, 20, 65)]
cells = pytest.mark.parametrize("cell", ["mingru", "minlstm"])


def inputs(cell, shape, dtype=torch.float32, optional=True):
    """Gates, state, starts, lengths; a row that has no step at all among them."""
    num_rows, num_steps, num_channels = shape
    gates = (torch.randn(num_rows, num_steps, NUM_GATES[cell] * num_channels, dtype=torch.float64) * 3).to(dtype)
    if not optional:
        return [gates.requires_grad_(), None, None, None]
    state = torch.randn(num_rows, num_channels, dtype=torch.float64).to(dtype)
    lengths = torch.randint(num_steps + 1, (num_rows,))
    lengths[-1] = 0
    return [gates.requires_grad_(), state.requires_grad_(), torch.rand(num_rows, num_steps) < 0.2, lengths]


def results(scan, cell, arguments, probe):
    out = scan(cell, *arguments)
    return out, *torch.autograd.grad(out, [x for x in arguments if x is not None and x.requires_grad], probe)


def in_float64(arguments):
    return [x.detach().double().requires_grad_() if x is not None and x.is_floating_point() else x for x in arguments]


def largest_error(actual, exact):
    return max(
        float((a - e).detach().abs().max() / e.detach().abs().max().clamp(min=1))
        for a, e in zip(actual, exact, strict=True)
    )


def one_by_one(cell, gates, state, starts, lengths):
    """The equations of the paper, row by row and step by step."""
    out = []
    for row, (steps, h) in enumerate(zip(gates, state, strict=True)):
        for t, parts in enumerate(steps):
            *logits, new = parts.chunk(NUM_GATES[cell])
            odds = [x.sigmoid() for x in logits]
            take = odds[0] if cell == "mingru" else odds[1] / (odds[0] + odds[1])
            if t < lengths[row]:
                h = take * new if starts[row, t] else (1 - take) * h + take * new
            out.append(h)
    return torch.stack(out).view(*gates.shape[:2], -1)


@cells
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matches_the_equations(cell, dtype):
    arguments = inputs(cell, (4, 9, 3), dtype)
    probe = torch.randn(4, 9, 3, dtype=dtype)
    actual, expected = (results(scan, cell, arguments, probe) for scan in (gated_scan, one_by_one))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(default=2)
@cells
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives(check, cell):
    gates, state, starts, lengths = inputs(cell, (2, 5, 2), torch.float64)
    assert check(lambda *x: gated_scan(cell, *x, starts, lengths), (gates, state))


def test_wrong_inputs_are_refused():
    with pytest.raises(ValueError, match=r"gates \(B, T, G \* H\).*got \(2, 3, 5\) and cell='mingru'"):
        gated_scan("mingru", torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match="cell='gru'"):
        gated_scan("gru", torch.zeros(2, 3, 6))


@pytest.mark.parametrize("by_kernel", [False, True], ids=["formula", "kernel"])
def test_wrong_inputs_are_refused_by_kernel_and_formula(by_kernel, request):
    if by_kernel:
        request.getfixturevalue("native")
    gates, starts, lengths = torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, dtype=torch.int64)
    with nullcontext() if by_kernel else KERNELS.switched_off():
        for wrong, error, message in [
            ({"gates": gates.long()}, TypeError, r"floating gates; got torch.int64. Call gates.float\(\)"),
            ({"state": torch.zeros(2, 3)}, ValueError, r"state must be \(B, H\), here \(2, 4\); got \(2, 3\)"),
            ({"starts": starts[:, :2]}, ValueError, r"starts must be \(B, T\), here \(2, 3\); got \(2, 2\)"),
            ({"starts": starts.int()}, TypeError, r"got torch.int32. Call starts.bool\(\)"),
            ({"lengths": lengths[:1]}, ValueError, r"lengths must be \(B,\), here \(2,\); got \(1,\)"),
            ({"lengths": lengths.int()}, TypeError, r"lengths must be int64; got torch.int32. Call lengths.long\(\)"),
        ]:
            with pytest.raises(error, match=message):
                gated_scan("mingru", **{"gates": gates, **wrong})


@cells
@pytest.mark.parametrize("by_kernel", [False, True], ids=["formula", "kernel"])
def test_transforms_of_torch_func(by_kernel, cell, request):
    if by_kernel:  # which serves these tensors outside transforms
        request.getfixturevalue("native")
    with nullcontext() if by_kernel else KERNELS.switched_off():
        gates, state, starts, lengths = (x.detach() for x in inputs(cell, (2, 4, 3)))
        scan = partial(gated_scan, cell, starts=starts, lengths=lengths)
        loop = partial(one_by_one, cell, starts=starts, lengths=lengths)
        found, expected = (func.jacrev(call, (0, 1))(gates, state) for call in (scan, loop))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        tangents = torch.randn_like(gates), torch.randn_like(state)
        found, expected = (func.jvp(call, (gates, state), tangents) for call in (scan, loop))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        many = torch.randn(3, *gates.shape)
        expected = torch.stack([loop(one, state) for one in many])
        torch.testing.assert_close(func.vmap(lambda one: scan(one, state))(many), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("native")
class TestKernel:
    """The C++ kernel against the formula in torch."""

    @cells
    @pytest.mark.parametrize("optional", [False, True], ids=["plain", "all"])
    @pytest.mark.parametrize("time_major", [False, True])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_matches_the_formula_in_float64(self, shape, time_major, optional, cell):
        arguments, probe = inputs(cell, shape, optional=optional), torch.randn(shape)
        if time_major:
            arguments[0] = arguments[0].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        exact = results(gated_scan_reference, cell, in_float64(arguments), probe.double())
        with KERNELS.switched_off():
            formula = results(gated_scan, cell, arguments, probe)
        actual = results(gated_scan, cell, arguments, probe)
        # as the formula is, whose sums have another order; a gate of 1/2 forgets roundings within some twenty steps
        assert largest_error(actual, exact) < max(4 * largest_error(formula, exact), rounding(torch.float32, 40))
        assert [x.stride() for x in actual[1:]] == [x.stride() for x in arguments[:2] if x is not None]

    @cells
    def test_any_strides_do(self, cell):
        gates, _, starts, lengths = inputs(cell, (4, 9, 6))
        state = torch.randn(6, 4).T.requires_grad_()
        for given in (gates[:, ::2], gates[:1].expand(4, -1, -1)[:, :5], gates.transpose(1, 2)[:, :5, :6]):
            arguments = [given, state[:, : given.shape[2] // NUM_GATES[cell]], starts.T[:5].T, lengths]
            out = gated_scan(cell, *arguments)
            expected = gated_scan_reference(cell, *arguments)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
            actual, wanted = (torch.autograd.grad(x.sum(), (gates, state)) for x in (out, expected))
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-4)

    @cells
    @pytest.mark.parametrize("shape", [(1, 4000, 8), (1, 2000, 200), (40, 300, 50)], ids=str)
    def test_any_number_of_threads_gives_equal_bits(self, shape, cell):
        arguments, probe = inputs(cell, shape), torch.randn(shape)
        expected = results(gated_scan, cell, arguments, probe)
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            try:
                actual = results(gated_scan, cell, arguments, probe)
            finally:
                torch.set_num_threads(1)
            assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))

    @cells
    def test_gates_that_are_shut_or_open_stay_exact(self, cell):
        extremes = torch.tensor([-torch.inf, -200, -100, -88, -30, -5, 0, 5, 30, 88, 100, 200, torch.inf])
        pairs = torch.cartesian_prod(extremes, extremes)  # (P, 2)
        logits = pairs[:, :1] if cell == "mingru" else pairs
        news = torch.ones(len(pairs), 1)
        gates = torch.cat([logits, news], 1)[None].transpose(1, 2).flatten(1)[:, None].repeat(1, 2, 1)  # (1, 2, G * P)
        with torch.no_grad():
            out = gated_scan(cell, gates)
            exact = gated_scan_reference(cell, gates.double())
        defined = exact.isfinite()  # infinity less infinity is not
        # numbers close to the smallest have few bits, or none
        torch.testing.assert_close(out[defined].double(), exact[defined], rtol=1e-6, atol=100 * torch.finfo().tiny)

    @cells
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
    def test_what_is_not_finite_stays_in_its_sequence(self, cell, bad):
        gates, state, starts, _ = inputs(cell, (2, 40, 20))
        starts[:] = False
        starts[:, 10] = starts[:, 30] = True
        state.data[:] = bad
        gates.data[0, 20] = bad
        gates.data[1, 35:] = bad  # after its end
        out = gated_scan(cell, gates, state, starts, torch.tensor([40, 35]))
        assert out[:, 30:].isfinite().all()
        assert out[1, 10:].isfinite().all()
        assert not out[0, 20:30].isfinite().any()
        d_gates, d_state = torch.autograd.grad(out, (gates, state), torch.ones_like(out))
        assert d_gates[:, 30:].isfinite().all()
        assert d_gates[1, 10:].isfinite().all()
        assert d_state.isfinite().all()
        assert not d_gates[:, :10].isfinite().all()

    @cells
    @pytest.mark.parametrize("shape", [(0, 4, 3), (3, 0, 2), (2, 4, 0)], ids=str)
    def test_nothing_in_nothing_out(self, shape, cell):
        arguments = inputs(cell, shape, optional=False)
        arguments[1] = torch.zeros(shape[0], shape[2], requires_grad=True)
        out = gated_scan(cell, *arguments)
        assert out.shape == shape
        gradients = torch.autograd.grad(out.sum(), arguments[:2])
        assert [x.shape for x in gradients] == [x.shape for x in arguments[:2]]
        assert gradients[1].abs().sum() == 0

    @cells
    def test_a_second_derivative_is_that_of_the_formula(self, cell):
        arguments = inputs(cell, (2, 6, 3))
        found = []
        for scan in (gated_scan, gated_scan_reference):
            out = scan(cell, *arguments)
            first = torch.autograd.grad(out.square().sum(), arguments[:2], create_graph=True)
            found.append((*first, *torch.autograd.grad(sum(x.square().sum() for x in first), arguments[:2])))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)

    @cells
    def test_a_state_that_depends_on_the_gates_counts_once(self, cell):
        gates = inputs(cell, (2, 6, 3))[0]
        out = gated_scan(cell, gates, gates.mean(1)[:, :3])
        found = [
            torch.autograd.grad(out.sum(), gates, create_graph=graph, retain_graph=True) for graph in (True, False)
        ]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)

    @pytest.mark.slow
    @cells
    def test_op_is_registered_right(self, cell):
        time_major = inputs(cell, (5, 3, 2))[0].detach().transpose(0, 1).requires_grad_()
        forward = torch.ops.lightning_accel_native.gated_scan.default
        for arguments in (inputs(cell, (3, 5, 2)), (time_major, None, None, None), inputs(cell, (2, 0, 3))):
            torch.library.opcheck(forward, (*arguments, NUM_GATES[cell]))
        gates, state, starts, lengths = (x.detach() for x in inputs(cell, (3, 5, 2)))
        out = torch.randn(3, 5, 2)
        backward = torch.ops.lightning_accel_native.gated_scan_backward.default
        torch.library.opcheck(backward, (out, gates, out, state, starts, lengths, NUM_GATES[cell]))

    def test_op_refuses_tensors_of_several_devices(self):
        gates, state, starts, lengths = (x.detach() for x in inputs("mingru", (3, 5, 2)))
        kernels, elsewhere = torch.ops.lightning_accel_native, starts.to("meta")
        with pytest.raises(ValueError, match="one device; got gates on cpu, state on cpu, starts on meta"):
            kernels.gated_scan(gates, state, elsewhere, lengths, 2)
        with pytest.raises(ValueError, match=r"one device; got grad on cpu, .*starts on meta"):
            kernels.gated_scan_backward(gates, gates, gates, state, elsewhere, lengths, 2)

    def test_op_refuses_what_does_not_fit(self):
        gates, state, starts, lengths = (x.detach() for x in inputs("mingru", (3, 5, 2)))
        for wrong, message in [
            ((gates[0], None, None, None, 2), r"gates must be \(B, T, num_gates \* H\)"),
            ((gates, None, None, None, 4), "num_gates must be 2, minGRU, or 3, minLSTM"),
            ((gates.double(), None, None, None, 2), "must be float32"),
            ((gates, state[:2], None, None, 2), r"state must be \(B, H\)"),
            ((gates, None, starts[:, :4], None, 2), r"starts must be \(B, T\) bool"),
            ((gates, None, None, lengths.int(), 2), r"lengths must be \(B,\) int64"),
        ]:
            with pytest.raises(RuntimeError, match=message):
                torch.ops.lightning_accel_native.gated_scan(*wrong)
        out = torch.zeros(3, 5, 2)
        for grad, states in ((out[:, :4], out), (out, out.double())):
            with pytest.raises(RuntimeError, match=r"grad and out must be \(B, T, H\) float32"):
                torch.ops.lightning_accel_native.gated_scan_backward(grad, gates, states, None, None, None, 2)


@pytest.mark.slow
def test_other_dtypes_and_compiled_programs_take_the_formula():
    gates = torch.randn(2, 7, 6)
    update, new = gates.chunk(2, -1)
    expected = linear_scan(1 - update.sigmoid(), update.sigmoid() * new)
    for dtype in (torch.float64, torch.bfloat16):
        assert gated_scan("mingru", gates.to(dtype)).dtype == dtype
    compiled = torch.compile(lambda gates: gated_scan("mingru", gates), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(gates), expected)
