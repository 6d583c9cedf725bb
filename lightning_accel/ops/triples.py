"""Triangles of graphs, and sums over them. Shapes: N nodes, M entries, E edges, T triangles, R channels."""

from typing import NamedTuple

import torch
from torch import Tensor


class Triples(NamedTuple):
    """A simple undirected graph, its edges and triangles listed once each, all int64.

    Columns of ``edge`` and ``triangle`` hold nodes in ascending order, and are in lexicographic order themselves.
    """

    rowptr: Tensor  # (N + 1,) where the neighbours of each node begin in col
    col: Tensor  # (2 E,) neighbours, ascending
    edge: Tensor  # (2, E)
    edge_of: Tensor  # (2 E,) the edge that each entry of col stands for
    triangle: Tensor  # (3, T)
    opposite_rowptr: Tensor  # (N + 1,) where those of each node begin in opposite
    opposite: Tensor  # (3 T,) the edges which make a triangle with the node
    third_rowptr: Tensor  # (E + 1,) where those of each edge begin in third
    third: Tensor  # (3 T,) the nodes which make a triangle with the edge

    @property
    def num_nodes(self) -> int:
        return len(self.rowptr) - 1


def find_triples(edge_index: Tensor, num_nodes: int, max_wedges: int = 2**22) -> Triples:
    """List edges and triangles of a graph; direction, self-loops and repetitions of edges do not count.

    Degree-ordered: each triangle is found once, from its node of least degree, in O(E**1.5) at worst.

    Args:
        edge_index: (2, M) int64 in [0, N).
        num_nodes: N.
        max_wedges: candidates that are tested at a time, 40 bytes each.

    >>> find_triples(torch.tensor([[0, 1, 2, 2], [1, 2, 0, 3]]), num_nodes=4).triangle.T
    tensor([[0, 1, 2]])
    """
    kept = edge_index[:, edge_index[0] != edge_index[1]]
    key = torch.unique(kept.amin(dim=0) * num_nodes + kept.amax(dim=0))
    edge = torch.stack([key // num_nodes, key % num_nodes]) if num_nodes else kept
    row, col = torch.cat([edge, edge.flip(0)], dim=1)
    order = torch.argsort(row * num_nodes + col)
    rowptr = _starts(row, num_nodes)
    triangle = _triangles(edge, key, num_nodes, max_wedges)
    i, j, k = triangle
    pairs = torch.cat([torch.stack([j, k]), torch.stack([i, k]), torch.stack([i, j])], dim=1)  # opposite i, j, k
    pair = torch.searchsorted(key, pairs[0] * num_nodes + pairs[1])
    node = torch.cat([i, j, k])
    by_node, by_edge = torch.argsort(node, stable=True), torch.argsort(pair, stable=True)
    return Triples(
        rowptr,
        col[order],
        edge,
        order % max(edge.shape[1], 1),
        triangle,
        _starts(node, num_nodes),
        pair[by_node],
        _starts(pair, edge.shape[1]),
        node[by_edge],
    )


def neighbour_sum(x: Tensor, triples: Triples) -> Tensor:
    """Sum ``x`` (N, R) over the neighbours of each node: (N, R)."""
    row = _rows(triples.rowptr, len(triples.col))
    return torch.zeros_like(x).index_add(0, row, x[triples.col])


def triangle_sum(x: Tensor, y: Tensor | None, triples: Triples) -> Tensor:
    """Sum ``x_j y_k + x_k y_j``, or ``x_j x_k`` without ``y``, over the triangles {i, j, k} of each node i.

    Args:
        x: (N, R).
        y: (N, R).
        triples: of the graph.

    Returns:
        (N, R).
    """
    u, v = triples.edge
    product = x[u] * x[v] if y is None else x[u] * y[v] + x[v] * y[u]
    row = _rows(triples.opposite_rowptr, len(triples.opposite))
    return torch.zeros_like(x).index_add(0, row, product[triples.opposite])


def _triangles(edge: Tensor, key: Tensor, num_nodes: int, max_wedges: int) -> Tensor:
    degree = torch.bincount(edge.flatten(), minlength=num_nodes)
    rank = torch.empty_like(degree)
    rank[torch.argsort(degree, stable=True)] = torch.arange(num_nodes, device=edge.device)
    swap = rank[edge[0]] > rank[edge[1]]
    tail, head = torch.where(swap, edge[1], edge[0]), torch.where(swap, edge[0], edge[1])
    order = torch.argsort(tail, stable=True)
    tail, head = tail[order], head[order]
    ends = _starts(tail, num_nodes)[tail + 1]
    # each edge out of a node with each later one out of the same node
    num_later = ends - torch.arange(len(tail), device=edge.device) - 1
    total = num_later.cumsum(0)
    found = []
    start, done = 0, 0
    while start < len(tail):
        stop = max(int(torch.searchsorted(total, done + max_wedges, right=True)), start + 1)
        count = num_later[start:stop]
        first = torch.repeat_interleave(torch.arange(start, stop, device=edge.device), count)
        offset = torch.arange(len(first), device=edge.device) - (count.cumsum(0) - count).repeat_interleave(count)
        j, k = head[first], head[first + 1 + offset]
        closing = torch.minimum(j, k) * num_nodes + torch.maximum(j, k)
        closed = key[torch.searchsorted(key, closing).clamp(max=len(key) - 1)] == closing
        found.append(torch.stack([tail[first][closed], j[closed], k[closed]]))
        start, done = stop, int(total[stop - 1])
    triangle = torch.cat(found, dim=1).sort(dim=0).values if found else edge.new_empty(3, 0)
    for row in (2, 1, 0):
        triangle = triangle[:, torch.argsort(triangle[row], stable=True)]
    return triangle


def _starts(index: Tensor, size: int) -> Tensor:
    return torch.cat([index.new_zeros(1), torch.bincount(index, minlength=size).cumsum(0)])


def _rows(rowptr: Tensor, size: int) -> Tensor:
    counts = rowptr.diff()
    return torch.repeat_interleave(torch.arange(len(counts), device=rowptr.device), counts, output_size=size)
