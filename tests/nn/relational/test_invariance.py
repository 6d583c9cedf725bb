"""The test of layers over graphs finds those that look at an order, and passes those that do not."""

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv, GINEConv, TopKPooling, global_add_pool

from lightning_accel.nn.relational.invariance import assert_permutation_invariant
from lightning_accel.nn.relational.layers import RO3Pooling

RING = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
RING = torch.cat([RING, RING.flip(0)], dim=1)


def batch_of_two():
    """Of 5 and 7 nodes: x, edge_index, edge_attr and batch."""
    edge_index = torch.cat([torch.randint(5, (2, 10)), 5 + torch.randint(7, (2, 14))], dim=1)
    return torch.randn(12, 3), edge_index, torch.randn(24, 2), (torch.arange(12) >= 5).long()


class FirstNode(nn.Module):
    def forward(self, x, edge_index):
        return x[:1]


class FirstEntry(nn.Module):
    def forward(self, x, edge_index):
        return x[edge_index[0, :1]] * 0 + (edge_index[0, 0] - edge_index[1, 0]).abs()


class FirstGraph(nn.Module):
    """Right for one graph, wrong for a batch: adds something of its first graph to all."""

    def forward(self, x, edge_index, batch):
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
    x, edge_index, edge_attr, batch = batch_of_two()
    assert_permutation_invariant(RO3Pooling(edge_dim=2), x, edge_index, edge_attr, batch)
    network = nn.Linear(3, 4)
    assert_permutation_invariant(GINEConv(network, edge_dim=2), x, edge_index, edge_attr, level="node")
    assert_permutation_invariant(lambda x, _, batch: global_add_pool(x, batch), x, edge_index, batch=batch)
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
    message = rf"the output of {type(module).__name__} depends on the order of {what} \(trial .*, seed 0\): "
    with pytest.raises(AssertionError, match=message):
        # all entries but the first differ by 2 or more under a look at numbers; a chain keeps them apart
        assert_permutation_invariant(module, torch.arange(12.0).view(4, 3), edge_index, level=level, trials=20)


def test_finds_a_look_at_the_first_graph():
    """Renumbering and reordering entries do not show it; only the order of graphs does."""
    x, edge_index, _, batch = batch_of_two()
    with pytest.raises(AssertionError, match="FirstGraph depends on the order of graphs"):
        assert_permutation_invariant(FirstGraph(), x, edge_index, batch=batch, trials=20)
    assert_permutation_invariant(FirstGraph(), x[:5], edge_index[:, :10], batch=batch[:5])


def test_finds_that_topk_pooling_breaks_ties_by_number():
    model = TopK()
    with pytest.raises(AssertionError, match="TopK depends on the order of nodes"):
        assert_permutation_invariant(model, torch.ones(6, 1), RING, trials=20)
    assert_permutation_invariant(model, torch.randn(6, 1), RING)  # where no two nodes look alike, it is fine


def test_node_outputs_have_to_move_with_their_nodes():
    """A constant under every permutation is right for graphs, and wrong for nodes."""
    fixed = torch.randn(6, 1)
    call = lambda x, edge_index: fixed.to(x.dtype)  # noqa: E731
    with pytest.raises(AssertionError, match="depends on the order of nodes"):
        assert_permutation_invariant(call, torch.ones(6, 1), RING, level="node")


def test_outputs_of_the_wrong_shape_are_named():
    x, edge_index, _, batch = batch_of_two()
    with pytest.raises(AssertionError, match=r"<lambda> must return 2 rows, one a graph; got \(12, 3\)"):
        assert_permutation_invariant(lambda x, _, batch: x, x, edge_index, batch=batch)
    with pytest.raises(AssertionError, match=r"must return 12 rows, one a node; got \(\)"):
        assert_permutation_invariant(lambda x, _: x.sum(), x, edge_index, level="node")
    assert_permutation_invariant(lambda x, _: x.sum(), x, edge_index)  # of one graph any shape will do


def test_randomness_is_told_from_dependence_on_an_order():
    with pytest.raises(ValueError, match="another output, or NaN"):
        assert_permutation_invariant(lambda x, _: x.sum(0, keepdim=True) + torch.rand(1), torch.ones(6, 1), RING)
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
    with pytest.raises(AssertionError, match="Greatest absolute difference: nan"):
        assert_permutation_invariant(call, torch.ones(6, 1) * 0, RING, trials=30)


def test_batches_stay_in_the_order_of_their_graphs():
    """As PyG makes them, and as some layers need them."""

    def call(x, edge_index, batch):
        assert (batch.diff() >= 0).all()
        return global_add_pool(x, batch)

    x, edge_index, _, batch = batch_of_two()
    assert_permutation_invariant(call, x, edge_index, batch=batch, trials=20)


def test_infinite_outputs_do_not_excuse_the_others():
    def infinite_and_first(x, edge_index):
        return torch.stack([x.new_tensor(float("inf")), x[0, 0]])[None]

    with pytest.raises(AssertionError, match="infinite_and_first depends on the order of nodes"):
        assert_permutation_invariant(infinite_and_first, torch.arange(6.0)[:, None], RING)
    assert_permutation_invariant(lambda x, edge_index: -1 / x.relu(), torch.arange(6.0)[:, None], RING, level="node")


def test_infinities_stay_in_place():
    fixed = torch.tensor([float("inf"), 1, 1, 1, 1, 1])[:, None]
    with pytest.raises(AssertionError, match="depends on the order of nodes"):
        assert_permutation_invariant(lambda x, edge_index: fixed, torch.ones(6, 1), RING, level="node")


def test_nan_is_told_as_such():
    with pytest.raises(ValueError, match="or NaN"):
        assert_permutation_invariant(lambda x, edge_index: x.sum(0) * float("nan"), torch.ones(6, 1), RING)
