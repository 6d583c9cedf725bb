"""Triples stored with graphs stay right in batches."""

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData

from lightning_accel.data.relational_transform import AddRelationalTriples
from lightning_accel.ops import find_triples


def graph(n: int) -> Data:
    return Data(x=torch.randn(n, 1), edge_index=torch.randint(n, (2, 3 * n)))


def test_batches_shift_them():
    add = AddRelationalTriples(store_two_paths=True)
    graphs = [add(graph(n)) for n in (9, 4, 1, 12)]
    batch = Batch.from_data_list(graphs)
    triples = find_triples(batch.edge_index, batch.num_nodes)
    assert torch.equal(batch.triangle_index, triples.triangle)
    assert batch.triangle_index.dtype == torch.int64
    degree = triples.rowptr.diff()
    assert batch.two_path_index.shape == (3, int((degree * (degree - 1) // 2).sum()))
    edges = {frozenset(pair) for pair in triples.edge.T.tolist()}
    leaf, centre, other = batch.two_path_index
    for ends in (leaf, other):
        assert {frozenset(pair) for pair in torch.stack([centre, ends]).T.tolist()} <= edges
    assert (leaf < other).all()
    assert torch.equal(batch[3].triangle_index, graphs[3].triangle_index)


def test_paths_are_stored_when_asked_for_and_the_graph_given_stays_as_it_is():
    data = graph(6)
    added = AddRelationalTriples()(data)
    assert "triangle_index" in added
    assert "two_path_index" not in added
    assert "triangle_index" not in data
    assert repr(AddRelationalTriples()) == "AddRelationalTriples(store_two_paths=False)"


def test_graphs_without_edges_have_none():
    data = AddRelationalTriples(store_two_paths=True)(Data(edge_index=torch.zeros(2, 0, dtype=torch.long), num_nodes=3))
    assert data.triangle_index.shape == data.two_path_index.shape == (3, 0)


def test_what_has_no_one_list_of_triples_is_refused():
    with pytest.raises(TypeError, match=r"got a HeteroData. Make the graph homogeneous"):
        AddRelationalTriples()(HeteroData())
    with pytest.raises(ValueError, match=r"needs data\.edge_index; got none"):
        AddRelationalTriples()(Data(x=torch.ones(3, 1)))


def test_a_hub_with_too_many_paths_is_refused_before_they_are_listed():
    leaves = torch.arange(1, 5001)
    hub = Data(edge_index=torch.stack([torch.zeros_like(leaves), leaves]), num_nodes=5001)
    assert AddRelationalTriples()(hub).triangle_index.shape == (3, 0)
    with pytest.raises(ValueError, match=r"this one of 5001 nodes has 12497500, 0\.3 GB\. Leave it out"):
        AddRelationalTriples(store_two_paths=True)(hub)
