from itertools import product

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from lightning_accel.ops import grouped_linear
from lightning_accel.ops.grouped_linear import choose_grouped_backend
from lightning_accel.ops.grouped_products import sort_by_source, sum_rows

COUNTS = torch.tensor([2, 0, 3, 1])


def inputs(dtype, num_rows=6, width=(8, 16)):
    x = torch.randn(num_rows, width[0], dtype=dtype, requires_grad=True)
    return x, torch.randn(4, width[1], width[0], dtype=dtype, requires_grad=True)


def test_matches_each_row_by_its_group():
    x, weight = inputs(torch.float64)
    group, bias = torch.arange(4).repeat_interleave(COUNTS), torch.randn(4, 16, dtype=torch.float64)
    expected = torch.einsum("mi,moi->mo", x, weight[group])
    torch.testing.assert_close(grouped_linear(x, weight, COUNTS), expected)
    torch.testing.assert_close(grouped_linear(x, weight, COUNTS, bias), expected + bias[group])


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives(check):
    assert check(lambda x, weight: grouped_linear(x, weight, COUNTS), inputs(torch.float64, width=(3, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [6, 9])
def test_kernel_matches_loop(dtype, num_rows):
    x, weight = inputs(dtype, num_rows)
    probe, bias = torch.randn(num_rows, 16, dtype=dtype), torch.randn(4, 16, dtype=dtype, requires_grad=True)
    results = []
    for backend in ("grouped_mm", "loop"):
        out = grouped_linear(x, weight, COUNTS, bias, backend)
        results.append((out, *torch.autograd.grad(out, (x, weight, bias), probe)))
    tolerance = {"rtol": 0.02, "atol": 0.05} if dtype == torch.bfloat16 else {}  # of a sum that is rounded twice
    torch.testing.assert_close(*results, **tolerance)


@pytest.mark.parametrize("backend", ["grouped_mm", "loop"])
def test_rows_of_no_group_give_and_get_nothing(backend):
    x, weight = inputs(torch.float32, num_rows=9)
    x.data[6:] = torch.nan
    out = grouped_linear(x, weight, COUNTS, backend=backend)
    assert out[6:].abs().sum() == 0
    out.sum().backward()
    assert x.grad[6:].abs().sum() == 0
    assert weight.grad.isfinite().all()


def test_autocast_rounds():
    x, weight = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_linear(x, weight, COUNTS)
    torch.testing.assert_close(out, grouped_linear(x.bfloat16(), weight.bfloat16(), COUNTS), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_kernel_matches_loop(dtype):
    x, weight = (tensor.detach().cuda().requires_grad_() for tensor in inputs(dtype, num_rows=9))
    results = []
    for backend in ("grouped_mm", "loop"):
        out = grouped_linear(x, weight, COUNTS.cuda(), backend=backend)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (x, weight))))
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("counts", "width"),
    [
        *product([[2, 0, 3, 1], [0, 0, 0, 0], [40, 0, 0, 1], [70, 0, 129, 1], [0, 201, 0, 0]], [(7, 5), (40, 100)]),
        ([270, 0, 129, 1], (70, 135)),  # so many of each that the shape of tiles is measured
    ],
    ids=str,
)
def test_triton_matches_float64(dtype, counts, width):
    counts = torch.tensor(counts)
    num_rows, bias = int(counts.sum()) + 3, torch.randn(4, width[1], dtype=dtype, requires_grad=True)
    tensors = *inputs(dtype, num_rows, width), bias
    tensors[0].data[-3:] = torch.nan  # of no group
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = grouped_linear(*wide[:2], counts, wide[2], "loop")
    on_gpu = [tensor.detach().cuda().requires_grad_() for tensor in tensors]
    out = grouped_linear(*on_gpu[:2], counts.cuda(), on_gpu[2], "triton")
    probe = torch.randn_like(expected).to(dtype)
    gradients = torch.autograd.grad(out, on_gpu, probe.cuda()), torch.autograd.grad(expected, wide, probe.double())
    tolerance = (0, 1e-4) if dtype == torch.float32 else (0.02, 0.01 * counts.sum().clamp(min=10).sqrt().item())
    for actual, reference in zip((out, *gradients[0]), (expected, *gradients[1]), strict=True):
        torch.testing.assert_close(actual.double().cpu(), reference, rtol=tolerance[0], atol=tolerance[1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("capability", "dtype", "width", "expected"),
    [
        ((9, 0), torch.bfloat16, 8, "grouped_mm"),
        ((10, 3), torch.bfloat16, 8, "grouped_mm"),
        ((8, 0), torch.bfloat16, 8, "triton"),
        ((12, 0), torch.bfloat16, 8, "triton"),
        ((9, 0), torch.bfloat16, 7, "triton"),
        ((9, 0), torch.float16, 8, "triton"),
        ((9, 0), torch.float64, 8, "loop"),
    ],
)
def test_the_backend_is_chosen_by_capability_dtype_and_size(capability, dtype, width, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert choose_grouped_backend(torch.ones(2, 8, width, dtype=dtype, device="cuda")) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["grouped_mm", "triton"])
def test_gradients_of_biases_are_summed_in_float32(backend):
    """By addition in bfloat16, 3,000 times 1 is 256."""
    x, weight = (tensor.detach().cuda() for tensor in inputs(torch.bfloat16, 2985))
    bias = torch.zeros(4, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    counts = torch.tensor([1000, 0, 1984, 1], device="cuda")
    grouped_linear(x, weight, counts, bias, backend).sum().backward()
    assert torch.equal(bias.grad, counts[:, None].expand(4, 16).bfloat16())


def test_triton_refuses_what_it_cannot_multiply():
    with pytest.raises(ValueError, match=r"takes bfloat16, .* on CUDA, and needs Triton; got torch.float32 on cpu"):
        grouped_linear(*inputs(torch.float32), COUNTS, backend="triton")


@pytest.mark.gpu
def test_triton_has_all_derivatives():
    x, weight = (tensor.detach().cuda().requires_grad_() for tensor in inputs(torch.float32, 7, (3, 2)))
    gradients = []
    for backend in ("triton", "loop"):
        out = grouped_linear(x, weight, COUNTS.cuda(), backend=backend)
        first = torch.autograd.grad(out.pow(3).sum(), (x, weight), create_graph=True)
        gradients.append((*first, *torch.autograd.grad(sum(part.square().sum() for part in first), (x, weight))))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [(8, 16), (7, 5)], ids=str)
def test_the_host_never_waits(dtype, width):
    x, weight = (tensor.detach().cuda().requires_grad_() for tensor in inputs(dtype, 9, width))
    bias, counts = torch.randn(4, width[1], dtype=dtype, device="cuda", requires_grad=True), COUNTS.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_linear(x, weight, counts, bias).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_rows_by_source(dtype):
    """Rows past the first 37 belong to no sum: whatever they and their weights hold, they add and get nothing."""
    source = torch.randint(7, (40,))
    rows, weights = torch.randn(40, 300).to(dtype), torch.randn(40)
    expected = torch.zeros(7, 300, dtype=torch.float64).index_add(
        0, source[:37], (rows.double() * weights[:, None])[:37]
    )
    rows[37:], weights[37:] = torch.nan, torch.nan
    on_gpu = [one.cuda().requires_grad_() for one in (rows, weights)]
    sources = sort_by_source(source.cuda(), torch.tensor(37, device="cuda"), 7)
    out = sum_rows(*on_gpu, sources)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.double().cpu(), expected, **tolerance)
    d_rows, d_weights = torch.autograd.grad(out.float().sum(), on_gpu)
    assert d_rows[37:].abs().sum() == d_weights[37:].abs().sum() == 0
    torch.testing.assert_close(d_rows[:37, 0].double().cpu(), weights[:37].double(), **tolerance)


@pytest.mark.gpu
def test_triton_rounds_float32_by_either_setting_of_torch():
    x, weight = (tensor.detach().cuda() for tensor in inputs(torch.float32))
    expected = grouped_linear(x, weight, COUNTS.cuda(), backend="loop")
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        found = grouped_linear(x, weight, COUNTS.cuda(), backend="triton")
    finally:
        matmul.fp32_precision = before
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
    with pytest.raises(ValueError, match=r"one dtype; got torch.float32 and torch.bfloat16"):
        grouped_linear(x, weight.bfloat16(), COUNTS.cuda(), backend="triton")


@pytest.mark.gpu
def test_tiles_are_not_measured_where_runs_must_be_repeatable(monkeypatch):
    grouped_triton = pytest.importorskip("lightning_accel.ops.grouped_triton")
    for name in ("_measured_rows_kernel", "_measured_groups_kernel"):
        monkeypatch.setattr(grouped_triton, name, None)
    x, weight = (tensor.detach().cuda().requires_grad_() for tensor in inputs(torch.float32, 256, (64, 64)))
    counts = torch.full((4,), 64, device="cuda")
    with pytest.raises(TypeError, match="NoneType"):
        grouped_linear(x, weight, counts, backend="triton")
    torch.use_deterministic_algorithms(True)
    try:
        grouped_linear(x, weight, counts, backend="triton").sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
