"""Layers that see triples of nodes. Shapes: N nodes, B graphs, M entries of edge_index, F features, R channels."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch_geometric.nn import Linear, MessagePassing

from lightning_accel.nn.edge_weights import EdgeWeights
from lightning_accel.nn.triple_sums import weighted_neighbour_sum, weighted_triangle_sum
from lightning_accel.ops.float32 import at_least_float32, without_autocast
from lightning_accel.ops.triples import Triples, find_triples, neighbour_sum, triangle_sum

TripleType: TypeAlias = Literal["triangle", "wedge", "edge", "empty"]

_MAPS: dict[str, int] = {"triangle": 1, "wedge": 2, "edge": 2, "empty": 1}  # node maps that each type multiplies


class RelationalOrder3Pooling(nn.Module):
    """Read a graph out by a sum over *all* subsets of three of its nodes, by what edges they have among them.

    A subset of an induced type contributes a product of linear maps of its nodes' features, R channels of it:

    - ``"triangle"`` (3 edges): ``a_i a_j a_k``
    - ``"wedge"`` (2): ``c_v b_u b_w``, where v is the centre and u and w are not adjacent
    - ``"edge"`` (1): ``p_i p_j q_k``, where k is adjacent to neither i nor j
    - ``"empty"`` (0): ``r_i r_j r_k``

    The sums are exact, none is sampled, and cost O((N + M + triangles) R) for all the C(N, 3) subsets. The sums of the
    types, in the order of ``types``, go through a linear map without a bias, so a graph without such subsets gets a
    row of zeros, one without nodes included. What it computes depends on the graph alone, not on an order of nodes.

    It tells apart graphs that differ in these counts, as two triangles and a hexagon, which no message passing (1-WL)
    can; it does not tell apart strongly regular graphs of equal parameters, such as the rook's graph and Shrikhande's.

    An edge counts once, without a direction: a directed ``edge_index`` is made symmetric, repetitions and self-loops
    are dropped. With ``edge_dim`` or ``num_relations``, each term is multiplied by ``w_e`` of each edge among its three
    nodes, where ``w_e`` (R,) = 1 + a linear map of the edge's features, or 1 + a vector of its type, with its own map
    for each type of subset, and averaged over the entries of ``edge_index`` that stand for the edge.

    Products and sums are float32 at least, with autocast off, so that mixed precision costs no accuracy.

    Args:
        in_channels: F; -1 takes it from the first input.
        out_channels: columns of the output.
        rank: R.
        types: of subsets, each at most once.
        reduce: ``"sum"``, or ``"mean"``: each type's sum over the number of subsets of that type in the graph.
        edge_dim: columns of a floating ``edge_attr``.
        num_relations: number of edge types, where ``edge_attr`` is int64.

    >>> x, edge_index = torch.ones(4, 1), torch.tensor([[0, 1, 2, 3], [1, 2, 0, 0]])
    >>> RO3Pooling()(x, edge_index).shape
    torch.Size([1, 64])
    """

    def __init__(
        self,
        in_channels: int = -1,
        out_channels: int = 64,
        rank: int = 32,
        types: Sequence[TripleType] = ("triangle", "wedge"),
        reduce: Literal["sum", "mean"] = "sum",
        edge_dim: int | None = None,
        num_relations: int | None = None,
    ) -> None:
        super().__init__()
        unknown = [name for name in types if name not in _MAPS]
        if unknown or not types or len(set(types)) < len(types):
            raise ValueError(f"types must be some of {list(_MAPS)}, each at most once; got {list(types)}")
        _check_reduce(reduce)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.rank = rank
        self.types = tuple(types)
        self.reduce = reduce
        self.maps = Linear(in_channels, rank * sum(_MAPS[name] for name in types))
        self.edge_weights = _edge_weights(rank * len(types), edge_dim, num_relations)
        self.out = Linear(rank * len(types), out_channels, bias=False)

    def reset_parameters(self) -> None:
        self.maps.reset_parameters()
        self.out.reset_parameters()
        if self.edge_weights is not None:
            self.edge_weights.reset_parameters()

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        size: int | None = None,
        triples: Triples | None = None,
    ) -> Tensor:
        """Read out ``x`` (N, F) to (B, out_channels).

        Args:
            x: (N, F).
            edge_index: (2, M) int64.
            edge_attr: (M, edge_dim) floating or (M,) int64; without either option it is not looked at.
            batch: (N,) int64, the graph of each node; one graph where it is None.
            size: B; the last graph of ``batch`` plus one where it is None.
            triples: of the same graph, where they have been found before.
        """
        with without_autocast(x):
            sums = self.sums(x, edge_index, edge_attr, batch, size, triples)
            return self.out(sums.to(self.out.weight.dtype))

    def sums(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        size: int | None = None,
        triples: Triples | None = None,
    ) -> Tensor:
        """What ``out`` reads: the sum, or mean, of each type in turn, (B, R * types)."""
        _check_inputs(type(self).__name__, x, edge_index)
        triples = find_triples(edge_index, x.shape[0]) if triples is None else triples
        graphs = _Graphs(batch, size)
        with without_autocast(x):
            maps = dict(zip(self.types, self._split(x), strict=True))
            weights: Sequence[Tensor | None] = [None] * len(self.types)
            if self.edge_weights is not None:
                weights = self.edge_weights(edge_attr, edge_index, triples).split(self.rank, dim=1)
            counts = _subset_counts(triples, graphs, x)
            sums = [
                _SUMS[name](*maps[name], weight, triples, graphs)
                for name, weight in zip(self.types, weights, strict=True)
            ]
            # where there is no subset of a type, what cancels in exact arithmetic must not leave its rounding errors
            divisors = [counts[name].clamp(min=1) if self.reduce == "mean" else 1 for name in self.types]
            return torch.cat(
                [
                    torch.where(counts[name] > 0, total / divisor, 0)
                    for name, total, divisor in zip(self.types, sums, divisors, strict=True)
                ],
                dim=1,
            )

    def _split(self, x: Tensor) -> list[tuple[Tensor, ...]]:
        maps = at_least_float32(self.maps(x.to(self.maps.weight.dtype)))
        by_type = maps.split([self.rank * _MAPS[name] for name in self.types], dim=1)
        return [part.split(self.rank, dim=1) for part in by_type]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.in_channels}, {self.out_channels}, rank={self.rank}, "
            f"types={list(self.types)}, reduce={self.reduce!r})"
        )


RO3Pooling = RelationalOrder3Pooling


class RO3Conv(MessagePassing):  # type: ignore[misc]  # PyG's is untyped
    """Tell each node which triples it is part of: a message-passing layer that also counts triangles and open wedges.

    With linear maps b and c of the features to R channels, node i sees

    - its own features and their sum over its neighbours, as in GIN
    - triangle: the sum of ``b_j b_k`` over the triangles {i, j, k}
    - wedge centre: that of ``b_j b_k`` over pairs of neighbours which are not adjacent
    - wedge leaf: that of ``c_j b_k`` over paths i - j - k whose ends are not adjacent

    through Linear, ReLU, Linear. Containing GIN's sum, it tells apart all that message passing (1-WL) can, and, for
    example, two triangles from a hexagon, which 1-WL cannot. It is at most 3-WL (folklore 2-WL): it never separates
    strongly regular graphs of equal parameters, nor circulant graphs without triangles from each other.

    Values grow with the square of the degree, and of the features: in a deep stack put a normalisation after each
    layer. ``reduce="mean"`` divides each of the sums by its number of terms; the counts of triples are lost with it.

    The graph is undirected, as in :class:`RelationalOrder3Pooling`. With ``edge_dim`` or ``num_relations``, a term is
    multiplied by ``w_e`` (R,) = 1 + a map of the edge's features or type for each edge among its nodes, and the node
    sees the weighted sum of ``w_ij b_j`` over its neighbours besides.

    ``torch_geometric.nn.to_hetero`` makes one layer for each relation within a node type; a relation between two node
    types is refused, as a wedge would span several relations: use ``data.to_homogeneous()`` and ``num_relations``.

    Args:
        in_channels: F; -1 takes it from the first input.
        out_channels: columns of the output, and of the hidden layer.
        rank: R.
        reduce: ``"sum"`` or ``"mean"``.
        edge_dim: columns of a floating ``edge_attr``.
        num_relations: number of edge types, where ``edge_attr`` is int64.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        rank: int = 32,
        reduce: Literal["sum", "mean"] = "sum",
        edge_dim: int | None = None,
        num_relations: int | None = None,
    ) -> None:
        super().__init__(aggr=reduce)
        _check_reduce(reduce)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.rank = rank
        self.reduce = reduce
        self.edge_weights = _edge_weights(rank, edge_dim, num_relations)
        num_sums = 3 if self.edge_weights is None else 4
        self.maps = Linear(in_channels, 2 * rank)
        self.own = Linear(in_channels, out_channels)
        self.neighbours = Linear(in_channels, out_channels, bias=False)
        self.joined = Linear(num_sums * rank, out_channels, bias=False)
        self.out = Linear(out_channels, out_channels)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for layer in (self.maps, self.own, self.neighbours, self.joined, self.out, self.edge_weights):
            if layer is not None:
                layer.reset_parameters()

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None, triples: Triples | None = None
    ) -> Tensor:
        """Map ``x`` (N, F) to (N, out_channels).

        Args:
            x: (N, F).
            edge_index: (2, M) int64.
            edge_attr: (M, edge_dim) floating or (M,) int64; without either option it is not looked at.
            triples: of the same graph, where they have been found before.
        """
        _check_inputs(type(self).__name__, x, edge_index)
        triples = find_triples(edge_index, x.shape[0]) if triples is None else triples
        with without_autocast(x):
            x = x.to(self.maps.weight.dtype)
            summed = neighbour_sum(at_least_float32(x), triples)
            sums = self._triple_sums(x, edge_attr, edge_index, triples)
            if self.reduce == "mean":
                degree = triples.rowptr.diff().unsqueeze(1)
                summed = summed / degree.clamp(min=1)
                sums = _rooted_means(sums, triples)
            joined = torch.cat(sums, dim=1).to(x.dtype)
            hidden = self.own(x) + self.neighbours(summed.to(x.dtype)) + self.joined(joined)
        return self.out(hidden.relu())

    def _triple_sums(
        self, x: Tensor, edge_attr: Tensor | None, edge_index: Tensor, triples: Triples
    ) -> tuple[Tensor, ...]:
        b, c = at_least_float32(self.maps(x)).split(self.rank, dim=1)
        if self.edge_weights is None:
            return rooted_sums(b, c, triples)
        weight = self.edge_weights(edge_attr, edge_index, triples)
        return weighted_rooted_sums(b, c, weight, triples)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, rank={self.rank})"


def rooted_sums(b: Tensor, c: Tensor, triples: Triples) -> tuple[Tensor, Tensor, Tensor]:
    """The sums over triangles, wedges with the node as centre and wedges with it as leaf, (N, R) each."""
    rank = b.shape[1]
    around, around_squared, around_c = neighbour_sum(torch.cat([b, b * b, c], dim=1), triples).split(rank, dim=1)
    triangle, path = triangle_sum(b, None, triples), triangle_sum(c, b, triples)
    centre = (around * around - around_squared) / 2 - triangle
    leaf = neighbour_sum(c * around, triples) - b * around_c - path
    return triangle, centre, leaf


def weighted_rooted_sums(b: Tensor, c: Tensor, weight: Tensor, triples: Triples) -> tuple[Tensor, ...]:
    """As :func:`rooted_sums` with weights (E, R) of edges, and the weighted sum of b over neighbours besides."""
    around = weighted_neighbour_sum(b, weight, triples)
    squares = weighted_neighbour_sum(b * b, weight * weight, triples)
    triangle = weighted_triangle_sum(b, None, weight, triples, "all")
    centre = (around * around - squares) / 2 - weighted_triangle_sum(b, None, weight, triples, "spokes")
    back = b * weighted_neighbour_sum(c, weight * weight, triples)
    leaf = weighted_neighbour_sum(c * around, weight, triples) - back
    leaf = leaf - weighted_triangle_sum(c, b, weight, triples, "path")
    return triangle, centre, leaf, around


def _rooted_means(sums: tuple[Tensor, ...], triples: Triples) -> tuple[Tensor, ...]:
    degree = triples.rowptr.diff().unsqueeze(1)
    triangles = triples.opposite_rowptr.diff().unsqueeze(1)
    second = neighbour_sum(degree.to(sums[0].dtype), triples).to(degree.dtype)
    leaves = second - degree - 2 * triangles
    counts = [triangles, degree * (degree - 1) // 2 - triangles, leaves, degree][: len(sums)]
    return tuple(
        torch.where(count > 0, total / count.clamp(min=1), 0) for total, count in zip(sums, counts, strict=True)
    )


class _Graphs:
    """Sums over the nodes of each graph."""

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


def _subset_counts(triples: Triples, graphs: _Graphs, x: Tensor) -> dict[str, Tensor]:
    """Number of subsets of each type in each graph, (B, 1) int64."""
    degree = triples.rowptr.diff()
    corners = triples.opposite_rowptr.diff()
    per_node = torch.stack([torch.ones_like(degree), degree, degree * (degree - 1) // 2, corners], dim=1)
    nodes, ends, paths, corners = graphs.sum(per_node).split(1, dim=1)
    triangle = corners // 3
    wedge = paths - 3 * triangle
    edge = ends // 2 * (nodes - 2) - 2 * wedge - 3 * triangle
    empty = nodes * (nodes - 1) * (nodes - 2) // 6 - triangle - wedge - edge
    return {"triangle": triangle, "wedge": wedge, "edge": edge, "empty": empty}


def _sum_triangles(a: Tensor, weight: Tensor | None, triples: Triples, graphs: _Graphs) -> Tensor:
    others = _triangle_sum(a, weight, triples, "all")
    return graphs.sum(a * others) / 3  # each triangle is met at its three corners


def _sum_wedges(b: Tensor, c: Tensor, weight: Tensor | None, triples: Triples, graphs: _Graphs) -> Tensor:
    around = _neighbour_sum(b, weight, triples)
    squares = _neighbour_sum(b * b, None if weight is None else weight * weight, triples)
    closed = _triangle_sum(b, weight, triples, "spokes")
    return graphs.sum(c * ((around * around - squares) / 2 - closed))


def _sum_edges(p: Tensor, q: Tensor, weight: Tensor | None, triples: Triples, graphs: _Graphs) -> Tensor:
    """Each edge with all nodes of the graph, less those adjacent to one end, where those to both were taken twice."""
    ends = p * _neighbour_sum(p, weight, triples)
    adjacent = graphs.sum(ends * neighbour_sum(q, triples))
    both = graphs.sum(q * _triangle_sum(p, weight, triples, "opposite"))
    return graphs.sum(ends) / 2 * graphs.sum(q) - adjacent + both


def _sum_empty(r: Tensor, weight: Tensor | None, triples: Triples, graphs: _Graphs) -> Tensor:
    """All subsets, an elementary symmetric polynomial, less those with edges; there are no edges to be weighted."""
    first, second, third = graphs.sum(r), graphs.sum(r * r), graphs.sum(r**3)
    everything = (first**3 - 3 * first * second + 2 * third) / 6
    with_edges = _sum_triangles(r, None, triples, graphs) + _sum_wedges(r, r, None, triples, graphs)
    return everything - with_edges - _sum_edges(r, r, None, triples, graphs)


_SUMS: dict[str, Any] = {
    "triangle": _sum_triangles,
    "wedge": _sum_wedges,
    "edge": _sum_edges,
    "empty": _sum_empty,
}


def _neighbour_sum(x: Tensor, weight: Tensor | None, triples: Triples) -> Tensor:
    return neighbour_sum(x, triples) if weight is None else weighted_neighbour_sum(x, weight, triples)


def _triangle_sum(x: Tensor, weight: Tensor | None, triples: Triples, edges: Any) -> Tensor:
    if weight is None:
        return triangle_sum(x, None, triples)
    return weighted_triangle_sum(x, None, weight, triples, edges)


def _edge_weights(channels: int, edge_dim: int | None, num_relations: int | None) -> EdgeWeights | None:
    if edge_dim is None and num_relations is None:
        return None
    return EdgeWeights(channels, edge_dim, num_relations)


def _check_reduce(reduce: str) -> None:
    if reduce not in ("sum", "mean"):
        raise ValueError(f"reduce must be 'sum' or 'mean'; got {reduce!r}")


def _check_inputs(name: str, x: Any, edge_index: Any) -> None:
    if isinstance(x, tuple | list | dict) or isinstance(edge_index, dict):
        raise TypeError(
            f"{name} joins triples of nodes of one type; got x as a {type(x).__name__}, as for edges between two node "
            "types. Make the graph homogeneous, data.to_homogeneous(), and tell its relations apart by "
            "num_relations=K with edge_attr=data.edge_type"
        )
    if not isinstance(edge_index, Tensor) or edge_index.is_sparse or edge_index.ndim != 2 or edge_index.shape[0] != 2:
        found = tuple(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise ValueError(f"{name} needs edge_index (2, M) int64; got {found}")
