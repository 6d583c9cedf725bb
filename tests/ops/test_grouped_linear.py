import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from lightning_accel.ops import grouped_linear

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
