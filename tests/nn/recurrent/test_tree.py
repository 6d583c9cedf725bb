import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from lightning_accel.nn import TreeRNN, forest_from_nested, join_parents, plan_levels
from lightning_accel.nn.recurrent import tree as tree_module
from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.tree_steps import tree_steps


@pytest.fixture(params=["kernel", "formula"])
def execution(request):
    """Run with the kernel of trees, and without."""
    if request.param == "kernel":
        request.getfixturevalue("native")
        yield
    else:
        with KERNELS.switched_off():
            yield


@pytest.fixture
def calls(native, monkeypatch):
    """Record the cells that run as one operation."""
    seen = []
    spy = lambda cell, *rest: seen.append(cell) or tree_steps(cell, *rest)  # noqa: E731
    monkeypatch.setattr(tree_module, "tree_steps", spy)
    return seen


def random_forest(num_trees, num_nodes):
    """Parents of random trees, nodes in random order."""
    parents = []
    for _ in range(num_trees):
        parent = torch.tensor([-1, *(int(torch.randint(node, ())) for node in range(1, num_nodes))])
        place = torch.randperm(num_nodes)
        shuffled = torch.empty_like(parent)
        shuffled[place] = torch.where(parent < 0, parent, place[parent])
        parents.append(shuffled)
    return join_parents(parents)


def recursive(tree, x, parent):
    """The states, (N, H), node by node: the twin of TreeRNN."""
    children = [[] for _ in parent]
    for node, above in enumerate(parent.tolist()):
        if above >= 0:
            children[above].append(node)
    states = {}

    def visit(node):
        below = [visit(child) for child in children[node]]
        states[node] = step(tree, x[node], below)
        return states[node]

    for root in (parent < 0).nonzero().flatten().tolist():
        visit(root)
    return torch.stack([states[node][0] for node in range(len(parent))])


def step(tree, x, below):
    size = tree.hidden_size
    gates = tree.of_input(x)
    if tree.cell == "lstm":
        h_sum = sum((h for h, _ in below), torch.zeros(size, dtype=x.dtype))
        i, o, u = (gates[: 3 * size] + tree.of_child.weight[: 3 * size] @ h_sum).chunk(3)
        c = i.sigmoid() * u.tanh()
        for h_k, c_k in below:
            c = c + (gates[3 * size :] + tree.of_child.weight[3 * size :] @ h_k).sigmoid() * c_k
        return o.sigmoid() * c.tanh(), c
    z, n, r = gates.chunk(3)
    u_z, u_n, u_r = tree.of_child.weight.chunk(3)
    z = (z + sum((u_z @ h for (h,) in below), torch.zeros(size, dtype=x.dtype))).sigmoid()
    n = (n + sum(((r + u_r @ h).sigmoid() * (u_n @ h) for (h,) in below), torch.zeros(size, dtype=x.dtype))).tanh()
    return ((1 - z) * n + z * sum((h for (h,) in below), torch.zeros(size, dtype=x.dtype)),)


FORESTS = {
    "random trees": lambda: random_forest(4, 11),
    "single nodes": lambda: random_forest(3, 1),
    "a chain": lambda: torch.tensor([1, 2, 3, 4, 5, -1]),
    "a star": lambda: torch.tensor([3, 3, 3, -1, 3, 3]),
    "a binary tree": lambda: forest_from_nested([[["a", "b"], ["c", ["d", "e"]]]]).parent,
}


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("name", FORESTS)
def test_matches_recursion(name, cell, execution):
    tree, parent = TreeRNN(3, 5, cell).double(), FORESTS[name]()
    x = torch.randn(3, len(parent), dtype=torch.float64).t().requires_grad_()  # not in one piece of memory
    states, roots = tree(x, parent)
    expected = recursive(tree, x, parent)
    torch.testing.assert_close(states, expected)
    torch.testing.assert_close(roots, expected[parent < 0])
    probe, inputs = torch.randn_like(states), (x, *tree.parameters())
    torch.testing.assert_close(
        *(torch.autograd.grad(one, inputs, probe, materialize_grads=True) for one in (states, expected))
    )


def states_of(tree, x, parent):
    """The states and all gradients of a random function of them."""
    torch.manual_seed(1)
    inputs = [one for one in (x, *tree.parameters()) if one.requires_grad]
    states, roots = tree(x, parent)
    loss = (states * torch.randn_like(states)).sum() + (roots * torch.randn_like(roots)).sum()
    return [states, roots, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("frozen", ["x", "of_input", "of_child", "of_child and x", "of_input and of_child"])
def test_gradients_of_what_asks_for_them(frozen, cell, calls):
    tree, parent, x = TreeRNN(3, 5, cell).double(), random_forest(2, 7), torch.randn(14, 3, dtype=torch.float64)
    x.requires_grad_("x" not in frozen)
    for name in ("of_input", "of_child"):
        getattr(tree, name).requires_grad_(name not in frozen)
    found = states_of(tree, x, parent)
    assert calls == [cell]
    with KERNELS.switched_off():
        torch.testing.assert_close(found, states_of(tree, x, parent))
    with torch.no_grad():
        states, roots = tree(x, parent)
    assert not states.requires_grad
    torch.testing.assert_close([states, roots], found[:2])


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_second_derivatives(cell, calls):
    tree, parent = TreeRNN(2, 2, cell).double(), torch.tensor([2, 0, -1, 0, 2])
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def penalty():
        (gradient,) = torch.autograd.grad(tree(x, parent)[1].square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (x, *tree.parameters()))

    found = penalty()
    assert calls
    with KERNELS.switched_off():
        torch.testing.assert_close(found, penalty())
    assert all(one.abs().max() > 1e-6 for one in found)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Shifted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def change_forward(layer):
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) + 1


def shifted(layer):
    other = Shifted(layer.in_features, layer.out_features, bias=False)
    other.load_state_dict(layer.state_dict())
    return other


CHANGES = {
    "forward hook": lambda layer: layer.register_forward_hook(lambda layer, args, out: out + 1) and None,
    "forward pre-hook": lambda layer: layer.register_forward_pre_hook(lambda layer, args: 2 * args[0]) and None,
    "gradient hook": lambda layer: layer.register_full_backward_hook(lambda layer, d_x, d_y: (2 * d_x[0],)) and None,
    "parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()) and None,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5) and None,
    "forward of its own": change_forward,
    "bias": lambda layer: nn.Linear(layer.in_features, layer.out_features),
    "subclass": shifted,
    "two layers": lambda layer: nn.Sequential(nn.Linear(5, 2), nn.Linear(2, layer.out_features)),
}


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("name", CHANGES)
def test_changed_layers_of_states_are_called(name, cell, calls):
    tree, parent = TreeRNN(3, 5, cell), random_forest(2, 7)
    x = torch.randn(14, 3, requires_grad=True)
    plain = states_of(tree, x, parent)
    calls.clear()
    tree.of_child = CHANGES[name](tree.of_child) or tree.of_child
    found = states_of(tree, x, parent)
    assert not calls
    with KERNELS.switched_off():
        torch.testing.assert_close(found, states_of(tree, x, parent))
    assert not torch.allclose(found[2], plain[2])


@pytest.mark.parametrize("name", ["forward hook", "gradient hook", "parametrization", "two layers"])
def test_changed_layers_of_inputs_are_called_by_the_kernel(name, calls):
    tree, parent = TreeRNN(5, 4), random_forest(2, 7)
    x = torch.randn(14, 5, requires_grad=True)
    tree.of_input = CHANGES[name](tree.of_input) or tree.of_input
    found = states_of(tree, x, parent)
    assert calls == ["lstm"]
    with KERNELS.switched_off():
        torch.testing.assert_close(found, states_of(tree, x, parent))


def test_hooks_of_all_modules_see_the_layer_of_states(calls):
    tree, seen = TreeRNN(3, 4), []
    with nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module)):
        tree(torch.randn(4, 3), torch.tensor([-1, 0, 0, 2]))
    assert seen == [tree.of_input, tree.of_child, tree.of_child, tree]
    assert not calls


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced_and_transformed_networks_run_a_level_at_a_time(calls):
    tree = TreeRNN(3, 4).double().requires_grad_(False)
    parent, x = random_forest(2, 5), torch.randn(10, 3, dtype=torch.float64)
    levels, call = plan_levels(parent), lambda x: tree(x, plan_levels(parent))[1]
    expected = call(x)
    calls.clear()
    compiled = torch.compile(lambda x: tree(x, levels)[1], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.jit.trace(lambda x: tree(x, levels)[1], x, check_trace=False)(x), expected)
    torch.testing.assert_close(torch.func.vmap(lambda x: tree(x, levels)[1])(x[None])[0], expected)
    _, tangent = torch.func.jvp(lambda x: tree(x, levels)[1], (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = tree(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), levels)[1]
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)
    assert not calls
    probe = torch.randn_like(expected)
    given = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(given), given, probe)
    torch.testing.assert_close((tangent * probe).sum(), gradient.sum())
    assert calls


@pytest.mark.slow
def test_compiled_networks_plan_levels(native):
    tree, x = TreeRNN(3, 4), torch.randn(10, 3, requires_grad=True)
    compiled = torch.compile(tree, backend="eager")
    for parent in (random_forest(2, 5), random_forest(1, 10)):
        torch.testing.assert_close(states_of(compiled, x, parent), states_of(tree, x, parent))
    torch._dynamo.reset()


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_tree_is_as_alone_in_float32(cell, execution):
    tree, parents = TreeRNN(3, 5, cell), [random_forest(1, size) for size in (1, 9, 4)]
    x = torch.randn(14, 3)
    states, roots = tree(x, join_parents(parents))
    for parent, rows, found, root in zip(parents, x.split([1, 9, 4]), states.split([1, 9, 4]), roots, strict=True):
        alone, alone_root = tree(rows, parent)
        torch.testing.assert_close(found, alone)
        torch.testing.assert_close(root, alone_root[0])


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_on_a_chain_it_is_the_network_of_torch(cell, execution):
    tree = TreeRNN(3, 4, cell).double()
    rnn = (nn.LSTM if cell == "lstm" else nn.GRU)(3, 4).double()
    order = [0, 3, 2, 1] if cell == "lstm" else [2, 0, 1]  # torch: input, forget, cell, output; reset, update, new
    with torch.no_grad():
        for theirs, ours in (
            (rnn.weight_ih_l0, tree.of_input.weight),
            (rnn.weight_hh_l0, tree.of_child.weight),
            (rnn.bias_ih_l0, tree.of_input.bias),
        ):
            theirs.copy_(torch.cat([ours.chunk(len(order))[gate] for gate in order]))
        rnn.bias_hh_l0.zero_()
    x = torch.randn(7, 3, dtype=torch.float64)
    states, _ = tree(x, torch.tensor([1, 2, 3, 4, 5, 6, -1]))
    torch.testing.assert_close(states, rnn(x)[0])


@pytest.mark.slow
def test_deep_chain(execution):
    num_nodes = 10_000
    tree, parent = TreeRNN(1, 2), torch.arange(-1, num_nodes - 1)
    x = torch.randn(num_nodes, 1, requires_grad=True)
    _, roots = tree(x, parent)
    roots.sum().backward()
    assert x.grad.isfinite().all()
    nested = "leaf"
    for _ in range(num_nodes - 1):
        nested = [nested]
    assert torch.equal(forest_from_nested([nested]).parent, parent)


def test_no_nodes(execution):
    states, roots = TreeRNN(3, 2)(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert states.shape == roots.shape == (0, 2)
    assert forest_from_nested([]).parent.dtype == join_parents([]).dtype == torch.int64


def test_plan_is_used_again():
    tree, parent, x = TreeRNN(3, 2), random_forest(2, 6), torch.randn(12, 3)
    levels = plan_levels(parent)
    torch.testing.assert_close(tree(x, levels), tree(x, parent))
    assert sum(levels.sizes) == 12
    assert levels.sizes[-1] == 2


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_autocast(cell, execution):
    tree, parent, x = TreeRNN(3, 2, cell), random_forest(2, 6), torch.randn(12, 3)
    with torch.autocast("cpu", torch.bfloat16):
        states, _ = tree(x, parent)
    torch.testing.assert_close(states.float(), tree(x, parent)[0], rtol=0.05, atol=0.05)
    states.float().sum().backward()


def test_what_is_no_forest_is_refused():
    tree, x = TreeRNN(3, 2), torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"must lead to a root; 2 nodes do not, node 1 among them.*cycle"):
        tree(x, torch.tensor([-1, 2, 1, 0]))
    with pytest.raises(ValueError, match="1 nodes do not, node 3"):
        tree(x, torch.tensor([-1, 0, 1, 3]))
    with pytest.raises(ValueError, match=r"lie in \[0, 4\), or be -1 for roots; node 2 has 4.*join_parents"):
        tree(x, torch.tensor([-1, 0, 4, 0]))
    with pytest.raises(ValueError, match="node 1 has -2"):
        plan_levels(torch.tensor([-1, -2]))
    with pytest.raises(ValueError, match=r"must be a vector \(N,\).*got \(1, 2\)"):
        plan_levels(torch.tensor([[-1, 0]]))
    with pytest.raises(TypeError, match=r"must be int64; got torch.float32. Call parent.long\(\)"):
        plan_levels(torch.zeros(3))
    with pytest.raises(ValueError, match=r"x must be \(N, I\), here \(3, 3\).*got \(4, 3\)"):
        tree(x, torch.tensor([-1, 0, 0]))
    with pytest.raises(ValueError, match="cell must be gru or lstm; got 'rnn'"):
        TreeRNN(3, 2, "rnn")
