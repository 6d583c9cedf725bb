"""Inputs as PyTorch Geometric's own models take them: what the layers here need is said before anything is computed."""

import pytest
import torch
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

from lightning_accel import RelationalGNN
from lightning_accel.models import ConvolutionLayers, compare_markings
from lightning_accel.models.graph_layers import find_conv
from lightning_accel.nn import RelationalOrder3Pooling, RelationalPooling, RO3Conv
from lightning_accel.ops import find_triples

GINE = ConvolutionLayers("GINEConv", dim=4, num_layers=1)
X, EDGES = torch.ones(5, 3), torch.tensor([[0, 1, 2], [1, 2, 0]])
BATCH = torch.tensor([0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("layer", "instead"),
    [
        (RO3Conv(3, 4), "leave it out"),
        (RO3Conv(3, 4, num_relations=2), "leave it out"),
        (RelationalOrder3Pooling(3, 4), "pass it by name: batch=batch"),
        (RelationalPooling(GIN(4, 8, num_layers=1)), "pass it by name: batch=batch"),
        (RelationalPooling(GAT(4, 8, num_layers=1, edge_dim=1)), "pass it by name: batch=batch"),
        (RelationalGNN(3, 2, level="graph", target_kind="classification"), "pass it by name: batch=batch"),
    ],
    ids=[f"{i}" for i in range(6)],
)
def test_batch_is_not_taken_for_edge_attr(layer, instead):
    with pytest.raises(ValueError, match=rf"takes edge_attr third.*int64 \(5,\) with 3 edges and 5 nodes.*{instead}"):
        layer(X, EDGES, BATCH)


@pytest.mark.parametrize("model", [GIN, GCN, GraphSAGE])
def test_models_that_drop_features_of_edges_are_refused(model):
    pooling = RelationalPooling(model(4, 8, 1))
    pooling(X, EDGES)
    with pytest.raises(ValueError, match=f"{model.__name__} takes none: .* GAT and PNA take it, made with edge_dim"):
        pooling(X, EDGES, torch.ones(3, 2))
    RelationalPooling(GAT(4, 8, 1, edge_dim=2))(X, EDGES, torch.ones(3, 2))


@pytest.mark.parametrize("layer", [RO3Conv(3, 4), RelationalOrder3Pooling(3, 4), RelationalPooling(GIN(4, 8, 1))])
@pytest.mark.parametrize(
    ("edge_index", "message"),
    [
        (torch.ones(5, 5), r"\(5, 5\): dense_to_sparse\(adj\)\[0\]"),
        (torch.eye(5).to_sparse(), r"a sparse tensor \(5, 5\): to_edge_index\(adj\)\[0\]"),
        (torch.zeros(3, 2).long(), "pass edge_index.T"),
    ],
)
def test_adjacency_matrices_are_refused_with_the_conversion(layer, edge_index, message):
    with pytest.raises(ValueError, match=message):
        layer(X, edge_index)


def test_a_stored_triangle_index_goes_to_find_triples():
    triangle_index = torch.tensor([[0], [1], [2]])
    with pytest.raises(TypeError, match=r"find_triples\(edge_index, num_nodes\) of lightning_accel.ops; got a Tensor"):
        RO3Conv(3, 4)(X, EDGES, triples=triangle_index)
    RO3Conv(3, 4)(X, EDGES, triples=find_triples(EDGES, 5, triangle_index))


@pytest.mark.parametrize(
    ("options", "edge_attr", "message"),
    [
        ({"num_relations": 2}, torch.zeros(3, 1).long(), r"int64 of shape \(3, 1\). Pass edge_attr\[:, 0\]$"),
        ({"num_relations": 2}, torch.zeros(3), "Convert it with .long"),
        ({"edge_dim": 1}, torch.zeros(3), r"Pass edge_attr\[:, None\]$"),
        ({"edge_dim": 2}, torch.zeros(3, 2).long(), "Convert it with .float"),
        ({"edge_dim": 2}, torch.zeros(4, 2), "a row for each column of edge_index; got .* with 3 edges"),
    ],
)
def test_features_of_edges_of_another_shape(options, edge_attr, message):
    model = RelationalGNN(3, 2, level="graph", target_kind="classification", layers=GINE, **options)
    for layer in (RO3Conv(3, 4, **options), model):
        with pytest.raises(ValueError, match=message):
            layer(X, EDGES, edge_attr)


def test_a_head_of_another_width():
    pooling = RelationalPooling(GIN(4, 8, 1), head=torch.nn.Linear(8, 2))
    with pytest.raises(ValueError, match="rows of 16 features: 8 of the sum over nodes and of each of 1 marked nodes"):
        pooling(X, EDGES)


@pytest.mark.parametrize("layer", [RO3Conv, RelationalOrder3Pooling])
def test_layers_without_channels(layer):
    with pytest.raises(ValueError, match=r"rank must be at least 1; got 0"):
        layer(3, 4, rank=0)


@pytest.mark.parametrize(
    ("conv", "message"),
    [
        ("GINConvv", "did you mean 'GINConv'"),
        ("GIN", "'GIN' is a whole network: take GINConv"),
        ("torch_geometric.nn.GAT", "'torch_geometric.nn.GAT' is a whole network: take GATConv"),
        (GIN, "got the class GIN: pass its name"),
    ],
)
def test_what_is_no_convolution(conv, message):
    with pytest.raises((ValueError, TypeError), match=message):
        find_conv(conv)


def test_markings_are_compared_for_options_of_layers():
    with pytest.raises(TypeError, match=r"layers must be ConvolutionLayers\(conv=\.\.\.\).*got 'GINConv'"):
        compare_markings([], "GINConv")
