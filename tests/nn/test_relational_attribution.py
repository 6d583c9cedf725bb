"""Scores of triples add up to the output, and each is what the output loses with its triple."""

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data

from lightning_accel.nn.relational import RO3Conv, RO3Pooling
from lightning_accel.nn.relational_attribution import attribute_triples
from lightning_accel.nn.triple_sums import Graphs, count_subsets
from lightning_accel.ops import find_triples

EDGES = [{}, {"edge_dim": 3}, {"num_relations": 4}]
EDGE_NAMES = ["plain", "features", "typed"]


def graph(n: int, options: dict | None = None) -> Data:
    edge_index = torch.randint(n, (2, 2 * n))
    data = Data(x=torch.randn(n, 2, dtype=torch.float64), edge_index=edge_index)
    if options and "edge_dim" in options:
        data.edge_attr = torch.randn(2 * n, 3, dtype=torch.float64)
    elif options:
        data.edge_attr = torch.randint(4, (2 * n,))
    return data


@pytest.mark.parametrize("options", EDGES, ids=EDGE_NAMES)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_scores_add_up_to_the_output(options, reduce):
    data = Batch.from_data_list([graph(n, options) for n in (9, 1, 12)])
    pool = RO3Pooling(2, 4, rank=3, reduce=reduce, **options).double()
    found = attribute_triples(pool, data, target=2)
    output = pool(data.x, data.edge_index, data.edge_attr, data.batch)[:, 2]
    owner = data.batch[found.triples[:, 1]]
    torch.testing.assert_close(output.new_zeros(3).index_add(0, owner, found.score), output, rtol=1e-10, atol=1e-10)
    counts = count_subsets(find_triples(data.edge_index, 22), Graphs(None, None))
    assert (found.kind == 3).sum() == counts.triangle
    assert (found.kind == 2).sum() == counts.wedge


def test_a_score_is_the_term_of_its_triple():
    data = graph(10)
    pool = RO3Pooling(2, 1, rank=3).double()
    ((a,), (b, c)) = pool.terms.node_maps(data.x).values()
    of_triangle, of_wedge = pool.out.weight[0].split(3)
    adjacent = {frozenset(pair) for pair in data.edge_index.T.tolist() if len(set(pair)) == 2}
    for (i, j, k), kind, score in zip(*(column.tolist() for column in attribute_triples(pool, data)), strict=True):
        assert {frozenset((i, j)), frozenset((j, k))} <= adjacent
        assert (frozenset((i, k)) in adjacent) == (kind == 3)
        term = of_triangle @ (a[i] * a[j] * a[k]) if kind == 3 else of_wedge @ (b[i] * c[j] * b[k])
        assert score == pytest.approx(float(term.detach()), abs=1e-12)


class Model(nn.Module):
    def __init__(self, head: nn.Module, **options) -> None:
        super().__init__()
        self.conv, self.pool, self.head = RO3Conv(2, 5, rank=3), RO3Pooling(5, 4, rank=3, **options), head

    def forward(self, data):
        return self.head(self.pool(self.conv(data.x, data.edge_index), data.edge_index, batch=data.batch))


def test_scores_of_a_model_add_up_to_its_linearisation():
    data = Batch.from_data_list([graph(n) for n in (9, 12)])
    model = Model(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))).double().requires_grad_(False)
    pooled = []
    model.pool.register_forward_hook(lambda module, args, output: pooled.append(output))
    with torch.no_grad():
        found = attribute_triples(model, data, target=1)
    leaf = pooled[0].detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.head(leaf)[:, 1].sum(), leaf)
    torch.testing.assert_close(found.score.sum(), (gradient * leaf).sum().detach())
    linear = Model(nn.Linear(4, 1)).double()
    output = linear(data) - linear.head.bias
    torch.testing.assert_close(attribute_triples(linear, data).score.sum(), output.sum())


def test_leaves_no_hook_and_no_gradient_behind():
    data, model = graph(8), Model(nn.Linear(4, 1)).double()
    attribute_triples(model, data)
    assert not model.pool._forward_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_scores_of_nothing():
    data = Data(x=torch.ones(2, 2), edge_index=torch.tensor([[0], [1]]))
    found = attribute_triples(RO3Pooling(2, 1), data)
    assert found.triples.shape == (0, 3)
    assert found.score.shape == found.kind.shape == (0,)


def test_what_cannot_be_attributed_is_named():
    data = graph(8)
    with pytest.raises(ValueError, match="which of the 4 columns"):
        attribute_triples(RO3Pooling(2, 4).double(), data)
    with pytest.raises(ValueError, match="kernel='product'; got kernel='mlp'"):
        attribute_triples(Model(nn.Linear(4, 1), kernel="mlp").double(), data)
    with pytest.raises(ValueError, match="one RO3Pooling, or name which with pooling=; it has 0"):
        attribute_triples(nn.Linear(2, 2), data)
    with pytest.raises(ValueError, match="called 0 times"):
        attribute_triples(Model(nn.Linear(4, 1)).double(), data, pooling=RO3Pooling(5, 4))
