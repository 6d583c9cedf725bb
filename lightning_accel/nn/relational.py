"""Layers that see triples of nodes. Shapes: N nodes, B graphs, M entries of edge_index, F features, R channels."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch_geometric.nn import Linear, MessagePassing

from lightning_accel.nn.edge_weights import EdgeWeights
from lightning_accel.nn.triple_sums import (
    Graphs,
    count_rooted,
    count_subsets,
    rooted_sums,
    sum_edges,
    sum_empty,
    sum_triangles,
    sum_wedges,
    weighted_neighbour_sum,
)
from lightning_accel.ops.float32 import at_least_float32, without_autocast
from lightning_accel.ops.triples import Triples, find_triples, neighbour_sum

TripleType: TypeAlias = Literal["triangle", "wedge", "edge", "empty"]

_MAPS = {"triangle": 1, "wedge": 2, "edge": 2, "empty": 1}  # node maps that each type multiplies
_SUMS: dict[str, Callable[..., Tensor]] = {
    "triangle": sum_triangles,
    "wedge": sum_wedges,
    "edge": sum_edges,
    "empty": sum_empty,
}


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
        graphs = Graphs(batch, size)
        with without_autocast(x):
            weights: Sequence[Tensor | None] = [None] * len(self.types)
            if self.edge_weights is not None:
                weights = self.edge_weights(edge_attr, edge_index, triples).split(self.rank, dim=1)
            sums = [
                _SUMS[name](*maps, weight, triples, graphs)
                for name, maps, weight in zip(self.types, self._split(x), weights, strict=True)
            ]
            counts = count_subsets(triples, graphs)
            return torch.cat(
                [self._reduced(total, getattr(counts, name)) for name, total in zip(self.types, sums, strict=True)],
                dim=1,
            )

    def _reduced(self, total: Tensor, count: Tensor) -> Tensor:
        mean = total / count.clamp(min=1) if self.reduce == "mean" else total
        return torch.where(count > 0, mean, 0)  # what would cancel but for rounding is left out

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
            neighbours, sums = self._sums(x, edge_attr, edge_index, triples)
            hidden = self.own(x) + self.neighbours(neighbours.to(x.dtype)) + self.joined(sums.to(x.dtype))
        return self.out(hidden.relu())

    def _sums(self, x: Tensor, edge_attr: Tensor | None, edge_index: Tensor, triples: Triples) -> tuple[Tensor, Tensor]:
        b, c = at_least_float32(self.maps(x)).split(self.rank, dim=1)
        weight = None if self.edge_weights is None else self.edge_weights(edge_attr, edge_index, triples)
        sums: list[Tensor] = list(rooted_sums(b, c, weight, triples))
        counts: list[Tensor] = list(count_rooted(triples)) if self.reduce == "mean" else []
        neighbours = neighbour_sum(at_least_float32(x), triples)
        degree = triples.rowptr.diff().unsqueeze(1)
        if weight is not None:
            sums.append(weighted_neighbour_sum(b, weight, triples))
            counts.append(degree)
        if self.reduce == "mean":
            neighbours = neighbours / degree.clamp(min=1)
            sums = [
                torch.where(count > 0, total / count.clamp(min=1), 0) for total, count in zip(sums, counts, strict=True)
            ]
        return neighbours, torch.cat(sums, dim=1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, rank={self.rank})"


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
