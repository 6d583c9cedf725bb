"""Messages of PyTorch Geometric's convolutions, summed in one pass, against the convolutions' own execution."""

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, GraphConv, MessagePassing, SAGEConv

from lightning_accel.nn import message_passing
from lightning_accel.nn.message_passing import fuse_messages_, has_fusible_messages, unfuse_messages_


class Summed(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class Weighted(MessagePassing):
    """Send features times a weight under a name of its own, from targets to sources."""

    def __init__(self):
        super().__init__(aggr="add", flow="target_to_source")

    def forward(self, h, edge_index, norm):
        return self.propagate(edge_index, h=h, norm=norm)

    def message(self, h_j, norm):
        return norm.view(-1, 1) * h_j


class Noisy(MessagePassing):
    """Drop features of messages in training alone."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return nn.functional.dropout(x_j, 0.5, self.training)


class Detached(Summed):
    """Send features without their gradient."""

    def message(self, x_j):
        return x_j.detach()


class Bounded(Summed):
    """Send features up to a bound that those of a first batch may not reach."""

    def message(self, x_j):
        return x_j.clamp(max=10.0)


class Clipped(MessagePassing):
    """Send what is equal to the features up to a bound that trying it does not meet."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j.clamp(max=1e7)


def graph(num_nodes=9, num_edges=31):
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(num_nodes - 1, (2, num_edges), generator=generator)  # the last node has no edges
    return torch.randn(num_nodes, 4, generator=generator), edge_index, torch.rand(num_edges, generator=generator)


def results(layer, *inputs, dtype=torch.float32):
    """Return outputs, and gradients of features and parameters."""
    x = inputs[0].to(dtype).requires_grad_()
    out = layer.to(dtype)(x, *inputs[1:])
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), [x, *layer.parameters()])]


LAYERS = {
    "gin": lambda: GINConv(nn.Linear(4, 3), train_eps=True),
    "sage": lambda: SAGEConv(4, 3),
    "gcn": lambda: GCNConv(4, 3),
    "graph": lambda: GraphConv(4, 3, aggr="mean"),
    "weighted": Weighted,
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients_are_those_of_the_convolution(name, dtype):
    x, edge_index, weight = graph()
    inputs = (x, edge_index, weight.to(dtype)) if name in ("gcn", "graph", "weighted") else (x, edge_index)
    plain = LAYERS[name]()
    fused = copy.deepcopy(plain)
    assert fuse_messages_(fused) == [fused]
    for _ in range(2):  # the first call compares with the convolution's own, the second does without
        for found, expected in zip(
            results(fused, *inputs, dtype=dtype), results(plain, *inputs, dtype=dtype), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert has_own_message_sum(results(fused, *inputs, dtype=dtype)[0])


def has_own_message_sum(out):
    """Return whether the graph of autograd has our sum of messages in it."""
    seen, stack = set(), [out.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [one for one, _ in node.next_functions]
    return any(type(node).__name__ == "_MessageSumBackward" for node in seen)


def test_second_derivatives():
    x, edge_index, weight = graph()
    layer = Weighted()
    fuse_messages_(layer)
    weight, x = weight.double(), x.double().requires_grad_()
    layer(x, edge_index, weight)
    assert torch.autograd.gradgradcheck(lambda x: layer(x, edge_index, weight) ** 2, [x])


def test_bfloat16_is_accumulated_in_float32():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(600, 2, generator=generator).bfloat16()
    edge_index = torch.stack([torch.arange(600), torch.zeros(600, dtype=torch.int64)])
    layer = Summed(aggr="sum")
    fuse_messages_(layer)
    expected = x.double().sum(0)
    layer.propagate.args[2].add((True, True, torch.bfloat16))  # its own sums in bfloat16 stop growing at 256 or so
    found = layer(x, edge_index)[0]
    assert found.dtype == torch.bfloat16
    assert ((found.double() - expected).abs() / expected).max() < 2**-8


def test_bipartite_graphs_and_sizes():
    x, edge_index, _ = graph()
    edge_index = edge_index.clone()
    edge_index[1] %= 3
    plain = SAGEConv(4, 2)
    fused = copy.deepcopy(plain)
    fuse_messages_(fused)
    for _ in range(2):
        torch.testing.assert_close(fused((x, x[:3]), edge_index), plain((x, x[:3]), edge_index))
        torch.testing.assert_close(fused((x, None), edge_index, size=(9, 5)), plain((x, None), edge_index, size=(9, 5)))


def test_changed_edges_are_seen():
    x, edge_index, _ = graph()
    plain, edge_index = SAGEConv(4, 2), edge_index.clone()
    fused = copy.deepcopy(plain)
    fuse_messages_(fused)
    with torch.inference_mode():
        fused(x, edge_index)
    for column in (0, 5):
        edge_index[:, column] = torch.tensor([7, 1])
        for found, expected in zip(results(fused, x, edge_index), results(plain, x, edge_index), strict=True):
            torch.testing.assert_close(found, expected)


def test_no_edges_and_no_nodes():
    layer = Summed()
    fuse_messages_(layer)
    for _ in range(2):
        assert layer(torch.ones(3, 2), torch.empty(2, 0, dtype=torch.int64)).tolist() == [[0, 0]] * 3
        assert layer(torch.ones(0, 2), torch.empty(2, 0, dtype=torch.int64)).shape == (0, 2)


def test_missing_nodes_raise_as_before():
    layer = Summed()
    fuse_messages_(layer)
    with pytest.raises(ValueError, match="invalid 'dim_size'"):
        layer(torch.ones(3, 2), torch.tensor([[0], [5]]))


@pytest.mark.parametrize("kind", [Noisy, Clipped])
def test_messages_that_are_anything_else_stay(kind):
    x, edge_index, _ = graph()
    layer = kind()
    layers = fuse_messages_(layer)
    torch.manual_seed(1)
    found = layer(1e8 * x, edge_index)
    unfuse_messages_(layers)
    torch.manual_seed(1)
    assert torch.equal(found, layer(1e8 * x, edge_index))
    assert "propagate" not in vars(layer)


def test_convolutions_that_are_not_served():
    assert not any(
        map(has_fusible_messages, (Detached(), Bounded(), GATConv(4, 2), SAGEConv(4, 2, aggr="max"), nn.Linear(1, 1)))
    )
    x, edge_index, weight = graph()
    layer = GraphConv(4, 2)
    fuse_messages_(layer)
    layer(x, edge_index, weight)
    learned = weight.clone().requires_grad_()
    layer(x, edge_index, learned).sum().backward()
    assert learned.grad is not None
    layer.register_message_forward_hook(lambda *args: torch.zeros_like(args[-1]))
    assert torch.equal(layer(x, edge_index, weight), layer.lin_root(x) + layer.lin_rel.bias)


def test_layers_of_one_batch_share_its_order(monkeypatch):
    sorts = []
    order = message_passing._stable_order
    monkeypatch.setattr(message_passing, "_stable_order", lambda *args: sorts.append(1) or order(*args))
    x, edge_index, _ = graph()
    model = nn.ModuleList([GINConv(nn.Linear(4, 4)) for _ in range(3)])
    fuse_messages_(model)
    for layer in model:
        x = layer(x, edge_index)
    x.sum().backward()
    assert len(sorts) == 2  # by receivers, and for gradients by senders


def test_orders_of_many_nodes():
    generator = torch.Generator().manual_seed(0)
    for size in (2, 65_536, 65_537, 3_000_000):
        index = torch.randint(size, (999,), generator=generator) // 3 * 3
        assert torch.equal(message_passing._stable_order(index, size), torch.argsort(index, stable=True))
