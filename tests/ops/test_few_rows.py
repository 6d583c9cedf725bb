"""Experts that visit few tokens, against the loop in float64."""

from importlib import import_module

import pytest
import torch

from lightning_accel.ops import expert_mlp
from lightning_accel.ops.few_rows import are_few_rows, multiply_few_rows
from lightning_accel.ops.native import KERNELS

EXPERTS, TOKENS = 5, 7


def slots(num_slots, counts):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(TOKENS, (num_slots,), generator=generator), torch.tensor(counts)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (37, 70), (64, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_a_loop(dtype, depth, width, bias, native):
    x, row_of_slot, counts = torch.randn(TOKENS, depth), *slots(12, [4, 0, 1, 5, 0])  # the last two are ignored
    weight = torch.randn(EXPERTS, width, depth).to(dtype)
    added = torch.randn(EXPERTS, width).to(dtype) if bias else None
    expert_of_slot = torch.arange(EXPERTS).repeat_interleave(counts)
    expected = torch.zeros(12, width, dtype=torch.float64)
    for slot, expert in enumerate(expert_of_slot.tolist()):
        expected[slot] = weight[expert].double() @ x[row_of_slot[slot]].double()
        expected[slot] += 0 if added is None else added[expert].double()
    found = multiply_few_rows(x, row_of_slot, counts, weight, added)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 * (1 + expected.abs().max().item()))
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(multiply_few_rows(x.t().contiguous().t(), row_of_slot, counts, turned, added), found)


def mixture(dtype=torch.float32, bias=True):
    """Tokens, slots of which the last is ignored and has weight NaN, and the layers of gated experts."""
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    row_of_slot, counts = slots(4, [2, 0, 0, 1, 0])
    weights = torch.tensor([0.5, 0.2, 0.3, torch.nan])
    layers = draw(EXPERTS, 12, 10), draw(EXPERTS, 10, 6), draw(EXPERTS, 12), draw(EXPERTS, 10)
    return draw(TOKENS, 10), row_of_slot, weights, counts, *layers[: 4 if bias else 2]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradients_few_slots_take_the_kernel(dtype, activation, bias, native, monkeypatch):
    calls = []
    spy = lambda *tensors: calls.append(tensors) or multiply_few_rows(*tensors)  # noqa: E731
    monkeypatch.setattr(import_module("lightning_accel.ops.expert_mlp"), "multiply_few_rows", spy)
    arguments = mixture(dtype, bias)
    wide = [one.double() if one.is_floating_point() else one for one in arguments]
    expected = expert_mlp(*wide, activation=activation, backend="loop")
    found = expert_mlp(*arguments, activation=activation)
    assert len(calls) == 2
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    with torch.autocast("cpu", torch.bfloat16):
        assert expert_mlp(*arguments, activation=activation).dtype == torch.bfloat16
    assert len(calls) == 4
    arguments[4].requires_grad_()
    expert_mlp(*arguments, activation=activation)
    assert len(calls) == 4


def test_what_the_kernel_does_not_serve(native):
    x, weight = torch.randn(2, 3), torch.randn(EXPERTS, 4, 3)
    assert are_few_rows(20, x, weight)
    assert are_few_rows(5, x.bfloat16(), weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert are_few_rows(20, x.bfloat16(), weight)
    assert not are_few_rows(20, x.bfloat16(), weight)
    assert not are_few_rows(21, x, weight)
    assert not are_few_rows(6, x, weight.bfloat16())
    assert not are_few_rows(2, x.double(), weight)
    assert not are_few_rows(2, x.double(), weight.double())
    assert not are_few_rows(2, x.clone().requires_grad_(), weight)
    assert not are_few_rows(2, x.to("meta"), weight)
    assert not torch.func.vmap(lambda x: torch.tensor(are_few_rows(2, x, weight)))(x[None])
    with torch.no_grad():
        assert are_few_rows(2, x.clone().requires_grad_(), torch.nn.Parameter(weight))
    with KERNELS.switched_off():
        assert not are_few_rows(2, x, weight)


def test_slots_and_layers_that_do_not_fit_are_refused(native):
    x, weight, counts = torch.randn(2, 3), torch.randn(EXPERTS, 4, 3), torch.tensor([1, 1, 0, 0, 0])
    for row in (-1, 2):
        with pytest.raises(RuntimeError, match=r"row_of_slot must lie in \[0, N\)"):
            multiply_few_rows(x, torch.tensor([0, row]), counts, weight)
    with pytest.raises(RuntimeError, match="at most the number of slots"):
        multiply_few_rows(x, torch.tensor([0]), counts, weight)
    with pytest.raises(RuntimeError, match="shapes of x, counts, weight and bias disagree"):
        multiply_few_rows(x[:, :2], torch.tensor([0, 1]), counts, weight)
    with pytest.raises(RuntimeError, match="takes contiguous tensors"):
        multiply_few_rows(x.double(), torch.tensor([0, 1]), counts, weight)


def test_threads_change_no_bit(native):
    x, weight = torch.randn(4, 96), torch.randn(EXPERTS, 3000, 96)
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            runs.append(multiply_few_rows(x, torch.tensor([0, 1, 2, 3]), torch.tensor([3, 0, 0, 0, 1]), weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*runs)
