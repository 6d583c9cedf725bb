"""Graph layers over triples of nodes. Shapes: N nodes, B graphs, M entries of edge_index, F features, R channels."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch_geometric.nn import Linear, MessagePassing

from lightning_accel._private.others import explained_edges
from lightning_accel.nn.features import check_edge_attr, check_edge_index, require_width
from lightning_accel.nn.relational.kernels import MAPS, ProductKernel, make_edge_weights
from lightning_accel.nn.relational.rooted import rooted_features
from lightning_accel.nn.relational.sums import (
    Graphs,
    average_of_copies,
    count_subsets,
    rooted_sums,
    weighted_neighbour_sum,
)
from lightning_accel.ops.bounds import require_flags, require_integers
from lightning_accel.ops.float32 import at_least_float32, without_autocast
from lightning_accel.ops.names import list_of_names
from lightning_accel.ops.triples.cache import triples_of
from lightning_accel.ops.triples.find import Triples

TripleType: TypeAlias = Literal["triangle", "wedge", "edge", "empty"]


class RelationalOrder3Pooling(nn.Module):
    """Pool a graph by sums over *all* subsets of three nodes, one sum for each type of subset by its edges.

    A subset contributes a product of linear maps of its nodes' features, with R channels, depending on its type:

    - ``"triangle"`` (3 edges): ``a_i a_j a_k``
    - ``"wedge"`` (2): ``c_v b_u b_w``, where v is the centre and u and w are not adjacent
    - ``"edge"`` (1): ``p_i p_j q_k``, where k is adjacent to neither i nor j
    - ``"empty"`` (0): ``r_i r_j r_k``

    The rows of the linear map ``terms.maps`` are, R each, a; b and c; p and q; and r, for the types in their order. The
    sums are exact, without sampling, and cost O((N + M + triangles) R) for all C(N, 3) subsets. The sums of the types,
    in the order of ``types``, pass through a linear layer without a bias, so the output is zero for a graph without
    such subsets, including an empty graph. The output does not depend on the order of nodes.

    The layer distinguishes graphs that differ in these counts, such as two triangles and a hexagon, which message
    passing (1-WL) cannot; it does not distinguish strongly regular graphs with equal parameters, such as the rook's
    graph and Shrikhande's graph.

    Edges are undirected: a directed ``edge_index`` is made symmetric, duplicates and self-loops are dropped. With
    ``edge_dim`` or ``num_relations``, each term is multiplied by the weight ``w_e`` of each edge among its three nodes,
    where ``w_e`` (R,) = 1 + a linear map of the edge's features, or 1 + a vector of its type. Each type of subset has
    its own map, and weights are averaged over the entries of ``edge_index`` for the same edge.

    Products and sums are float32 or wider, with autocast disabled, so mixed precision does not reduce accuracy.

    torch.compile breaks the graph where triples are computed: with ``fullgraph=True`` call
    :func:`lightning_accel.ops.find_triples` outside and pass ``triples=``.

    Args:
        in_channels: F; -1 to infer it from the first input.
        out_channels: number of output features.
        rank: R, the number of channels in which triples are summed.
        types: types of subsets, without duplicates.
        edge_dim: number of features of a floating ``edge_attr``. Weights of edges are one: pass
            ``edge_attr=edge_weight[:, None]`` with ``edge_dim=1``.
        num_relations: number of edge types of an int64 ``edge_attr``.

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
        edge_dim: int | None = None,
        num_relations: int | None = None,
    ) -> None:
        super().__init__()
        types = list_of_names(types, "types")
        if not types or len(set(types)) < len(types) or not set(types) <= set(MAPS):
            raise ValueError(f"types must be some of {list(MAPS)}, each once at most; got {list(types)}")
        require_integers(-1, in_channels=in_channels)
        require_integers(1, out_channels=out_channels, rank=rank)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.rank = rank
        self.types = tuple(types)
        self.terms = ProductKernel(in_channels, rank, self.types, edge_dim, num_relations)
        self.out = Linear(rank * len(types), out_channels, bias=False)

    def reset_parameters(self) -> None:
        self.terms.reset_parameters()
        self.out.reset_parameters()

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(
            self,
            x: Tensor,
            edge_index: Tensor,
            edge_attr: Tensor | None = None,
            batch: Tensor | None = None,
            size: int | None = None,
            triples: Triples | None = None,
        ) -> Tensor: ...

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        size: int | None = None,
        triples: Triples | None = None,
    ) -> Tensor:
        """Pool ``x`` (N, F) to (B, out_channels).

        Args:
            x: (N, F) features of the nodes.
            edge_index: (2, M) int64.
            edge_attr: (M, edge_dim) floating with ``edge_dim``, or (M,) int64 with ``num_relations``.
            batch: (N,) int64, the graph of each node; None for a single graph.
            size: B; by default the last graph of ``batch`` plus one.
            triples: edges and triangles of the same graph, if they have been computed before: by
                :func:`lightning_accel.ops.find_triples`, which also takes a stored ``triangle_index``.
        """
        # called here, so that torch.compile breaks the graph only here
        triples = _checked_triples(self, x, edge_index, triples)
        sums = self.sums(x, edge_index, edge_attr, batch, size, triples)
        with without_autocast(sums):
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
        """Compute the sum over the subsets of each type, the input (B, R * types) of the layer ``out``."""
        triples = _checked_triples(self, x, edge_index, triples)
        require_width(self, x, "in_channels", self.terms.maps.in_channels, "x (N, {})")
        _check_batch(self, batch, size, triples)
        instead = "If it is batch, pass it by name: batch=batch"
        _check_edge_attr(self, self.terms.edge_weights, edge_attr, x, edge_index, instead)
        graphs = Graphs(batch, size)
        sums, counts = self.terms.sums(x, edge_attr, edge_index, triples, graphs), count_subsets(triples, graphs)
        # exact zeros, where a graph has no subset of a type: rounding errors may not cancel
        exact = [torch.where(getattr(counts, name) > 0, sums[name], 0) for name in self.types]
        return torch.cat(exact, dim=1)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.in_channels}, {self.out_channels}, rank={self.rank}, "
            f"types={list(self.types)})"
        )


#: Pool a graph by sums over all subsets of three nodes: the short name of
#: :class:`lightning_accel.nn.RelationalOrder3Pooling`, which describes its arguments.
#: ``RO3Pooling(in_channels)(x, edge_index, batch=batch)`` is (graphs, 64).
RO3Pooling = RelationalOrder3Pooling


class RO3Conv(MessagePassing):  # type: ignore[misc]  # PyG's is untyped
    """Pass messages along edges, triangles and open wedges, so that nodes know the triples that contain them.

    With linear maps b and c of the features to R channels, the inputs of node i are

    - its own features plus the sum over its neighbours, as in GIN
    - ``b_i``
    - triangle: the sum of ``b_j b_k`` over the triangles {i, j, k}
    - wedge centre: the sum of ``b_j b_k`` over pairs of neighbours that are not adjacent
    - wedge leaf: the sum of ``c_j b_k`` over paths i - j - k whose ends are not adjacent

    which pass through Linear, ReLU, Linear. The layer is at least as expressive as message passing (1-WL): ``b_i``,
    which for almost all maps b is injective on the finitely many features of a graph, identifies the node's own part of
    GIN's sum, as GIN's eps does. It also distinguishes, for example, two triangles from a hexagon, which 1-WL cannot.
    It is bounded by 3-WL (folklore 2-WL): it never distinguishes strongly regular graphs with equal parameters, nor
    circulant graphs without triangles. With one marked node (:class:`~lightning_accel.nn.RelationalPooling`) it
    distinguishes the strongly regular graphs of the benchmark BREC.

    The sums over triples grow with the square of the degree and of the features: in a deep network, normalise after
    each layer, and for graphs of high degree pass ``compress_sums=True``.

    The graph is undirected, as in :class:`RelationalOrder3Pooling`. With ``edge_dim`` or ``num_relations``, a term is
    multiplied by ``w_e`` (R,) = 1 + a map of the edge's features or type for each edge among its nodes, and the sum of
    ``w_ij b_j`` over the neighbours is a further input.

    Triples are kept with the tensor ``edge_index`` as long as it lives. A change through ``edge_index.data`` or a NumPy
    array that shares its memory goes unnoticed: pass a new tensor.

    torch.compile breaks the graph where triples are computed: with ``fullgraph=True`` call
    :func:`lightning_accel.ops.find_triples` outside and pass ``triples=``.

    ``torch_geometric.nn.to_hetero`` creates one layer per relation within a node type; a relation between two node
    types is an error, as a wedge would span several relations: use ``data.to_homogeneous()`` and ``num_relations``.

    Args:
        in_channels: F; -1 to infer it from the first input.
        out_channels: number of features of the output, and of the hidden layer.
        rank: R. On a CPU, at degree 8 and 1e4 nodes, rank 16 takes 1.3 times as long as a GINConv with 64 channels, and
            1.8 times with many triangles; rank 32 takes 2.0 and 3.0 times as long.
        edge_dim: number of features of a floating ``edge_attr``. Weights of edges are one: pass
            ``edge_attr=edge_weight[:, None]`` with ``edge_dim=1``.
        num_relations: number of edge types of an int64 ``edge_attr``.
        compress_sums: take the sums over triples by their inverse hyperbolic sine, which grows as a logarithm. The
            layer distinguishes the same graphs, and trains better where degrees are 8 and more; sums are exact, and a
            linear readout counts triples, without it.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        rank: int = 16,
        edge_dim: int | None = None,
        num_relations: int | None = None,
        compress_sums: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(in_channels, tuple):
            raise TypeError(
                f"RO3Conv joins triples of nodes of one type, so in_channels is one width, or -1; got {in_channels}. "
                "Make the graph homogeneous, data.to_homogeneous(), and tell its relations apart by num_relations"
            )
        require_integers(-1, in_channels=in_channels)
        require_integers(1, out_channels=out_channels, rank=rank)
        require_flags(compress_sums=compress_sums)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.rank = rank
        self.compress_sums = compress_sums
        self.edge_weights = make_edge_weights(rank, edge_dim, num_relations)
        num_others = 4 if self.edge_weights is None else 5
        self.maps = Linear(in_channels, 2 * rank)
        self.joined = Linear(in_channels if in_channels < 0 else in_channels + num_others * rank, out_channels)
        self.out = Linear(out_channels, out_channels)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for layer in (self.maps, self.joined, self.out, self.edge_weights):
            if layer is not None:
                layer.reset_parameters()

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(
            self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None, triples: Triples | None = None
        ) -> Tensor: ...

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None, triples: Triples | None = None
    ) -> Tensor:
        """Map ``x`` (N, F) to (N, out_channels).

        Args:
            x: (N, F) features of the nodes.
            edge_index: (2, M) int64.
            edge_attr: (M, edge_dim) floating with ``edge_dim``, or (M,) int64 with ``num_relations``.
            triples: edges and triangles of the same graph, if they have been computed before: by
                :func:`lightning_accel.ops.find_triples`, which also takes a stored ``triangle_index``.
        """
        triples = _checked_triples(self, x, edge_index, triples)
        require_width(self, x, "in_channels", self.maps.in_channels, "x (N, {})")
        instead = "If it is batch, leave it out: no layer over edges needs it"
        _check_edge_attr(self, self.edge_weights, edge_attr, x, edge_index, instead)
        with without_autocast(x):
            x = x.to(self.maps.weight.dtype)
            given = self._joined_input(x, edge_attr, edge_index, triples)
            if self.compress_sums:
                own = x.shape[1] + self.rank  # of the node and its neighbours; then three sums over triples
                parts = given.split([own, 3 * self.rank, given.shape[1] - own - 3 * self.rank], dim=1)
                given = torch.cat([parts[0], parts[1].asinh(), parts[2]], dim=1)
            hidden = self.joined(given.to(x.dtype))
        return self.out(hidden.relu())

    def _joined_input(self, x: Tensor, edge_attr: Tensor | None, edge_index: Tensor, triples: Triples) -> Tensor:
        """Compute the input (N, F + 4 R) of ``joined``: features, b, and the sums; F + 5 R with edge weights."""
        maps = at_least_float32(self.maps(x))
        x, b = at_least_float32(x), maps[:, : self.rank]
        weight = None if self.edge_weights is None else self.edge_weights(edge_attr, edge_index, triples)
        mask = self._explainer_mask(edge_index, triples)
        if mask is None:
            return rooted_features(x, maps, weight, triples)
        masked = mask.expand(-1, self.rank) * (1 if weight is None else weight)
        sums: list[Tensor] = list(rooted_sums(maps, masked, triples))
        neighbours = weighted_neighbour_sum(x, mask, triples)
        if weight is not None:
            sums.append(weighted_neighbour_sum(b, masked, triples))
        return torch.cat([x + neighbours, b, *sums], dim=1)

    def _explainer_mask(self, edge_index: Tensor, triples: Triples) -> Tensor | None:
        """Return weights (E, 1) of undirected edges from the edge mask of PyG's explainers; None without a mask."""
        mask = explained_edges(self)
        if mask is None:
            return None
        if mask.shape != edge_index.shape[1:]:
            raise ValueError(
                f"the edge mask of an explainer must have one number for each of {edge_index.shape[1]} columns of "
                f"edge_index; got {tuple(mask.shape)}. Explain the graph that the mask was made for"
            )
        return average_of_copies(at_least_float32(mask)[:, None], edge_index, triples)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, rank={self.rank})"


def _checked_triples(layer: nn.Module, x: Any, edge_index: Any, triples: Triples | None) -> Triples:
    name = type(layer).__name__
    if isinstance(x, tuple | list | dict) or isinstance(edge_index, dict):
        raise TypeError(
            f"{name} joins triples of nodes of one type; got x as a {type(x).__name__}, as for edges between two node "
            "types. Make the graph homogeneous, data.to_homogeneous(), and tell its relations apart by "
            "num_relations=K with edge_attr=data.edge_type"
        )
    check_edge_index(name, edge_index)
    if not isinstance(x, Tensor) or x.ndim != 2:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} needs x (N, F), one row for each node; got {found}")
    if triples is not None and not isinstance(triples, Triples):
        raise TypeError(
            f"{name} takes triples=find_triples(edge_index, num_nodes) of lightning_accel.ops; got a "
            f"{type(triples).__name__}. Pass a stored triangle_index there: find_triples(edge_index, num_nodes, "
            "triangle_index)"
        )
    if triples is not None and triples.num_nodes != x.shape[0]:
        raise ValueError(
            f"{name} got triples of a graph of {triples.num_nodes} nodes and x of {x.shape[0]}: pass those of this "
            "graph, or leave triples out"
        )
    return triples_of(edge_index, x.shape[0]) if triples is None else triples


def _check_edge_attr(
    layer: nn.Module, edge_map: nn.Module | None, edge_attr: Tensor | None, x: Tensor, edge_index: Tensor, instead: str
) -> None:
    check_edge_attr(type(layer).__name__, edge_attr, x.shape[0], edge_index.shape[1], instead)
    if edge_attr is not None and edge_map is None:
        raise ValueError(
            f"{type(layer).__name__} got edge_attr {tuple(edge_attr.shape)}, which counts only with edge_dim, its "
            "columns, or num_relations, the number of edge types: pass one of them when the layer is made, or leave "
            "edge_attr out"
        )


def _check_batch(layer: nn.Module, batch: Tensor | None, size: int | None, triples: Triples) -> None:
    if batch is None:
        return
    if batch.shape != (triples.num_nodes,):
        raise ValueError(
            f"{type(layer).__name__} needs batch of shape ({triples.num_nodes},), the graph of each node; "
            f"got {tuple(batch.shape)}"
        )
    if batch.is_cpu and not torch.compiler.is_compiling():  # on CUDA it would wait for the device
        u, v = triples.edge
        if not torch.equal(batch.index_select(0, u), batch.index_select(0, v)):
            raise ValueError("every edge must join nodes of one graph: edge_index and batch do not belong together")
        if size is not None and batch.numel() and not 0 <= int(batch.min()) <= int(batch.max()) < size:
            raise ValueError(
                f"{type(layer).__name__} was told that there are size={size} graphs, but batch numbers them from "
                f"{int(batch.min())} to {int(batch.max())}"
            )
