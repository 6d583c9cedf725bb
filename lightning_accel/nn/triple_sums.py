"""Sums over triples with weighted edges. Shapes: N nodes, M entries, E edges, T triangles, R channels."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_accel.ops.triples import Triples

# Which of the weights of a triangle count at its corner r, whose other corners are s and t: all three, those of rs and
# rt, that of st, or those of the path from r over x's node to y's.
Edges: TypeAlias = Literal["all", "spokes", "opposite", "path"]

_TRIANGLES_AT_A_TIME = 2**16  # some 12 * R numbers of each are alive


def average_of_copies(value: Tensor, edge_index: Tensor, triples: Triples) -> Tensor:
    """Give each undirected edge the mean of ``value`` (M, R) over its entries in ``edge_index`` but loops: (E, R).

    An edge that ``triples`` has and ``edge_index`` has not gets zeros.
    """
    num_nodes, num_edges = triples.num_nodes, triples.edge.shape[1]
    low, high = edge_index.amin(dim=0), edge_index.amax(dim=0)
    found = torch.searchsorted(_edge_keys(triples), low * num_nodes + high)
    edge = torch.where(low == high, num_edges, found)  # loops fall into a row that is cut off
    total = value.new_zeros(num_edges + 1, value.shape[1]).index_add(0, edge, value)
    copies = value.new_zeros(num_edges + 1).index_add(0, edge, torch.ones_like(value[:, 0]))
    return (total / copies.clamp(min=1).unsqueeze(1))[:num_edges]


def weighted_neighbour_sum(x: Tensor, weight: Tensor, triples: Triples) -> Tensor:
    """Sum ``x_j w_ij`` over the neighbours j of each node i: x (N, R), weight (E, R) -> (N, R)."""
    row = torch.repeat_interleave(triples.rowptr.diff(), output_size=len(triples.col))
    return torch.zeros_like(x).index_add(0, row, x[triples.col] * weight[triples.edge_of])


def weighted_triangle_sum(x: Tensor, y: Tensor | None, weight: Tensor, triples: Triples, edges: Edges) -> Tensor:
    """At each node r, sum ``x_s x_t``, or ``x_s y_t + x_t y_s`` given ``y``, times weights, over its triangles.

    The triangles are {r, s, t}. Runs through them in chunks that are computed again in the backward pass, so that their
    products are never held all at once; compiled, in one chunk, as its number cannot depend on the data there.

    Args:
        x: (N, R).
        y: (N, R).
        weight: (E, R).
        triples: of the graph.
        edges: which of the three weights are multiplied.

    Returns:
        (N, R).
    """
    node, opposite = triples.triangle, _opposite_edges(triples)
    at_a_time = max(node.shape[1], 1) if torch.compiler.is_compiling() else _TRIANGLES_AT_A_TIME
    if node.shape[1] <= at_a_time:
        return _chunk_sum(x, y, weight, node, opposite, edges)
    total = torch.zeros_like(x)
    for chunk in zip(node.split(at_a_time, dim=1), opposite.split(at_a_time, dim=1), strict=True):
        total = total + checkpoint(
            _chunk_sum, x, y, weight, *chunk, edges, use_reentrant=False, preserve_rng_state=False
        )
    return total


def _chunk_sum(x: Tensor, y: Tensor | None, weight: Tensor, node: Tensor, opposite: Tensor, edges: Edges) -> Tensor:
    xs, ws = x[node], weight[opposite]  # (3, T, R) each
    ys = None if y is None else y[node]
    total = torch.zeros_like(x)
    for r, s, t in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        if edges == "path":  # r - s - t and r - t - s: w_rs lies opposite t
            assert ys is not None
            value = ws[r] * (ws[t] * xs[s] * ys[t] + ws[s] * xs[t] * ys[s])
        else:
            value = xs[s] * xs[t] if ys is None else xs[s] * ys[t] + xs[t] * ys[s]
            value = value * ws[r] if edges != "spokes" else value
            value = value * (ws[s] * ws[t]) if edges != "opposite" else value
        total = total.index_add(0, node[r], value)
    return total


def _opposite_edges(triples: Triples) -> Tensor:
    """The edge opposite each corner of each triangle, (3, T)."""
    i, j, k = triples.triangle
    pairs = torch.stack([j, i, i]) * triples.num_nodes + torch.stack([k, k, j])
    return torch.searchsorted(_edge_keys(triples), pairs)


def _edge_keys(triples: Triples) -> Tensor:
    return triples.edge[0] * triples.num_nodes + triples.edge[1]
