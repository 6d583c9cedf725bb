"""Counts of small graphs in a graph. Shapes: G graphs, n nodes of each, K = 7 kinds of substructures."""

import torch
from torch import Tensor

SUBSTRUCTURES = {  # name and number of nodes
    "triangle": 3,
    "induced_wedge": 3,
    "tailed_triangle": 4,
    "star_3": 4,
    "chordal_cycle_4": 4,
    "cycle_4": 4,
    "cycle_5": 5,
}


def count_substructures(adjacency: Tensor) -> Tensor:
    """Count, for each node and kind of substructure, the copies that contain the node in any role.

    Copies are subgraphs, so that their nodes may have further edges; ``induced_wedge`` alone is induced: two edges that
    meet, whose nodes form no triangle. A set of nodes counts once for each subgraph on it: K4 contains three 4-cycles
    and six chordal ones. ``tailed_triangle`` is a triangle and an edge to a fourth node, ``star_3`` a node and three
    neighbours, ``chordal_cycle_4`` two triangles that share an edge. The count of a graph is the sum over its nodes
    divided by the number of nodes of a copy: :func:`count_of_graph`.

    Source: the kinds of Chen et al. 2020, https://arxiv.org/abs/2002.04025.

    Args:
        adjacency: (G, n, n) or (n, n), zeros and ones, symmetric, without loops.

    Returns:
        (G, n, K) float64, kinds in the order of ``SUBSTRUCTURES``; (n, K) for one graph.

    Raises:
        ValueError: if ``adjacency`` is something else.
    """
    a = adjacency.double()
    if a.ndim not in (2, 3) or a.shape[-1] != a.shape[-2] or not torch.equal(a, a.mT):
        raise ValueError(f"adjacency must be symmetric, (n, n) or (G, n, n); got shape {tuple(a.shape)}")
    if ((a != 0) & (a != 1)).any() or a.diagonal(dim1=-2, dim2=-1).any():
        raise ValueError("adjacency must hold zeros and ones, and no loops")
    degree = a.sum(-1)
    common = a @ a  # neighbours that two nodes share
    triangles = (common * a).sum(-1) / 2
    opposite = _pairs(common) * a  # chordal 4-cycles around each edge

    def over_neighbours(values: Tensor) -> Tensor:
        return (a @ values[..., None])[..., 0]

    wedges = _pairs(degree) + over_neighbours(degree - 1)
    tails = (
        triangles * (degree - 2)
        + (a * common * (degree - 2)[..., None, :]).sum(-1)
        + over_neighbours(triangles)
        - 2 * triangles
    )
    stars = degree * (degree - 1) * (degree - 2) / 6 + over_neighbours(_pairs(degree - 1))
    chordal = opposite.sum(-1) + (a @ (a * (common - 1)) * a).sum(-1) / 2
    apart = common - torch.diag_embed(common.diagonal(dim1=-2, dim2=-1))
    kinds = [triangles, wedges - 3 * triangles, tails, stars, chordal, _pairs(apart).sum(-1), _five_cycles(a)]
    return torch.stack(kinds, dim=-1)


def count_of_graph(of_nodes: Tensor) -> Tensor:
    """Return the counts of whole graphs, (..., K), from those of their nodes, (..., n, K)."""
    return of_nodes.sum(-2) / of_nodes.new_tensor(list(SUBSTRUCTURES.values()))


def _pairs(number: Tensor) -> Tensor:
    return number * (number - 1) / 2


def _five_cycles(a: Tensor) -> Tensor:
    """Count 5-cycles through each node, as paths of three edges between two of its neighbours that avoid it."""
    n = a.shape[-1]
    others = 1 - torch.eye(n, dtype=a.dtype)  # (n, n): row i is 0 at node i
    without = a[..., None, :, :] * others[:, :, None] * others[:, None, :]  # (..., n, n, n): without node i
    degree = without.sum(-1)
    walks = without @ without @ without
    paths = walks - without * (degree[..., :, None] + degree[..., None, :] - 1)
    ends = a[..., :, None] * a[..., None, :] * others  # pairs of neighbours of i, (..., n, n, n)
    return (paths * ends).sum((-2, -1)) / 2
