"""Sums of products over triples of nodes. Shapes: N nodes, B graphs, M entries, E edges, T triangles, R channels.

A ``weight`` (E, R) of edges multiplies a term for each edge among its nodes; None is a weight of 1. Open wedges are
all paths of two edges less those in triangles. That difference is exact in float32 only if both sides read the very
same map: hence sums over neighbours of the maps are taken, though those of the features, mapped, would be equal too.
Where most paths are closed, little is left of the difference, so that both sides are float64 there.
"""

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_accel.ops.triples import Triples, neighbour_sum, triangle_sum

# Which of the weights of a triangle count at its corner r, whose other corners are s and t: all three, those of rs and
# rt, that of st, or those of the path from r over x's node to y's.
Edges: TypeAlias = Literal["all", "spokes", "opposite", "path"]

_FEW_NEIGHBOURS, _MANY_NEIGHBOURS = 6, 2**14
_TRIANGLES_AT_A_TIME = 2**16  # some 12 * R numbers of each are alive


class Graphs:
    """Sums over the nodes of each graph of a batch; one graph where ``batch`` (N,) is None, B graphs where it says."""

    def __init__(self, batch: Tensor | None, size: int | None) -> None:
        if size is None:
            size = 1 if batch is None else int(batch.max()) + 1 if batch.numel() else 0
        self.batch, self.size = batch, size

    def of(self, node: Tensor) -> Tensor:
        """The graph of each ``node``."""
        return torch.zeros_like(node) if self.batch is None else self.batch[node]

    def sum(self, value: Tensor) -> Tensor:
        """Sum ``value`` (N, R) to (B, R)."""
        if self.batch is None:
            total = value.sum(dim=0, keepdim=True)
            return total if self.size == 1 else torch.cat([total, total.new_zeros(self.size - 1, total.shape[1])])
        return value.new_zeros(self.size, value.shape[1]).index_add(0, self.batch, value)


class SubsetCounts(NamedTuple):
    """How many subsets of three nodes have 3, 2, 1 and 0 edges, (B, 1) int64 each."""

    triangle: Tensor
    wedge: Tensor
    edge: Tensor
    empty: Tensor


def path_counts(triples: Triples) -> Tensor:
    """Number of paths of two edges whose centre is each node, (N, 1) int64."""
    degree = triples.rowptr.diff().unsqueeze(1)
    return degree * (degree - 1) // 2


def count_subsets(triples: Triples, graphs: Graphs) -> SubsetCounts:
    degree = triples.rowptr.diff()
    per_node = [torch.ones_like(degree), degree, path_counts(triples)[:, 0], triples.num_triangles]
    nodes, ends, paths, corners = graphs.sum(torch.stack(per_node, dim=1)).split(1, dim=1)
    triangle = corners // 3
    wedge = paths - 3 * triangle
    edge = ends // 2 * (nodes - 2) - 2 * wedge - 3 * triangle  # each edge with each third node
    empty = nodes * (nodes - 1) * (nodes - 2) // 6 - triangle - wedge - edge
    return SubsetCounts(triangle, wedge, edge, empty)


def needs_float64(triples: Triples) -> bool:
    """Whether float32 may lose what is left of all paths less those in triangles.

    At some node half of the pairs of neighbours are joined, or so many neighbours are summed that roundings add up.
    Only CPUs are asked: a GPU would be waited for, and a compiled program must not depend on the data, so both take
    float64.
    """
    if triples.rowptr.device.type == "mps":
        return False  # which has none
    if not triples.rowptr.is_cpu or torch.compiler.is_compiling():
        return True
    degree = triples.rowptr.diff()
    dense = (4 * triples.num_triangles >= degree * (degree - 1)) & (degree >= _FEW_NEIGHBOURS)
    return bool(dense.any()) or bool((degree > _MANY_NEIGHBOURS).any())


def in_float64(value: Tensor, triples: Triples) -> Tensor:
    """``value`` in float64 if :func:`needs_float64`."""
    return value.double() if needs_float64(triples) else value


def sum_triangles(a: Tensor, weight: Tensor | None, triples: Triples, graphs: Graphs) -> Tensor:
    """Sum ``a_i a_j a_k`` over the triangles of each graph: (B, R)."""
    others = weighted_triangle_sum(a, None, weight, triples, "all")
    return graphs.sum(a * others) / 3  # each triangle is met at its three corners


def sum_wedges(b: Tensor, c: Tensor, weight: Tensor | None, triples: Triples, graphs: Graphs) -> Tensor:
    """Sum ``c_v b_u b_w`` over the open wedges u - v - w of each graph: (B, R)."""
    b = in_float64(b, triples)
    pairs = _neighbour_pairs(b, weight, triples)
    total = graphs.sum(c * (pairs - weighted_triangle_sum(b, None, weight, triples, "spokes")))
    return total.to(c.dtype)


def sum_edges(p: Tensor, q: Tensor, weight: Tensor | None, triples: Triples, graphs: Graphs) -> Tensor:
    """Sum ``p_i p_j q_k`` over edges ij and nodes k adjacent to neither: (B, R).

    An edge takes all nodes, less the neighbours of either end (each end is one of the other), and those of both were
    subtracted twice. In float64, as of many nodes little may be left.
    """
    dtype = p.dtype
    p, q = (x if x.device.type == "mps" else x.double() for x in (p, q))
    ends = p * weighted_neighbour_sum(p, weight, triples)
    adjacent = graphs.sum(ends * neighbour_sum(q, triples))
    both = graphs.sum(q * weighted_triangle_sum(p, None, weight, triples, "opposite"))
    return (graphs.sum(ends) / 2 * graphs.sum(q) - adjacent + both).to(dtype)


def sum_empty(r: Tensor, weight: Tensor | None, triples: Triples, graphs: Graphs) -> Tensor:
    """Sum ``r_i r_j r_k`` over three nodes without an edge: (B, R); there is none to be weighted.

    All subsets, an elementary symmetric polynomial in terms of power sums, less those with edges; in float64, as
    little may be left.
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
    """Sums over the triples of each node, (N, R) each."""

    triangle: Tensor  # b_j b_k over the triangles {i, j, k} of i
    centre: Tensor  # b_j b_k over the open wedges j - i - k
    leaf: Tensor  # c_j b_k over the open wedges i - j - k


def rooted_sums(maps: Tensor, weight: Tensor | None, triples: Triples) -> RootedSums:
    """From ``maps`` (N, 2 R), b and c side by side, in their dtype."""
    dtype = maps.dtype
    maps = in_float64(maps, triples)
    b, c = maps.chunk(2, dim=1)
    if weight is None:  # few calls with many columns, as small graphs pay for calls
        around, around_c, squares = neighbour_sum(torch.cat([maps, b * b], dim=1), triples).chunk(3, dim=1)
        twice, path = triangle_sum(maps, torch.cat([b, b], dim=1), triples).chunk(2, dim=1)
        triangle = closed = twice / 2
    else:
        around, squares, around_c = (
            weighted_neighbour_sum(value, w, triples)
            for value, w in ((b, weight), (b * b, weight * weight), (c, weight * weight))
        )
        triangle = weighted_triangle_sum(b, None, weight, triples, "all")
        closed = weighted_triangle_sum(b, None, weight, triples, "spokes")
        path = weighted_triangle_sum(c, b, weight, triples, "path")
    centre = (around * around - squares) / 2 - closed
    walks = weighted_neighbour_sum(c * around, weight, triples) - b * around_c  # less those that come back to i
    return RootedSums(triangle.to(dtype), centre.to(dtype), (walks - path).to(dtype))


def count_rooted(triples: Triples) -> RootedSums:
    """Number of terms in each of :func:`rooted_sums`, (N, 1) int64."""
    degree = triples.rowptr.diff().unsqueeze(1)
    triangle = triples.num_triangles.unsqueeze(1)
    walks = neighbour_sum(degree.double(), triples).long() - degree
    return RootedSums(triangle, path_counts(triples) - triangle, walks - 2 * triangle)


def average_of_copies(value: Tensor, edge_index: Tensor, triples: Triples) -> Tensor:
    """Give each undirected edge the mean of ``value`` (M, R) over its entries in ``edge_index`` but loops: (E, R)."""
    num_nodes, num_edges = triples.num_nodes, triples.edge.shape[1]
    low, high = edge_index.amin(dim=0), edge_index.amax(dim=0)
    found = torch.searchsorted(edge_keys(triples), low * num_nodes + high)
    edge = torch.where(low == high, num_edges, found)  # loops fall into a row that is cut off
    total = value.new_zeros(num_edges + 1, value.shape[1]).index_add(0, edge, value)
    copies = value.new_zeros(num_edges + 1).index_add(0, edge, torch.ones_like(value[:, 0]))
    return (total / copies.clamp(min=1).unsqueeze(1))[:num_edges]


def weighted_neighbour_sum(x: Tensor, weight: Tensor | None, triples: Triples) -> Tensor:
    """Sum ``x_j w_ij`` over the neighbours j of each node i: (N, R)."""
    if weight is None:
        return neighbour_sum(x, triples)
    row = torch.repeat_interleave(triples.rowptr.diff(), output_size=len(triples.col))
    return torch.zeros_like(x).index_add(0, row, x[triples.col] * weight[triples.edge_of].to(x.dtype))


def weighted_triangle_sum(x: Tensor, y: Tensor | None, weight: Tensor | None, triples: Triples, edges: Edges) -> Tensor:
    """At each node r, sum ``x_s x_t``, or ``x_s y_t + x_t y_s`` given ``y``, times weights, over its triangles.

    With weights the triangles {r, s, t} are run through in chunks that are computed again in the backward pass, so
    that their products are never held all at once; compiled, in one chunk, as the number of chunks cannot depend on
    the data there.

    Args:
        x: (N, R).
        y: (N, R).
        weight: (E, R).
        triples: of the graph.
        edges: which of the three weights are multiplied.

    Returns:
        (N, R).
    """
    if weight is None:
        return triangle_sum(x, y, triples)
    node, opposite = triples.triangle, triples.side
    if torch.compiler.is_compiling() or node.shape[1] <= _TRIANGLES_AT_A_TIME:
        return _chunk_sum(x, y, weight, node, opposite, edges)
    total = torch.zeros_like(x)
    for chunk in zip(node.split(_TRIANGLES_AT_A_TIME, dim=1), opposite.split(_TRIANGLES_AT_A_TIME, dim=1), strict=True):
        total = total + checkpoint(
            _chunk_sum, x, y, weight, *chunk, edges, use_reentrant=False, preserve_rng_state=False
        )
    return total


def edge_keys(triples: Triples) -> Tensor:
    """A number for each edge, (E,) ascending: that of u < v is ``u * N + v``."""
    return triples.edge[0] * triples.num_nodes + triples.edge[1]


def _neighbour_pairs(b: Tensor, weight: Tensor | None, triples: Triples) -> Tensor:
    """Sum ``b_j b_k`` over the pairs of neighbours of each node."""
    if weight is None:
        around, squares = neighbour_sum(torch.cat([b, b * b], dim=1), triples).chunk(2, dim=1)
    else:
        around = weighted_neighbour_sum(b, weight, triples)
        squares = weighted_neighbour_sum(b * b, weight * weight, triples)
    return (around * around - squares) / 2


def _chunk_sum(x: Tensor, y: Tensor | None, weight: Tensor, node: Tensor, opposite: Tensor, edges: Edges) -> Tensor:
    xs, ws = x[node], weight[opposite].to(x.dtype)  # (3, T, R) each
    ys = None if y is None else y[node]
    total = torch.zeros_like(x)
    for r, s, t in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        if edges == "path":  # r - s - t and r - t - s: the weight of rs lies opposite t
            assert ys is not None
            value = ws[r] * (ws[t] * xs[s] * ys[t] + ws[s] * xs[t] * ys[s])
        else:
            value = xs[s] * xs[t] if ys is None else xs[s] * ys[t] + xs[t] * ys[s]
            value = value * ws[r] if edges != "spokes" else value
            value = value * (ws[s] * ws[t]) if edges != "opposite" else value
        total = total.index_add(0, node[r], value)
    return total
