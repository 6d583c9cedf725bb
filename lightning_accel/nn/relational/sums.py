"""Sums of products over triples of nodes. Shapes: N nodes, B graphs, M entries, E edges, T triangles, R channels.

The ``weight`` (E, R) of each edge among the nodes of a term multiplies it; None means weights of 1. Sums over open
wedges are sums over all paths of two edges minus those in triangles. This difference is accurate in float32 only if
both sides use exactly the same mapped features: hence maps are applied before the sums over neighbours. Where most
paths are in triangles, the difference is small compared with both sides, which are float64 there.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_accel.ops.triples.find import Triples, neighbour_sum, triangle_sum

# Which weights of a triangle multiply the term at its corner r, with other corners s and t: all three, those of rs and
# rt, or that of st.
Edges: TypeAlias = Literal["all", "spokes", "opposite"]

_FEW_NEIGHBOURS, _MANY_NEIGHBOURS = 6, 2**14
_TRIANGLES_AT_A_TIME = 2**16  # about 12 * R numbers per triangle are in memory


class Graphs:
    """Sum over the nodes of each graph of a batch; ``batch`` (N,) is the graph of each node, None for one graph."""

    def __init__(self, batch: Tensor | None, size: int | None) -> None:
        if size is None:
            size = 1 if batch is None else int(batch.max()) + 1 if batch.numel() else 0
        self.batch, self.size = batch, size

    def sum(self, value: Tensor) -> Tensor:
        """Sum ``value`` (N, R) to (B, R)."""
        if self.batch is None:
            total = value.sum(dim=0, keepdim=True)
            return total if self.size == 1 else torch.cat([total, total.new_zeros(self.size - 1, total.shape[1])])
        return value.new_zeros(self.size, value.shape[1]).index_add(0, self.batch, value)


class SubsetCounts(NamedTuple):
    """Hold the numbers of subsets of three nodes with 3, 2, 1 and 0 edges, (B, 1) int64 each."""

    triangle: Tensor
    wedge: Tensor
    edge: Tensor
    empty: Tensor


def count_subsets(triples: Triples, graphs: Graphs) -> SubsetCounts:
    degree = triples.rowptr.diff()
    per_node = [torch.ones_like(degree), degree, degree * (degree - 1) // 2, triples.num_triangles]
    nodes, ends, paths, corners = graphs.sum(torch.stack(per_node, dim=1)).split(1, dim=1)
    triangle = corners // 3
    wedge = paths - 3 * triangle
    edge = ends // 2 * (nodes - 2) - 2 * wedge - 3 * triangle  # each edge with each third node
    empty = nodes * (nodes - 1) * (nodes - 2) // 6 - triangle - wedge - edge
    return SubsetCounts(triangle, wedge, edge, empty)


def in_float64(value: Tensor, triples: Triples) -> Tensor:
    """Cast ``value`` to float64 if differences of sums over all paths and over paths in triangles need it.

    This is checked only on CPU; a GPU would have to wait for the result, and a compiled program must not depend on the
    data, so both always use float64.
    """
    if triples.rowptr.device.type == "mps":
        return value  # MPS does not support float64
    if not triples.rowptr.is_cpu or torch.compiler.is_compiling():
        return value.double()
    return value.double() if nearly_cancels(triples) else value


def nearly_cancels(triples: Triples) -> bool:
    """Return whether differences of sums over all paths and over those in triangles need float64.

    They do if at some node half of the pairs of neighbours are joined, or if rounding errors of many neighbours add up.
    """
    degree = triples.rowptr.diff()
    dense = (4 * triples.num_triangles >= degree * (degree - 1)) & (degree >= _FEW_NEIGHBOURS)
    return bool(dense.any()) or bool((degree > _MANY_NEIGHBOURS).any())


def sum_triangles(a: Tensor, weight: Tensor | None, triples: Triples, graphs: Graphs) -> Tensor:
    """Sum ``a_i a_j a_k`` over the triangles of each graph: (B, R)."""
    others = weighted_triangle_sum(a, weight, triples, "all")
    return graphs.sum(a * others) / 3  # each triangle is counted at its three corners


def sum_wedges(b: Tensor, c: Tensor, weight: Tensor | None, triples: Triples, graphs: Graphs) -> Tensor:
    """Sum ``c_v b_u b_w`` over the open wedges u - v - w of each graph: (B, R)."""
    b = in_float64(b, triples)
    pairs = _neighbour_pairs(b, weight, triples)
    total = graphs.sum(c * (pairs - weighted_triangle_sum(b, weight, triples, "spokes")))
    return total.to(c.dtype)


def sum_edges(p: Tensor, q: Tensor, weight: Tensor | None, triples: Triples, graphs: Graphs) -> Tensor:
    """Sum ``p_i p_j q_k`` over edges ij and nodes k adjacent to neither: (B, R).

    For each edge the sum over all nodes minus the neighbours of either end (which include the ends) plus the common
    neighbours, which were subtracted twice. It uses float64, as the terms may nearly cancel.
    """
    dtype = p.dtype
    p, q = (x if x.device.type == "mps" else x.double() for x in (p, q))
    ends = p * weighted_neighbour_sum(p, weight, triples)
    adjacent = graphs.sum(ends * neighbour_sum(q, triples))
    both = graphs.sum(q * weighted_triangle_sum(p, weight, triples, "opposite"))
    return (graphs.sum(ends) / 2 * graphs.sum(q) - adjacent + both).to(dtype)


def sum_empty(r: Tensor, weight: Tensor | None, triples: Triples, graphs: Graphs) -> Tensor:
    """Sum ``r_i r_j r_k`` over three nodes without an edge: (B, R); ``weight`` is ignored.

    It is the sum over all subsets, an elementary symmetric polynomial computed from power sums, minus those with edges;
    in float64, as the terms may nearly cancel.
    """
    dtype = r.dtype
    r = r if r.device.type == "mps" else r.double()
    first, second, third = graphs.sum(r), graphs.sum(r * r), graphs.sum(r**3)
    everything = (first**3 - 3 * first * second + 2 * third) / 6
    around, squares = neighbour_sum(torch.cat([r, r * r], dim=1), triples).chunk(2, dim=1)
    at_corner = graphs.sum(r * triangle_sum(r, None, triples))  # three times the triangles
    wedge = graphs.sum(r * (around * around - squares)) / 2 - at_corner
    edge = graphs.sum(r * around) / 2 * first - graphs.sum(r * around * around) + at_corner
    return (everything - at_corner / 3 - wedge - edge).to(dtype)


class RootedSums(NamedTuple):
    """Hold sums over the triples of each node, (N, R) each."""

    triangle: Tensor  # b_j b_k over the triangles {i, j, k} of i
    centre: Tensor  # b_j b_k over the open wedges j - i - k
    leaf: Tensor  # c_j b_k over the open wedges i - j - k


def rooted_sums(maps: Tensor, weight: Tensor | None, triples: Triples) -> RootedSums:
    """Compute the sums over each node's triples from ``maps`` (N, 2 R), b and c concatenated, in their dtype."""
    dtype = maps.dtype
    maps = in_float64(maps, triples)
    b, c = maps.chunk(2, dim=1)
    # few calls with many columns, as the overhead of calls dominates for small graphs
    if weight is None:
        around, around_c, squares = neighbour_sum(torch.cat([maps, b * b], dim=1), triples).chunk(3, dim=1)
        twice, path = triangle_sum(maps, torch.cat([b, b], dim=1), triples).chunk(2, dim=1)
        triangle = closed = twice / 2
    else:
        weight = weight.to(maps.dtype)
        near, of_edge = maps[triples.col], weight[triples.edge_of]
        weighted = near[:, : b.shape[1]] * of_edge
        terms = torch.cat([weighted, weighted * weighted, near[:, b.shape[1] :] * (of_edge * of_edge)], dim=1)
        around, squares, around_c = _add_to_rows(terms, triples).chunk(3, dim=1)
        triangle, closed, path = _over_triangles(_rooted_terms, maps, weight, triples).chunk(3, dim=1)
    centre = (around * around - squares) / 2 - closed
    walks = weighted_neighbour_sum(c * around, weight, triples) - b * around_c  # minus walks that return to i
    return RootedSums(triangle.to(dtype), centre.to(dtype), (walks - path).to(dtype))


def average_of_copies(value: Tensor, edge_index: Tensor, triples: Triples) -> Tensor:
    """Average ``value`` (M, R) over the entries of ``edge_index`` for each undirected edge: (E, R), without loops."""
    num_nodes, num_edges = triples.num_nodes, triples.edge.shape[1]
    low, high = torch.minimum(*edge_index), torch.maximum(*edge_index)  # many times as fast as amin and amax
    found = torch.searchsorted(triples.edge[0] * num_nodes + triples.edge[1], low * num_nodes + high)
    edge = torch.where(low == high, num_edges, found)  # loops are written to an extra row
    total = value.new_zeros(num_edges + 1, value.shape[1]).index_add(0, edge, value)
    copies = value.new_zeros(num_edges + 1).index_add(0, edge, torch.ones_like(value[:, 0]))
    return (total / copies.clamp(min=1).unsqueeze(1))[:num_edges]


def weighted_neighbour_sum(x: Tensor, weight: Tensor | None, triples: Triples) -> Tensor:
    """Sum ``x_j w_ij`` over the neighbours j of each node i: (N, R)."""
    if weight is None:
        return neighbour_sum(x, triples)
    return _add_to_rows(x[triples.col] * weight[triples.edge_of].to(x.dtype), triples)


def _add_to_rows(value: Tensor, triples: Triples) -> Tensor:
    """Sum ``value`` (2 E, R), one row for each neighbour of each node, to (N, R)."""
    row = torch.repeat_interleave(triples.rowptr.diff(), output_size=len(triples.col))
    return value.new_zeros(triples.num_nodes, value.shape[1]).index_add(0, row, value)


def weighted_triangle_sum(x: Tensor, weight: Tensor | None, triples: Triples, edges: Edges) -> Tensor:
    """Sum ``x_s x_t`` times edge weights over the triangles {r, s, t} of each node r.

    Args:
        x: (N, R).
        weight: (E, R).
        triples: edges and triangles of the graph.
        edges: which of the three weights multiply a term.

    Returns:
        (N, R).
    """
    if weight is None:
        return triangle_sum(x, None, triples)
    return _over_triangles(partial(_product_terms, edges=edges), x, weight.to(x.dtype), triples)


class _Corner(NamedTuple):
    """Hold what the terms of triangles {r, s, t} at their corners r are made of, a row for each."""

    s: Tensor
    t: Tensor
    st: Tensor  # weight of the edge
    rs: Tensor
    rt: Tensor


def _over_triangles(terms: Callable[[_Corner], Tensor], x: Tensor, weight: Tensor, triples: Triples) -> Tensor:
    """Sum terms of features ``x`` (N, F) and weights (E, R) over the triangles of each node.

    Triangles are processed in chunks that are computed again in the backward pass, to bound memory; compiled, in a
    single chunk, as the number of chunks must not depend on the data.
    """
    node, opposite = triples.triangle, triples.side
    if torch.compiler.is_compiling() or node.shape[1] <= _TRIANGLES_AT_A_TIME:
        return _sum_at_corners(terms, x, weight, node, opposite)
    parts = [
        checkpoint(_sum_at_corners, terms, x, weight, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(
            node.split(_TRIANGLES_AT_A_TIME, dim=1), opposite.split(_TRIANGLES_AT_A_TIME, dim=1), strict=True
        )
    ]
    total: Tensor = sum(parts[1:], start=parts[0])
    return total


def _sum_at_corners(
    terms: Callable[[_Corner], Tensor], x: Tensor, weight: Tensor, node: Tensor, opposite: Tensor
) -> Tensor:
    s, t = node.roll(-1, 0).flatten(), node.roll(-2, 0).flatten()
    # the weight of rs lies opposite t
    st, rt, rs = (weight[opposite.roll(-turn, 0).flatten()] for turn in range(3))
    value = terms(_Corner(x[s], x[t], st, rs, rt))
    return value.new_zeros(len(x), value.shape[1]).index_add(0, node.flatten(), value)


def _product_terms(corner: _Corner, edges: Edges) -> Tensor:
    value = corner.s * corner.t
    value = value * corner.st if edges != "spokes" else value
    return value * (corner.rs * corner.rt) if edges != "opposite" else value


def _rooted_terms(corner: _Corner) -> Tensor:
    """Return ``b_s b_t`` with all weights and with those of r, and ``c_s b_t + c_t b_s`` with those of its path."""
    (b_s, c_s), (b_t, c_t) = corner.s.chunk(2, dim=1), corner.t.chunk(2, dim=1)
    closed = b_s * b_t * (corner.rs * corner.rt)
    path = corner.st * (corner.rs * c_s * b_t + corner.rt * c_t * b_s)
    return torch.cat([closed * corner.st, closed, path], dim=1)


def _neighbour_pairs(b: Tensor, weight: Tensor | None, triples: Triples) -> Tensor:
    """Sum ``b_j b_k`` over the pairs of neighbours of each node."""
    if weight is None:
        around, squares = neighbour_sum(torch.cat([b, b * b], dim=1), triples).chunk(2, dim=1)
    else:
        around = weighted_neighbour_sum(b, weight, triples)
        squares = weighted_neighbour_sum(b * b, weight * weight, triples)
    return (around * around - squares) / 2
