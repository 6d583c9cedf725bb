import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from lightning_accel.data.graphs.dataset import NeighbourDataset, NodeDataset
from lightning_accel.data.graphs.tasks import random_regular_graph


def graph_of(n=60, degree=6):
    graph = random_regular_graph(n, degree, torch.Generator().manual_seed(0))
    graph.x = torch.arange(float(n))[:, None]
    graph.y = torch.arange(n)
    graph.edge_attr = (graph.edge_index[0] * 1000 + graph.edge_index[1]).float()[:, None]
    graph.triangle_index = torch.zeros(3, n, dtype=torch.int64)  # of the whole graph
    return graph


def neighbours(graph, nodes):
    """Where edges that end at ``nodes`` begin."""
    return graph.edge_index[0][torch.isin(graph.edge_index[1], nodes)]


def test_all_neighbours_are_the_graph_around():
    graph = graph_of()
    batch = NeighbourDataset(graph, [-1, -1])[[7, 3, 50]]
    seeds = torch.tensor([7, 3, 50])
    once = torch.cat([seeds, neighbours(graph, seeds)]).unique()
    twice = torch.cat([once, neighbours(graph, once)]).unique()
    assert batch.n_id[:3].tolist() == [7, 3, 50]
    assert batch.n_id.sort().values.equal(twice)
    assert batch.target_index.tolist() == [0, 1, 2]
    assert batch.batch.equal(torch.zeros(len(twice), dtype=torch.int64))
    assert batch.x[:, 0].equal(batch.n_id.float())
    assert batch.y.equal(batch.n_id)
    assert "triangle_index" not in batch
    inside = torch.isin(graph.edge_index, twice).all(0)
    assert batch.edge_attr.flatten().sort().values.equal(graph.edge_attr[inside].flatten().sort().values)
    ends = batch.n_id[batch.edge_index]
    assert batch.edge_attr[:, 0].equal((ends[0] * 1000 + ends[1]).float())


@pytest.mark.parametrize("hops", [[2], [3, 2]])
def test_draws_are_of_so_many_neighbours_without_replacement(hops):
    graph = graph_of()
    rows = NeighbourDataset(graph, hops)
    adjacent = {(a, b) for a, b in graph.edge_index.t().tolist()}
    for seed in range(10):
        batch = rows[[seed]]
        found = batch.n_id.tolist()
        assert len(found) == len({*found})
        first = found[1 : 1 + hops[0]]
        assert len(first) == hops[0]
        assert all((node, seed) in adjacent for node in first)
        assert len(found) <= 1 + hops[0] + (hops[0] * hops[1] if len(hops) > 1 else 0)
        kept = {(a, b) for a, b in batch.n_id[batch.edge_index].t().tolist()}
        assert kept == {(a, b) for a, b in adjacent if a in found and b in found}


@pytest.mark.slow
def test_draws_are_uniform_and_repeat():
    graph = graph_of()
    counts = torch.zeros(60)
    rows = NeighbourDataset(graph, [2])
    for rows.seed in range(400):
        counts[rows[[4]].n_id[1:]] += 1
    shares = counts[counts > 0] / 400
    assert len(shares) == 6
    assert (shares - 1 / 3).abs().max() < 0.095  # four deviations
    rows = NeighbourDataset(graph, [2, 2])
    assert rows[[4, 9]].n_id.equal(NeighbourDataset(graph, [2, 2])[[4, 9]].n_id)
    drawn = {tuple(NeighbourDataset(graph, [2])[[4] * times].n_id.tolist()) for times in range(1, 9)}
    assert len(drawn) > 1  # not those of another batch


def test_lonely_listed_and_repeated_nodes():
    graph = Data(edge_index=torch.tensor([[0, 0, 1], [1, 1, 1]]), x=torch.arange(3.0)[:, None], num_nodes=3)
    rows = NeighbourDataset(graph, [5, 5], rows=torch.tensor([2, 1]))
    assert len(rows) == 2
    lonely = rows[0]
    assert (lonely.n_id.tolist(), lonely.num_edges, lonely.target_index.tolist()) == ([2], 0, [0])
    repeated = rows[[1, 0, 1]]
    assert repeated.n_id.tolist() == [1, 2, 0]
    assert repeated.target_index.tolist() == [0, 1, 0]
    assert repeated.edge_index.tolist() == [[2, 2, 0], [0, 0, 0]]
    assert rows[[1, 0]].n_id.tolist() == [1, 2, 0]  # nothing is left of the batch before


def test_a_hub_is_not_followed_whole():
    n = 20_000
    spokes = torch.arange(1, n)
    graph = Data(
        edge_index=torch.stack([torch.cat([spokes, 0 * spokes]), torch.cat([0 * spokes, spokes])]), num_nodes=n
    )
    batch = NeighbourDataset(graph, [10, 10])[[5, 6]]
    assert batch.num_nodes <= 2 + 1 + 10
    assert batch.num_edges == 2 * (batch.num_nodes - 1)


def test_nodes_of_several_graphs_come_with_their_graphs():
    graphs = [graph_of(n, 2) for n in (5, 7, 4)]
    for graph in graphs:
        del graph.triangle_index
    rows = NodeDataset(graphs)
    assert len(rows) == 16
    batch = rows[[13, 3, 12, 13]]
    assert batch.num_graphs == 2
    assert batch.target_index.tolist() == [6, 3, 5, 6]
    assert batch.y[batch.target_index].tolist() == [1, 3, 0, 1]
    whole = rows[np.arange(16).tolist()]
    assert whole.target_index.tolist() == list(range(16))
    assert NodeDataset(graphs[:1], torch.tensor([4, 0]))[[1, 0]].target_index.tolist() == [0, 4]
