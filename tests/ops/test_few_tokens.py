"""A mixture of experts for few tokens, against the loop over experts and the gate in float64."""

from importlib import import_module

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_accel.nn import TopKGate
from lightning_accel.ops import expert_mlp
from lightning_accel.ops.few_tokens import experts_of_few_tokens, has_few_slots, has_few_tokens, route_few_tokens
from lightning_accel.ops.native import KERNELS

EXPERTS, TOKENS = 5, 7


def mixture(dtype=torch.float32, *, bias=True, gated=True, dim=10, hidden_dim=6, counts=(2, 0, 0, 1, 0)):
    """Tokens, slots of which the last is ignored and has weight NaN, and the layers of experts."""
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    num_slots = sum(counts) + 1
    token_of_slot = torch.randint(TOKENS, (num_slots,), generator=generator)
    weights = torch.cat([torch.rand(num_slots - 1, generator=generator), torch.tensor([torch.nan])])
    up_dim = (1 + gated) * hidden_dim
    layers = draw(EXPERTS, up_dim, dim), draw(EXPERTS, dim, hidden_dim), draw(EXPERTS, up_dim), draw(EXPERTS, dim)
    return draw(TOKENS, dim), token_of_slot, weights, torch.tensor(counts), *layers[: 4 if bias else 2]


def exact(arguments, activation):
    wide = [one.double() if one.is_floating_point() else one for one in arguments]
    return expert_mlp(*wide, activation=activation, backend="loop")


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"])
@pytest.mark.parametrize("options", [{}, {"gated": False, "counts": (9, 1, 0, 0, 4)}, {"dim": 1, "hidden_dim": 70}])
def test_experts_are_those_of_the_loop(options, activation, native):
    for dtype in (torch.float32, torch.bfloat16):
        for bias in (False, True):
            arguments = mixture(dtype, bias=bias, **options)
            layers = [*arguments[4:], None, None][:4]
            found = experts_of_few_tokens(*arguments[:4], *layers, activation)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), exact(arguments, activation), rtol=1e-5, atol=1e-5)
            turned = [None if one is None else one.transpose(0, 1).contiguous().transpose(0, 1) for one in layers]
            assert torch.equal(experts_of_few_tokens(*arguments[:4], *turned, activation), found)


def test_without_gradients_few_slots_take_the_kernel(native, monkeypatch):
    calls = []
    spy = lambda *tensors: calls.append(tensors) or experts_of_few_tokens(*tensors)  # noqa: E731
    monkeypatch.setattr(import_module("lightning_accel.ops.expert_mlp"), "experts_of_few_tokens", spy)
    for dtype in (torch.float32, torch.bfloat16):
        arguments = mixture(dtype)
        assert expert_mlp(*arguments).dtype == dtype
        with torch.autocast("cpu", torch.bfloat16):
            assert expert_mlp(*arguments).dtype == torch.bfloat16
    assert len(calls) == 4
    arguments[4].requires_grad_()
    expert_mlp(*arguments)
    expert_mlp(*mixture(), backend="blocks")
    assert len(calls) == 4


@pytest.mark.parametrize(
    "options",
    [{}, {"k": 1}, {"k": EXPERTS, "scale": 2.5}, {"score": "sigmoid", "bias_update_rate": 0.3}, {"normalize": False}],
)
def test_routes_are_those_of_the_gate(options, native):
    gate = TopKGate(6, EXPERTS, **{"k": 2} | options).eval()
    if gate.bias_steps is not None:
        gate.bias_steps.copy_(torch.tensor([3, -2, 0, 1, -4]))
    x = torch.randn(TOKENS, 6)
    x[3] = torch.nan
    for rows in (x, x[:3]):  # with NaN, and the statistics without
        with torch.no_grad():
            found = gate(rows)
            expected = gate(rows.double())
            with KERNELS.switched_off():
                slow = gate(rows)
        assert [one.dtype for one in found[:3]] == [one.dtype for one in slow[:3]]
        assert [one.dtype for one in found.report] == [one.dtype for one in slow.report]
        assert [one.shape for one in found.report] == [one.shape for one in slow.report]
        finite = found.weight_of_slot.isfinite()
        for actual, exact in ((found[:3], expected[:3]), (found.report, expected.report)):
            for one, other in zip(actual, exact, strict=True):
                if one.dtype != torch.int64 or rows is not x:
                    torch.testing.assert_close(one, other, check_dtype=False, equal_nan=True, rtol=1e-5, atol=1e-6)
        assert torch.equal(found.expert_of_slot[finite], expected.expert_of_slot[finite])
        assert finite.all() == (rows is not x)
        for chosen in found.expert_of_slot.view(gate.k, -1).t().tolist():
            assert len({*chosen}) == gate.k


def test_of_equal_scores_the_first_are_chosen(native):
    gate, x = TopKGate(6, EXPERTS, score="sigmoid").eval(), torch.ones(3, 6)
    gate.weight.detach().fill_(30.0)  # sigmoids of exactly 1
    with torch.no_grad():
        assert torch.equal(gate(x).expert_of_slot, torch.tensor([0, 0, 0, 1, 1, 1]))
        with KERNELS.switched_off():
            assert torch.equal(gate(x).expert_of_slot, torch.tensor([0, 0, 0, 1, 1, 1]))


def test_the_gate_leaves_the_kernel_to_few_tokens_in_evaluation(native):
    gate, x = TopKGate(6, EXPERTS), torch.randn(3, 6)
    with torch.no_grad():
        assert has_few_tokens(torch.randn(256, 64))
        assert not has_few_tokens(torch.randn(257, 64))
        assert not has_few_tokens(torch.randn(0, EXPERTS))
        gate.expert_slots.copy_(torch.tensor([9, 0, 0, 0, 0]))  # the load that training sees
        training, evaluation = gate(x).report.balance_loss, gate.eval()(x).report.balance_loss
    assert training != evaluation
    assert gate(x).weight_of_slot.requires_grad


def test_what_the_kernel_does_not_serve(native):
    x, weight = torch.randn(2, 3), torch.randn(EXPERTS, 4, 3)
    assert has_few_slots(20, x, weight)
    assert has_few_slots(10, x.bfloat16(), weight.bfloat16())
    assert not has_few_slots(20, x.bfloat16(), weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert has_few_slots(20, x.bfloat16(), weight)
    assert not has_few_slots(21, x, weight)
    assert not has_few_slots(11, x.bfloat16(), weight.bfloat16())
    assert not has_few_slots(2, x, weight, weight.bfloat16())
    assert not has_few_slots(2, x.double(), weight.double())
    assert not has_few_slots(2, x.clone().requires_grad_(), weight)
    assert not has_few_slots(2, x.to("meta"), weight)
    assert not torch.func.vmap(lambda x: torch.tensor(has_few_slots(2, x, weight)))(x[None])
    with torch.no_grad():
        assert has_few_slots(2, x.clone().requires_grad_(), torch.nn.Parameter(weight))
    with KERNELS.switched_off():
        assert not has_few_slots(2, x, weight)


def test_what_does_not_fit_is_refused(native):
    tokens, token_of_slot, weights, counts, *layers = mixture()
    for wrong in (-1, TOKENS):
        with pytest.raises(RuntimeError, match=r"token_of_slot must lie in \[0, N\)"):
            experts_of_few_tokens(tokens, token_of_slot.clone().fill_(wrong), weights, counts, *layers, "silu")
    for wrong, message in ((counts + 1, "at most the number of slots"), (counts - 1, "must not be negative")):
        with pytest.raises(RuntimeError, match=message):
            experts_of_few_tokens(tokens, token_of_slot, weights, wrong, *layers, "silu")
    with pytest.raises(RuntimeError, match="shapes of tokens, slots, counts and layers disagree"):
        experts_of_few_tokens(tokens[:, :2], token_of_slot, weights, counts, *layers, "silu")
    with pytest.raises(RuntimeError, match=r"k must lie in \[1, E\]"):
        route_few_tokens(torch.randn(2, 3), None, 4, False, True, 1.0)


def test_operations_are_counted(native):
    with FlopCounterMode(display=False) as counter:
        expert_mlp(*mixture(counts=(2, 0, 0, 1, 1)))
    assert counter.get_total_flops() == 2 * 5 * (12 * 10 + 10 * 6)  # of all slots, the ignored one too


def test_threads_change_no_bit(native):
    arguments = mixture(dim=96, hidden_dim=3000)
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            runs.append(experts_of_few_tokens(*arguments, "silu"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*runs)
