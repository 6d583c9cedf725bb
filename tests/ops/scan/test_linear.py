from itertools import pairwise

import pytest
import torch
import torch._dynamo.testing
from torch import func
from torch.autograd import gradcheck, gradgradcheck

from lightning_accel.ops import linear_scan
from lightning_accel.ops.scan.linear import _chunk_length, linear_scan_reference
from tests.tolerance import rounding

SHAPES = [(5, 7, 3), (1, 1, 2), (1, 211, 3), (2, 1000, 2), (3, 64, 1), (1, 2, 4)]


def inputs(shape, dtype=torch.float64, with_state=True, with_starts=True, device="cpu"):
    """Gate, value, state, starts; gates from 0 to over 1, values of both signs, a gate of exactly 0."""
    num_rows, num_steps, num_channels = shape
    gate = (torch.rand(shape, dtype=torch.float64) * 1.05).to(device, dtype)
    if gate.numel():
        gate[:, num_steps // 2] = 0
    value = torch.randn(shape, dtype=torch.float64).to(device, dtype)
    state = torch.randn(num_rows, num_channels, dtype=torch.float64).to(device, dtype) if with_state else None
    starts = (torch.rand(num_rows, num_steps) < 0.2).to(device) if with_starts else None
    return [None if x is None else x.requires_grad_(x.is_floating_point()) for x in (gate, value, state, starts)]


def results(scan, arguments, probe):
    learned = [x for x in arguments if x is not None and x.requires_grad]
    out = scan(*arguments)
    return out, *torch.autograd.grad(out, learned, probe)


def both(arguments):
    probe = torch.randn_like(arguments[1])
    return results(linear_scan, arguments, probe), results(linear_scan_reference, arguments, probe)


@pytest.mark.parametrize("with_starts", [False, True], ids=["one sequence", "starts"])
@pytest.mark.parametrize("with_state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_loop(shape, with_state, with_starts):
    torch.testing.assert_close(*both(inputs(shape, torch.float64, with_state, with_starts)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_transforms_of_torch_func(dtype):
    *learned, starts = (x.detach() for x in inputs((2, 5, 3), dtype))
    learned, wide = tuple(learned), tuple(x.double() for x in learned)
    scan, loop = (lambda g, v, s, call=call: call(g, v, s, starts) for call in (linear_scan, linear_scan_reference))
    tolerance = {"rtol": 1e-7, "atol": 1e-7} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.02}
    pairs = [
        (func.jacrev(scan, (0, 1, 2))(*learned), func.jacrev(loop, (0, 1, 2))(*wide)),
        (func.jacfwd(scan, (0, 1, 2))(*learned), func.jacrev(loop, (0, 1, 2))(*wide)),
        (func.jvp(scan, learned, learned), func.jvp(loop, wide, wide)),
    ]
    many = torch.randn(4, 2, 5, 3).to(dtype)
    each = torch.stack([loop(wide[0], one.double(), wide[2]) for one in many])
    pairs.append((func.vmap(scan, (None, 0, None))(learned[0], many, learned[2]), each))
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, check_dtype=False, **tolerance)
    assert func.vmap(scan, (None, 0, None))(learned[0], many, learned[2]).dtype == dtype


@pytest.mark.parametrize("shape", [(4, 9, 3), (1, 300, 2)], ids=str)
def test_time_major_memory_is_kept(shape):
    arguments = inputs(shape)
    arguments[:2] = (x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in arguments[:2])
    actual, expected = both(arguments)
    torch.testing.assert_close(actual, expected)
    assert actual[0].stride() == arguments[1].stride()


def test_any_strides_do():
    gate, _, state, starts = inputs((4, 9, 3))
    wide = torch.randn(3, 9, 8, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(*both([gate[:1, :, :1].expand(4, 9, 3), wide.permute(2, 1, 0)[::2], state, starts]))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 5, 2), (1, 130, 1)], ids=["loop", "chunks"])
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives(check, shape):
    *learned, starts = inputs(shape)
    assert check(lambda *tensors: linear_scan(*tensors, starts), learned, fast_mode=shape[1] > 5)
    assert check(linear_scan, learned[:2], fast_mode=shape[1] > 5)


def test_gradients_that_have_gradients_are_the_same():
    arguments = inputs((3, 9, 2))
    assert arguments[3].any()
    out = linear_scan(*arguments)
    probe = torch.randn_like(out)
    twice = [torch.autograd.grad(out, arguments[:3], probe, True, create_graph) for create_graph in (False, True)]
    torch.testing.assert_close(*twice)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_inputs_may_be_frozen(frozen):
    arguments = inputs((3, 8, 2))
    arguments[frozen].requires_grad_(False)
    torch.testing.assert_close(*both(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 16384, 8), (40, 2000, 64)], ids=["chunks", "loop"])
def test_float32_is_accurate_over_many_steps(shape):
    """As accurate as the plain recurrence; a scan in log space is off by 4e-4."""
    gate = torch.sigmoid(torch.randn(shape, dtype=torch.float64) + 3)
    value, probe = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    starts = torch.rand(shape[:2]) < 1e-3
    exact = results(linear_scan, [gate.requires_grad_(), value.requires_grad_(), None, starts], probe)
    narrow = [x.detach().float().requires_grad_() for x in (gate, value)]
    for actual, expected in zip(results(linear_scan, [*narrow, None, starts], probe.float()), exact, strict=True):
        # two roundings a step, which a gate of sigmoid(3) forgets within twenty
        assert (actual - expected).abs().max() < rounding(torch.float32, 40) * expected.abs().max()


@pytest.mark.parametrize("shape", [(3, 12, 2), (1, 300, 4)], ids=["loop", "chunks"])
def test_sequences_laid_end_to_end_are_as_alone(shape):
    arguments = inputs(shape, torch.float32)
    gate, value, _, starts = arguments
    out = linear_scan(*arguments)
    for row, row_starts in enumerate(starts):
        bounds = [*row_starts.nonzero().flatten().tolist(), shape[1]]
        for first, last in pairwise(bounds):
            alone = linear_scan(gate[row : row + 1, first:last], value[row : row + 1, first:last])
            torch.testing.assert_close(out[row, first:last], alone[0])


@pytest.mark.parametrize("shape", [(2, 12, 3), (1, 300, 3)], ids=["loop", "chunks"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_what_is_not_finite_stays_in_its_sequence(shape, bad):
    arguments = inputs(shape)
    _, value, _, starts = arguments
    starts[:] = False
    starts[:, 4] = starts[:, 9] = True
    clean = both(arguments)[0]
    value.data[0, 6, 0] = bad
    probe = torch.ones_like(value)
    probe[0, 6, 0] = torch.nan
    spoilt = results(linear_scan, arguments, probe)
    expected = results(linear_scan_reference, arguments, torch.ones_like(value))
    inside = torch.zeros(shape[:2], dtype=torch.bool)
    inside[0, 4:9] = True
    torch.testing.assert_close(spoilt[0][~inside], clean[0][~inside])
    assert all(x[~inside].isfinite().all() for x in spoilt[:3])
    assert spoilt[3].isfinite().all()
    assert not spoilt[0][0, 6:9, 0].isfinite().any()
    torch.testing.assert_close(spoilt[2][~inside], expected[2][~inside])
    assert spoilt[2][0, 4:7, 0].isnan().all()


def growing(case):
    """Gate, value, state and starts whose states stay finite, though gates multiply to far more than float32 holds."""
    num_steps = 300
    gate, value, state, starts = torch.full((1, num_steps, 2), 0.5), torch.zeros(1, num_steps, 2), None, None
    if case == "zeros":
        gate[..., 1] = 1e9
        value[..., 0] = 1.0
    elif case == "fixed point":
        gate[..., 1], value[..., 1], state = 4.0, 3.0, torch.tensor([[1.0, -1.0]])
    elif case == "fixed point at first":  # a chunk from zeros ends where -1 added to it is lost
        gate[:, :26, 1], value[:, :26, 1], value[:, 26:, 1] = 4.0, 3.0, -0.5
        state = torch.tensor([[1.0, -1.0]])
    elif case == "small, then huge":
        gate[0, :, 1] = torch.tensor([1e-30, 1e-30, 1e30, 1e30]).repeat(num_steps // 4)
        state = torch.tensor([[1.0, 1e30]])
    elif case == "huge, then small":
        gate[0, :, 1] = torch.tensor([1e30, 1e30, 1e-30, 1e-30]).repeat(num_steps // 4)
        state = torch.tensor([[1.0, 1e-30]])
    elif case == "zero gates":
        gate[0, :, 1] = torch.tensor([1e30, 1e30, 0.0]).repeat(num_steps // 3)
        value[..., 1] = 1e-30
    else:
        gate[..., 1] = -1e9
        place = torch.arange(num_steps)[None] % 15
        value[0, :, 1], starts = torch.where(place == 14, 1.0, 0.0), place == 0
    return gate, value, state, starts


CASES = ["zeros", "fixed point", "fixed point at first", "small, then huge", "huge, then small", "zero gates", "starts"]


def twice(scan, gate, value, state, starts):
    """States, the gradients of an early one, and the gradient by the gates of one of those."""
    learned = [x.requires_grad_() for x in (gate, value, state) if x is not None]
    out = scan(gate, value, state, starts)
    first = torch.autograd.grad(out[:, 3].float().sum(), learned, create_graph=True)
    return out, *first, *torch.autograd.grad(first[1][:, :3].float().sum(), gate)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_whose_product_overflows(case, dtype):
    """Wherever the plain recurrence over float32 is finite, chunks are, too."""
    assert _chunk_length(300, 2, "cpu") < 300
    *given, starts = growing(case)
    given = [None if x is None else x.to(dtype) for x in given]
    actual = twice(linear_scan, *given, starts)
    wide = [None if x is None else x.detach().float() for x in given]
    expected = twice(linear_scan_reference, *wide, starts)
    rounding = 300 * torch.finfo(torch.float32).eps + 2 * torch.finfo(dtype).eps  # of each step, and of the results
    assert actual[0].isfinite().all()
    for one, other in zip(actual, expected, strict=True):
        finite = other.isfinite()
        torch.testing.assert_close(one[finite], other[finite].to(dtype), rtol=rounding, atol=0)
        assert finite.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_accumulated_in_float32(dtype):
    arguments = inputs((2, 300, 3), dtype)
    actual = linear_scan(*arguments)
    assert actual.dtype == dtype
    wide = linear_scan(*(None if x is None else x.float() if x.is_floating_point() else x for x in arguments))
    torch.testing.assert_close(actual, wide.to(dtype), rtol=0, atol=0)
    ones = torch.ones(1, 4096, 1, dtype=dtype)
    assert linear_scan(ones, ones)[0, -1] == 4096  # 256 in bf16
    probe = torch.randn_like(actual)
    narrow = results(linear_scan, arguments, probe)[1:]
    full = [None if x is None else x.detach().double().requires_grad_() for x in arguments[:3]]
    for found, expected in zip(narrow, results(linear_scan, [*full, arguments[3]], probe.double())[1:], strict=True):
        assert found.dtype == dtype
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_two_dtypes_give_the_wider():
    gate, value, state, starts = inputs((2, 7, 3), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_scan(gate, value.bfloat16(), state.double(), starts)
    assert out.dtype == torch.float64
    out = linear_scan(gate, value.bfloat16(), None, starts)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert value.grad.dtype == gate.grad.dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 4, 3), (3, 0, 2), (2, 4, 0)], ids=str)
@pytest.mark.parametrize("create_graph", [False, True])
def test_nothing_in_nothing_out(shape, create_graph):
    arguments = inputs(shape)
    out = linear_scan(*arguments)
    assert out.shape == shape
    gradients = torch.autograd.grad(out.sum(), arguments[:3], create_graph=create_graph)
    assert [x.shape for x in gradients] == [x.shape for x in arguments[:3]]
    assert gradients[2].abs().sum() == 0


@pytest.mark.slow
def test_op_is_registered_right():
    for arguments in (inputs((3, 5, 2), torch.float32), inputs((1, 200, 2), torch.float32, False, False)):
        torch.library.opcheck(torch.ops.lightning_accel.linear_scan.default, arguments)


@pytest.mark.slow
def test_compiles_whole_and_once_for_any_length():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *x: linear_scan(*x).tanh(), fullgraph=True, backend=counter, dynamic=True)
    for shape in [(3, 5, 2), (2, 300, 2), (4, 9, 2)]:
        arguments = inputs(shape)
        probe = torch.randn(shape, dtype=torch.float64)
        actual = results(compiled, arguments, probe)
        torch.testing.assert_close(actual, results(lambda *x: linear_scan_reference(*x).tanh(), arguments, probe))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_any_batch_and_time(strict):
    class Scan(torch.nn.Module):
        def forward(self, gate, value, state, starts):
            return linear_scan(gate.sigmoid(), value, state, starts)

    batch, time = torch.export.Dim("batch"), torch.export.Dim("time")
    sizes = {0: batch, 1: time}
    exported = torch.export.export(
        Scan(),
        tuple(x.detach() for x in inputs((3, 5, 2))),
        dynamic_shapes=(sizes, sizes, {0: batch}, sizes),
        strict=strict,
    )
    assert "lightning_accel.linear_scan" in exported.graph_module.code
    arguments = inputs((2, 301, 2))
    torch.testing.assert_close(exported.module()(*arguments), Scan()(*arguments))


def test_garbage_in_fresh_memory_does_not_show():
    for shape in SHAPES[:4]:
        arguments = inputs(shape)
        probe = torch.randn(shape, dtype=torch.float64)
        torch.use_deterministic_algorithms(True)  # which fills fresh memory with NaN
        try:
            found = results(linear_scan, arguments, probe)
        finally:
            torch.use_deterministic_algorithms(False)
        torch.testing.assert_close(found, results(linear_scan, arguments, probe), rtol=0, atol=0)


def test_wrong_inputs_are_refused():
    gate, value, state, starts = inputs((2, 5, 3))
    with pytest.raises(ValueError, match=r"both be \(B, T, H\); got \(2, 5, 3\) and \(2, 4, 3\).*expand"):
        linear_scan(gate, value[:, :4])
    with pytest.raises(ValueError, match=r"state must be \(B, H\), here \(2, 3\); got \(3,\)"):
        linear_scan(gate, value, state[0])
    with pytest.raises(ValueError, match=r"starts must be \(B, T\), here \(2, 5\); got \(2, 5, 3\)"):
        linear_scan(gate, value, state, gate > 0)
    with pytest.raises(TypeError, match=r"starts must be bool; got torch.int64. Call starts.bool\(\)"):
        linear_scan(gate, value, state, starts.long())
    with pytest.raises(TypeError, match=r"gate is torch.int64. Call gate.float\(\)"):
        linear_scan(gate.long(), value)


def on_gpu(arguments):
    return [None if x is None else x.detach().cuda().requires_grad_(x.requires_grad) for x in arguments]


def to_cpu(tensors):
    return [x.cpu() for x in tensors]


@pytest.fixture(params=[1, 3])
def chunks(request, monkeypatch):
    """Split time into this many chunks on a GPU."""
    scan_triton = pytest.importorskip("lightning_accel.ops.scan.triton")
    monkeypatch.setattr(scan_triton, "_count_chunks", lambda x: request.param)
    return request.param


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "optional"), [((2, 70, 5), True), ((1, 130, 33), False), ((3, 1, 2), True)], ids=str)
def test_cuda_in_chunks_and_time_major(shape, optional, dtype, chunks):
    arguments = inputs(shape, dtype, optional, optional)
    probe = torch.randn_like(arguments[1])
    moved = on_gpu(arguments)
    if chunks > 1:
        for one in moved[:2]:
            one.data = one.data.transpose(0, 1).contiguous().transpose(0, 1)
    actual = results(linear_scan, moved, probe.cuda())
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(to_cpu(actual), list(results(linear_scan, arguments, probe)), **tolerance)
    assert chunks == 1 or all(one.transpose(0, 1).is_contiguous() for one in actual[:3])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, which interprets
def test_cuda_keeps_what_is_not_finite_in_its_sequence(chunks):
    arguments = inputs((1, 130, 2))
    arguments[3][:] = False
    arguments[3][:, 20] = arguments[3][:, 90] = True
    arguments[1].data[0, 40, 0] = torch.inf
    probe = torch.ones(1, 130, 2, dtype=torch.float64)
    out, d_gate, d_value, _ = to_cpu(results(linear_scan, on_gpu(arguments), probe.cuda()))
    torch.testing.assert_close(out, linear_scan_reference(*arguments), equal_nan=True)
    assert d_gate[:, 90:].isfinite().all()
    assert d_value.isfinite().all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")  # of numpy, which interprets
@pytest.mark.parametrize("case", CASES)
def test_cuda_with_gates_whose_product_overflows(case, chunks):
    gate, value, state, starts = growing(case)
    probe = torch.zeros_like(value)
    probe[:, 3] = 1
    arguments = [*(x.requires_grad_() if x is not None else x for x in (gate, value, state)), starts]
    actual = results(linear_scan, on_gpu(arguments), probe.cuda())
    torch.testing.assert_close(to_cpu(actual), list(results(linear_scan, arguments, probe)), rtol=1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 70, 33),
        (1, 600, 3),  # in chunks
        (5, 7, 70),
        pytest.param((65, 3000, 200), marks=pytest.mark.gpu(kernels=True)),  # the shape of tiles is measured
    ],
    ids=str,
)
@pytest.mark.parametrize("optional", [False, True], ids=["plain", "state and starts"])
def test_cuda_matches_cpu(shape, dtype, optional):
    arguments = inputs(shape, dtype, optional, optional)
    probe = torch.randn(shape, dtype=torch.float64).to(dtype)
    expected = results(linear_scan, arguments, probe)
    torch.use_deterministic_algorithms(True)
    try:
        actual = results(linear_scan, on_gpu(arguments), probe.cuda())
    finally:
        torch.use_deterministic_algorithms(False)
    half = dtype in (torch.bfloat16, torch.float16)
    tolerance = {"rtol": 0.02, "atol": 0.02} if half else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(to_cpu(actual), list(expected), **tolerance)


@pytest.mark.gpu
def test_tiles_are_not_measured_where_runs_must_be_repeatable():
    scan_triton = pytest.importorskip("lightning_accel.ops.scan.triton")
    large, small = torch.empty(4, 4096, 256, device="meta"), torch.empty(4, 40, 256, device="meta")
    assert scan_triton._choose("plain", "measured", large)[0] == "measured"
    assert scan_triton._choose("plain", "measured", small)[0] == "plain"
    torch.use_deterministic_algorithms(True)
    try:
        assert scan_triton._choose("plain", "measured", large)[0] == "plain"
    finally:
        torch.use_deterministic_algorithms(False)
