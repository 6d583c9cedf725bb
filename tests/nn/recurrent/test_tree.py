import pytest
import torch
from torch import nn

from lightning_accel.nn import TreeRNN, forest_from_nested, join_parents, plan_levels


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


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_matches_recursion(cell):
    tree, parent = TreeRNN(3, 5, cell).double(), random_forest(4, 11)
    x = torch.randn(44, 3, dtype=torch.float64, requires_grad=True)
    states, roots = tree(x, parent)
    expected = recursive(tree, x, parent)
    torch.testing.assert_close(states, expected)
    torch.testing.assert_close(roots, expected[parent < 0])
    probe, inputs = torch.randn_like(states), (x, *tree.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(states, inputs, probe, retain_graph=True), torch.autograd.grad(expected, inputs, probe)
    )


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_tree_is_as_alone_in_float32(cell):
    tree, parents = TreeRNN(3, 5, cell), [random_forest(1, size) for size in (1, 9, 4)]
    x = torch.randn(14, 3)
    states, roots = tree(x, join_parents(parents))
    for parent, rows, found, root in zip(parents, x.split([1, 9, 4]), states.split([1, 9, 4]), roots, strict=True):
        alone, alone_root = tree(rows, parent)
        torch.testing.assert_close(found, alone)
        torch.testing.assert_close(root, alone_root[0])


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_on_a_chain_it_is_the_network_of_torch(cell):
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
def test_deep_chain():
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


def test_no_nodes():
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
def test_autocast(cell):
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
