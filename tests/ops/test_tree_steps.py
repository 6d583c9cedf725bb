"""The kernel of trees, against the formula, which tests of TreeRNN compare with recursion."""

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_accel.ops import tree_steps as tree_steps_module
from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.tree_levels import plan_levels
from lightning_accel.ops.tree_steps import has_tree_steps, run_levels, tree_steps

CELLS = {"lstm": 4, "gru": 3}
PARENT = torch.tensor([5, -1, 1, 0, -1, 1, 0, 6, 4, 6, 2, -1])  # 3 trees of 5, 2 and 1 levels
FORESTS = {
    "no node": torch.zeros(0, dtype=torch.int64),
    "single nodes": torch.tensor([-1, -1, -1]),
    "a chain": torch.tensor([3, 0, -1, 2]),
    "a star": torch.tensor([2, 2, -1, 2, 2]),
    "trees": PARENT,
}

pytestmark = pytest.mark.usefixtures("native")


def draw(cell, num_nodes, hidden_size, dtype=torch.float64):
    width = CELLS[cell] * hidden_size
    gates = torch.randn(num_nodes, width, dtype=dtype, requires_grad=True)
    return gates, (torch.randn(width, hidden_size, dtype=dtype) / hidden_size**0.5).requires_grad_()


def formula(cell, gates, weight, levels):
    return run_levels(cell, gates.index_select(0, levels.order), partial(F.linear, weight=weight), levels)


def gradients(outputs, inputs, used=(True, True)):
    torch.manual_seed(1)
    loss = sum((one * torch.randn_like(one)).sum() for one, is_used in zip(outputs, used, strict=True) if is_used)
    return torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hidden_size", [1, 16, 37])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", FORESTS)
def test_matches_the_formula(name, cell, hidden_size, dtype):
    levels = plan_levels(FORESTS[name])
    inputs = draw(cell, len(levels.order), hidden_size, dtype)
    found, expected = tree_steps(cell, *inputs, levels), formula(cell, *inputs, levels)
    assert has_tree_steps(*inputs, levels)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(found, expected, **tolerance)
    for used in ((True, True), (True, False), (False, True)):
        torch.testing.assert_close(gradients(found, inputs, used), gradients(expected, inputs, used), **tolerance)


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_are_those_of_finite_differences(cell, check):
    levels = plan_levels(torch.tensor([5, -1, 1, 0, -1, 1]))
    assert check(lambda gates, weight: tree_steps(cell, gates, weight, levels), draw(cell, 6, 2))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("number", [0, 1])
def test_one_input_alone_gets_a_gradient(cell, number):
    levels, inputs = plan_levels(PARENT), draw(cell, len(PARENT), 3)
    inputs[1 - number].requires_grad_(False)
    torch.testing.assert_close(
        gradients(tree_steps(cell, *inputs, levels), inputs[number : number + 1]),
        gradients(formula(cell, *inputs, levels), inputs[number : number + 1]),
    )
    second = torch.autograd.grad(tree_steps(cell, *inputs, levels)[1].sum(), inputs[number], create_graph=True)[0]
    assert second.requires_grad


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_may_be_batched(cell):
    levels, inputs = plan_levels(PARENT), draw(cell, len(PARENT), 3)
    states, _ = tree_steps(cell, *inputs, levels)
    probes = torch.randn(2, *states.shape, dtype=torch.float64)
    gradients_of = partial(torch.autograd.grad, states, inputs, retain_graph=True)
    for found in (gradients_of(probes, is_grads_batched=True), torch.func.vmap(gradients_of)(probes)):
        for number, probe in enumerate(probes):
            torch.testing.assert_close([one[number] for one in found], list(gradients_of(probe)))


@pytest.mark.parametrize("cell", CELLS)
def test_memory_order_and_threads_change_nothing(cell):
    draws = random.Random(3)
    parent = torch.tensor([-1] * 300 + [draws.randrange(node) for node in range(300, 900)])  # enough for two threads
    levels, (gates, weight) = plan_levels(parent), draw(cell, len(parent), 70)
    expected = tree_steps(cell, gates, weight, levels)
    expected = [*expected, *gradients(expected, (gates, weight))]
    turned = [one.detach().t().contiguous().t().requires_grad_() for one in (gates, weight)]
    order = torch.stack([levels.order, levels.order], 1)[:, 0]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = tree_steps(cell, *turned, levels._replace(order=order))
        found = [*found, *gradients(found, turned)]
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, expected)


def test_what_the_kernel_does_not_serve_runs_by_the_formula(monkeypatch):
    levels, (gates, weight) = plan_levels(PARENT), draw("gru", len(PARENT), 3, torch.float32)
    expected = tree_steps("gru", gates, weight, levels)
    monkeypatch.setattr(tree_steps_module, "_Tree", None)
    with KERNELS.switched_off():
        torch.testing.assert_close(tree_steps("gru", gates, weight, levels), expected)
    half = tree_steps("gru", gates.bfloat16(), weight.bfloat16(), levels)
    torch.testing.assert_close([one.float() for one in half], [*expected], rtol=0.1, atol=0.1)
    assert not has_tree_steps(gates.double(), weight, levels)
    with torch.autocast("cpu", torch.bfloat16):
        assert not has_tree_steps(gates, weight, levels)


def test_operations_are_counted():
    levels, (gates, weight) = plan_levels(PARENT), draw("lstm", len(PARENT), 7)
    with FlopCounterMode(display=False) as counter:
        tree_steps("lstm", gates, weight, levels)[0].sum().backward()
    # states forward and backward, and the gradient of the weight, of all nodes but 3 roots
    assert counter.get_total_flops() == 3 * 2 * (12 - 3) * 28 * 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gates": torch.zeros(12, 8)}, "gates must be"),
        ({"gates": torch.zeros(11, 9)}, "node for each row of gates"),
        ({"parents": torch.zeros(8, dtype=torch.int64)}, "levels must be those of one forest"),
        ({"sizes": [13, -1]}, "must be positive"),
    ],
)
def test_shapes_that_disagree_are_refused(change, message):
    change = dict(change)
    gates = change.pop("gates", torch.zeros(12, 9))
    with pytest.raises(RuntimeError, match=message):
        tree_steps("gru", gates, torch.zeros(9, 3), plan_levels(PARENT)._replace(**change))


def test_nodes_that_are_not_there_are_refused():
    levels, arguments = plan_levels(PARENT), (torch.zeros(12, 9), torch.zeros(9, 3))
    with pytest.raises(IndexError, match="order must lie"):
        tree_steps("gru", *arguments, levels._replace(order=levels.order + 1))
    with pytest.raises(IndexError, match="next level"):
        tree_steps("gru", *arguments, levels._replace(parents=levels.parents + 5))
