"""Triples stored with graphs stay right in batches."""

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData

from lightning_accel.data.graphs.transform import AddRelationalTriples
from lightning_accel.ops import find_triples


def graph(n: int) -> Data:
    return Data(x=torch.randn(n, 1), edge_index=torch.randint(n, (2, 3 * n)))


def test_batches_shift_them():
    add = AddRelationalTriples()
    graphs = [add(graph(n)) for n in (9, 4, 1, 12)]
    batch = Batch.from_data_list(graphs)
    triples = find_triples(batch.edge_index, batch.num_nodes)
    assert torch.equal(batch.triangle_index, triples.triangle)
    assert batch.triangle_index.dtype == torch.int64
    assert torch.equal(batch[3].triangle_index, graphs[3].triangle_index)


def test_the_graph_given_stays_as_it_is():
    data = graph(6)
    added = AddRelationalTriples()(data)
    assert "triangle_index" in added
    assert "triangle_index" not in data


def test_graphs_without_edges_have_none():
    data = AddRelationalTriples()(Data(edge_index=torch.zeros(2, 0, dtype=torch.long), num_nodes=3))
    assert data.triangle_index.shape == (3, 0)


def test_what_has_no_one_list_of_triples_is_refused():
    with pytest.raises(TypeError, match=r"got a HeteroData. Make the graph homogeneous"):
        AddRelationalTriples()(HeteroData())
    with pytest.raises(ValueError, match=r"needs data\.edge_index; got none"):
        AddRelationalTriples()(Data(x=torch.ones(3, 1)))
