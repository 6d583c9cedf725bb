"""Products of linear maps over triples of nodes, with features or types of edges.

Shapes: N nodes, B graphs, M entries of edge_index, E edges, F features, R channels.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch_geometric.nn import Linear

from lightning_accel.nn.features import wrong_edge_attr
from lightning_accel.nn.relational.sums import (
    Graphs,
    average_of_copies,
    sum_edges,
    sum_empty,
    sum_triangles,
    sum_wedges,
)
from lightning_accel.ops.bounds import if_set, require_integers
from lightning_accel.ops.float32 import at_least_float32, without_autocast
from lightning_accel.ops.triples.find import Triples

MAPS = {"triangle": 1, "wedge": 2, "edge": 2, "empty": 1}  # number of different node maps in a term of each type

_SUMS: dict[str, Callable[..., Tensor]] = {
    "triangle": sum_triangles,
    "wedge": sum_wedges,
    "edge": sum_edges,
    "empty": sum_empty,
}


def make_edge_weights(channels: int, edge_dim: int | None, num_relations: int | None) -> "EdgeWeights | None":
    """Create weights of edges if ``edge_dim`` or ``num_relations`` is set, else return None."""
    require_integers(1, **if_set(edge_dim=edge_dim, num_relations=num_relations))
    if edge_dim is None and num_relations is None:
        return None
    return EdgeWeights(channels, edge_dim, num_relations)


class EdgeWeights(nn.Module):
    """Compute weights per channel of each undirected edge: 1 + a linear map of its features, or 1 + its type's vector.

    Entries of ``edge_index`` for the same undirected edge, in either direction or repeated, are averaged after the
    map. Self-loops have no weight.
    """

    def __init__(self, channels: int, edge_dim: int | None, num_relations: int | None) -> None:
        super().__init__()
        if (edge_dim is None) == (num_relations is None):
            raise ValueError(f"give edge_dim or num_relations; got {edge_dim=} and {num_relations=}")
        self.edge_dim = edge_dim
        self.num_relations = num_relations
        self.map: nn.Module
        if edge_dim is not None:
            self.map = nn.Linear(edge_dim, channels)
        else:
            assert num_relations is not None
            self.map = nn.Embedding(num_relations, channels)

    def reset_parameters(self) -> None:
        self.map.reset_parameters()  # type: ignore[operator]

    def forward(self, edge_attr: Tensor | None, edge_index: Tensor, triples: Triples) -> Tensor:
        """Compute weights (E, R) of the undirected edges, in float32 or wider."""
        edge_attr = self._check(edge_attr, edge_index.shape[1])
        return 1 + average_of_copies(at_least_float32(self.map(edge_attr)), edge_index, triples)

    def _check(self, edge_attr: Tensor | None, num_entries: int) -> Tensor:
        if wrong := wrong_edge_attr(edge_attr, num_entries, self.edge_dim, self.num_relations):
            raise ValueError(f"this layer needs {wrong}")
        assert edge_attr is not None
        return self._in_range(edge_attr) if self.edge_dim is None else edge_attr.to(next(self.parameters()).dtype)

    def _in_range(self, types: Tensor) -> Tensor:
        assert self.num_relations is not None
        if types.is_cpu and types.numel() and not torch.compiler.is_compiling():
            low, high = types.min().item(), types.max().item()
            if low < 0 or high >= self.num_relations:
                raise ValueError(
                    f"edge types must lie in [0, {self.num_relations}), as num_relations={self.num_relations}; "
                    f"got types from {low} to {high}"
                )
        return types


class ProductKernel(nn.Module):
    """Sum products of linear maps of the features over all subsets of three nodes, with R channels for each type."""

    def __init__(
        self, in_channels: int, rank: int, types: Sequence[str], edge_dim: int | None, num_relations: int | None
    ) -> None:
        super().__init__()
        self.rank = rank
        self.types = tuple(types)
        self.maps = Linear(in_channels, rank * sum(MAPS[name] for name in types))
        self.edge_weights: EdgeWeights | None = make_edge_weights(rank * len(types), edge_dim, num_relations)

    def reset_parameters(self) -> None:
        self.maps.reset_parameters()
        if self.edge_weights is not None:
            self.edge_weights.reset_parameters()

    def sums(
        self, x: Tensor, edge_attr: Tensor | None, edge_index: Tensor, triples: Triples, graphs: Graphs
    ) -> dict[str, Tensor]:
        """Compute the sum (B, R) of each type, float32 or wider."""
        with without_autocast(x):
            maps, weights = self.node_maps(x), self.weights(edge_attr, edge_index, triples)
            return {name: _SUMS[name](*maps[name], weights[name], triples, graphs) for name in self.types}

    def node_maps(self, x: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Compute the node maps (N, R) of each type: a; b and c; p and q; r."""
        maps = at_least_float32(self.maps(x.to(self.maps.weight.dtype)))
        by_type = maps.split([self.rank * MAPS[name] for name in self.types], dim=1)
        return {name: part.split(self.rank, dim=1) for name, part in zip(self.types, by_type, strict=True)}

    def weights(self, edge_attr: Tensor | None, edge_index: Tensor, triples: Triples) -> dict[str, Tensor | None]:
        """Compute the weights of edges (E, R) in the terms of each type, None if all are 1."""
        if self.edge_weights is None:
            return dict.fromkeys(self.types)
        weights = self.edge_weights(edge_attr, edge_index, triples)
        return dict(zip(self.types, weights.split(self.rank, dim=1), strict=True))
