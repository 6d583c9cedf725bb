"""The test of layers over graphs finds those that look at an order, and passes those that do not."""

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, GINEConv, TopKPooling, global_add_pool

from lightning_accel.nn.relational.invariance import assert_permutation_invariant
from lightning_accel.nn.relational.layers import RO3Pooling
from lightning_accel.ops import find_triples

RING = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
RING = torch.cat([RING, RING.flip(0)], dim=1)


def batch_of_two() -> Batch:
    graphs = [
        Data(
            x=torch.randn(n, 3),
            edge_index=torch.randint(n, (2, 2 * n)),
            edge_attr=torch.randn(2 * n, 2),
            y=torch.ones(1),
        )
        for n in (5, 7)
    ]
    return Batch.from_data_list(graphs)


class FirstNode(nn.Module):
    def forward(self, x, edge_index):
        return x[:1]


class FirstEntry(nn.Module):
    def forward(self, x, edge_index):
        return x[edge_index[0, :1]] * 0 + (edge_index[0, 0] - edge_index[1, 0]).abs()


class FirstGraph(nn.Module):
    """Right for one graph, wrong for a batch: adds something of its first graph to all."""

    def forward(self, x, batch):
        pooled = global_add_pool(x, batch)
        return pooled + pooled[:1]


class LargestIndex(nn.Module):
    """The node with the largest number looks different from the others."""

    def forward(self, x, edge_index):
        return x + (torch.arange(len(x)) == len(x) - 1).to(x.dtype)[:, None]


class TopK(nn.Module):
    """Drops half of the nodes; which, of nodes that look alike, is a question of their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = TopKPooling(1, ratio=0.5)
        self.conv = GCNConv(1, 2)

    def forward(self, x, edge_index, batch=None):
        x, edge_index, _, batch, *_ = self.pool(x, edge_index, batch=batch)
        return global_add_pool(self.conv(x, edge_index).square(), batch)


def test_passes_layers_that_are_invariant():
    data = batch_of_two()
    assert_permutation_invariant(RO3Pooling(edge_dim=2), data)
    network = nn.Linear(3, 4)
    assert_permutation_invariant(GINEConv(network, edge_dim=2), data, level="node")
    assert_permutation_invariant(lambda data: global_add_pool(data.x, data.batch), data)
    assert all(p.dtype == torch.float32 for p in network.parameters())  # a copy was made float64
    assert network.training


@pytest.mark.parametrize(
    ("module", "level", "what"),
    [
        (FirstNode(), "graph", "nodes"),
        (FirstEntry(), "graph", "edges"),
        (LargestIndex(), "node", "nodes"),
    ],
    ids=["node", "entry", "number"],
)
def test_finds_a_look_at_an_order(module, level, what):
    edge_index = torch.tensor([[0, 1, 2, 0], [1, 2, 3, 3]])
    message = rf"the output of {type(module).__name__} depends on the order of {what}: .* is off by .* in the order \["
    with pytest.raises(AssertionError, match=message):
        # all entries but the first differ by 2 or more under a look at numbers; a chain keeps them apart
        assert_permutation_invariant(module, torch.arange(12.0).view(4, 3), edge_index, level=level, trials=20)


def test_finds_a_look_at_the_first_graph():
    """Renumbering and reordering entries do not show it; only the order of graphs does."""
    data = batch_of_two()
    with pytest.raises(
        AssertionError, match="FirstGraph depends on the order of graphs: it has to move with its graphs"
    ):
        assert_permutation_invariant(FirstGraph(), data, trials=20)
    assert_permutation_invariant(
        FirstGraph(), data.x[:5], data.edge_index[:, :10], batch=torch.zeros(5, dtype=torch.long)
    )


def test_finds_that_topk_pooling_breaks_ties_by_number():
    model = TopK()
    with pytest.raises(AssertionError, match="TopK depends on the order of nodes"):
        assert_permutation_invariant(model, torch.ones(6, 1), RING, trials=20)
    assert_permutation_invariant(model, torch.randn(6, 1), RING)  # where no two nodes look alike, it is fine


def test_node_outputs_have_to_move_with_their_nodes():
    """A constant under every permutation is right for graphs, and wrong for nodes."""
    fixed = torch.randn(6, 1)
    call = lambda x, edge_index: fixed.to(x.dtype)  # noqa: E731
    with pytest.raises(AssertionError, match="has to move with its nodes"):
        assert_permutation_invariant(call, torch.ones(6, 1), RING, level="node")


def test_triples_stored_with_a_graph_are_renumbered():
    data = Data(x=torch.randn(6, 2), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 0, 4]]))
    data.triangle_index = find_triples(data.edge_index, 6).triangle
    assert_permutation_invariant(lambda x, triangle_index: x[triangle_index].prod(dim=0).sum(0, keepdim=True), data)


def test_arguments_are_found_by_name():
    with pytest.raises(TypeError, match=r"<lambda> needs \['weights'\], which the graph has not; it has"):
        assert_permutation_invariant(lambda x, weights: x, torch.ones(6, 1), RING)
    with pytest.raises(TypeError, match="got a dict"):
        assert_permutation_invariant(RO3Pooling(), {})


def test_outputs_of_the_wrong_shape_are_named():
    data = batch_of_two()
    with pytest.raises(ValueError, match=r"level='graph' needs 2 rows, one a graph; <lambda> returned \(12, 3\)"):
        assert_permutation_invariant(lambda x: x, data)
    with pytest.raises(ValueError, match=r"level='node' needs 12 rows, one a node"):
        assert_permutation_invariant(lambda x: x.sum(), data, level="node")
    with pytest.raises(ValueError, match="must return a tensor; got a tuple"):
        assert_permutation_invariant(lambda x: (x,), data)
    assert_permutation_invariant(lambda x: x.sum(), data.x, data.edge_index)  # of one graph any shape will do


def test_randomness_is_told_from_dependence_on_an_order():
    with pytest.raises(ValueError, match="another output each time"):
        assert_permutation_invariant(lambda x: x.sum(0, keepdim=True) + torch.rand(1), torch.ones(6, 1), RING)
    model, state = RO3PoolingWithDropout(), torch.get_rng_state()
    assert_permutation_invariant(model, torch.ones(6, 1), RING)
    assert torch.equal(torch.get_rng_state(), state)


class RO3PoolingWithDropout(nn.Module):
    """Random in training alone; and random numbers drawn in evaluation, thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.dropout = RO3Pooling(1), nn.Dropout()

    def forward(self, x, edge_index):
        torch.rand(3)
        return self.dropout(self.pool(x, edge_index))


def test_not_a_number_is_a_difference():
    call = lambda x, edge_index: x[:1] / (edge_index[0, 0] - 3)  # noqa: E731
    with pytest.raises(AssertionError, match="off by inf"):
        assert_permutation_invariant(call, torch.ones(6, 1) * 0, RING, trials=30)


def test_batches_stay_in_the_order_of_their_graphs():
    """As PyG makes them, and as some layers need them."""

    def call(x, batch):
        assert (batch.diff() >= 0).all()
        return global_add_pool(x, batch)

    assert_permutation_invariant(call, batch_of_two(), trials=20)


def test_infinite_outputs_do_not_excuse_the_others():
    def infinite_and_first(x, edge_index):
        return torch.stack([x.new_tensor(float("inf")), x[0, 0]])[None]

    with pytest.raises(AssertionError, match="infinite_and_first depends on the order of nodes"):
        assert_permutation_invariant(infinite_and_first, torch.arange(6.0)[:, None], RING)
    assert_permutation_invariant(lambda x, edge_index: -1 / x.relu(), torch.arange(6.0)[:, None], RING, level="node")


def test_infinities_stay_in_place():
    fixed = torch.tensor([float("inf"), 1, 1, 1, 1, 1])[:, None]
    with pytest.raises(AssertionError, match="is off by inf where"):
        assert_permutation_invariant(lambda x, edge_index: fixed, torch.ones(6, 1), RING, level="node")


def test_nan_is_told_as_such():
    with pytest.raises(ValueError, match="returned NaN"):
        assert_permutation_invariant(lambda x, edge_index: x.sum(0) * float("nan"), torch.ones(6, 1), RING)
