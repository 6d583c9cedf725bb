"""The product kernel of triples. Shapes: N nodes, B graphs, F features, R channels."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch_geometric.nn import Linear

from lightning_accel.nn.edge_weights import EdgeWeights, make_edge_weights
from lightning_accel.nn.triple_sums import Graphs, sum_edges, sum_empty, sum_triangles, sum_wedges
from lightning_accel.ops.float32 import at_least_float32, without_autocast
from lightning_accel.ops.triples import Triples

MAPS = {"triangle": 1, "wedge": 2, "edge": 2, "empty": 1}  # number of different node maps in a term of each type

_SUMS: dict[str, Callable[..., Tensor]] = {
    "triangle": sum_triangles,
    "wedge": sum_wedges,
    "edge": sum_edges,
    "empty": sum_empty,
}


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
