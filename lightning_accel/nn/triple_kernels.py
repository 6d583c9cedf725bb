"""Kernels of triples of nodes: products of linear maps, or an MLP, both with features or types of edges.

Shapes: N nodes, B graphs, M entries of edge_index, E edges, P paths, F features, D edge features, H hidden, R channels,
S samples.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import Linear

from lightning_accel.nn.triple_sums import (
    Graphs,
    average_of_copies,
    edge_keys,
    sum_edges,
    sum_empty,
    sum_triangles,
    sum_wedges,
)
from lightning_accel.ops.float32 import at_least_float32, dtype_of_sums, without_autocast
from lightning_accel.ops.triples import Triples
from lightning_accel.ops.two_paths import TwoPathIndex, TwoPaths, index_two_paths, sample_two_paths

MAPS = {"triangle": 1, "wedge": 2, "edge": 2, "empty": 1}  # number of different node maps in a term of each type

_SUMS: dict[str, Callable[..., Tensor]] = {
    "triangle": sum_triangles,
    "wedge": sum_wedges,
    "edge": sum_edges,
    "empty": sum_empty,
}

_MAX_PATHS = 2**28  # a training step takes some minutes


def make_edge_weights(channels: int, edge_dim: int | None, num_relations: int | None) -> "EdgeWeights | None":
    """Create weights of edges if ``edge_dim`` or ``num_relations`` is set, else return None."""
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
        if self.edge_dim is not None:
            needed = f"floating edge_attr of shape ({num_entries}, {self.edge_dim}), as edge_dim={self.edge_dim}"
            shape = (num_entries, self.edge_dim)
            if edge_attr is not None and edge_attr.is_floating_point() and edge_attr.shape == shape:
                return edge_attr.to(next(self.parameters()).dtype)
        else:
            needed = f"int64 edge_attr of shape ({num_entries},), as num_relations={self.num_relations}"
            if edge_attr is not None and edge_attr.dtype == torch.int64 and edge_attr.shape == (num_entries,):
                return self._in_range(edge_attr)
        found = "none" if edge_attr is None else f"{edge_attr.dtype} of shape {tuple(edge_attr.shape)}"
        raise ValueError(f"this layer needs {needed}; got {found}")

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


class _Tables(NamedTuple):
    """Hold the first layer's outputs for nodes and edges in each role, before they are combined along paths."""

    nodes: Tensor  # (N, 3 H): as centre, leaf and other leaf
    edges: Tensor | None  # (E, 3 H): between centre and leaf, centre and other, and the two leaves


class TripleMLP(nn.Module):
    """Apply an MLP to each path of two edges, symmetrically in its two leaves.

    The inputs are the features of centre and leaves, of the two edges, whether there is a third edge, and its features:
    ``(f(centre, leaf, other) + f(centre, other, leaf)) / 2``. The first layer of f is linear, so it is applied to nodes
    and edges rather than to paths; ``mlp`` is the rest of f.

    Args:
        in_channels: F; -1 to infer it from the first input.
        channels: R.
        hidden_channels: H.
        mlp: maps (P, H) to (P, R), beginning with an activation; by default ReLU, Linear, ReLU, Linear.
        max_paths: number of paths at a time. In training, chunks are computed again in the backward pass.
        edge_dim: number of features of a floating ``edge_attr``.
        num_relations: number of edge types.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        hidden_channels: int = 64,
        mlp: nn.Module | None = None,
        max_paths: int = 2**16,
        edge_dim: int | None = None,
        num_relations: int | None = None,
    ) -> None:
        super().__init__()
        if max_paths < 1:
            raise ValueError(f"max_paths must be at least 1; got {max_paths}")
        self.channels = channels
        self.max_paths = max_paths
        self.nodes = Linear(in_channels, 3 * hidden_channels)
        self.closed = nn.Parameter(torch.empty(hidden_channels))
        self.edges = make_edge_weights(3 * hidden_channels, edge_dim, num_relations)
        self.mlp = mlp if mlp is not None else _default_mlp(hidden_channels, channels)
        nn.init.uniform_(self.closed, -1, 1)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.closed, -1, 1)
        for module in (self.nodes, self.edges, *self.mlp.modules()):
            if module is not None and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def sums(
        self, x: Tensor, edge_attr: Tensor | None, edge_index: Tensor, triples: Triples, graphs: Graphs
    ) -> dict[str, Tensor]:
        """Sum over the paths in triangles, three in each, and over open wedges: (B, R) each, float32 or wider."""
        tables = self._tables(x, edge_attr, edge_index, triples)
        own, wide = at_least_float32(tables.nodes).dtype, dtype_of_sums(tables.nodes.device)
        total = tables.nodes.new_zeros(2 * graphs.size, self.channels, dtype=wide)
        paths = index_two_paths(triples)
        if paths.num_paths > _MAX_PATHS:
            raise ValueError(
                f"the graphs have {paths.num_paths} paths of two edges, more than the {_MAX_PATHS} that "
                "kernel='mlp' runs through at a time: draw some of them, samples=, or give fewer graphs at a time"
            )
        for start in range(0, paths.num_paths, self.max_paths):
            stop = min(start + self.max_paths, paths.num_paths)
            if stop - start < self.max_paths or not torch.is_grad_enabled():
                total = total + self._chunk_sum(tables, paths, start, stop, graphs)
            else:
                total = total + checkpoint(self._chunk_sum, tables, paths, start, stop, graphs, use_reentrant=False)
        triangle, wedge = total.to(own).view(graphs.size, 2, self.channels).unbind(dim=1)
        return {"triangle": triangle, "wedge": wedge}

    def sampled(
        self,
        x: Tensor,
        edge_attr: Tensor | None,
        edge_index: Tensor,
        triples: Triples,
        graphs: Graphs,
        num_samples: int,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw S paths uniformly from each of G graphs that have paths; return values (G, S, R), closed (G, S)."""
        if graphs.batch is not None and bool((graphs.batch.diff() < 0).any()):
            raise ValueError("samples need a batch whose nodes are in the order of its graphs; sort its nodes by batch")
        paths = sample_two_paths(triples, num_samples, generator, graphs.batch)
        values = self._values(self._tables(x, edge_attr, edge_index, triples), paths, triples)
        return at_least_float32(values).view(-1, num_samples, self.channels), paths.closed.view(-1, num_samples)

    def _tables(self, x: Tensor, edge_attr: Tensor | None, edge_index: Tensor, triples: Triples) -> _Tables:
        nodes = self.nodes(x.to(self.nodes.weight.dtype))
        edges = None if self.edges is None else self.edges(edge_attr, edge_index, triples).to(nodes.dtype)
        return _Tables(nodes, edges)

    def _chunk_sum(self, tables: _Tables, index: TwoPathIndex, start: int, stop: int, graphs: Graphs) -> Tensor:
        paths = index.between(start, stop)
        value = self._values(tables, paths, index.triples)
        value = value.to(dtype_of_sums(value.device))
        owner = 2 * graphs.of(paths.centre) + ~paths.closed
        return value.new_zeros(2 * graphs.size, self.channels).index_add(0, owner, value)

    def _values(self, tables: _Tables, paths: TwoPaths, triples: Triples) -> Tensor:
        centre, leaf, other = tables.nodes.chunk(3, dim=1)
        shared = centre[paths.centre] + paths.closed.unsqueeze(1) * self.closed
        one = shared + leaf[paths.leaf] + other[paths.other]
        swapped = shared + leaf[paths.other] + other[paths.leaf]
        if tables.edges is not None:
            near, far, third = tables.edges.chunk(3, dim=1)
            keys = edge_keys(triples)
            first, second = (
                _edge(paths.centre, paths.leaf, keys, triples),
                _edge(paths.centre, paths.other, keys, triples),
            )
            between = _edge(paths.leaf, paths.other, keys, triples).clamp(max=len(keys) - 1)
            closing = paths.closed.unsqueeze(1) * third[between]
            one = one + near[first] + far[second] + closing
            swapped = swapped + near[second] + far[first] + closing
        return (self.mlp(one) + self.mlp(swapped)) / 2


def _edge(u: Tensor, v: Tensor, keys: Tensor, triples: Triples) -> Tensor:
    return torch.searchsorted(keys, torch.minimum(u, v) * triples.num_nodes + torch.maximum(u, v))


def _default_mlp(hidden_channels: int, channels: int) -> nn.Module:
    return nn.Sequential(
        nn.ReLU(), nn.Linear(hidden_channels, hidden_channels), nn.ReLU(), nn.Linear(hidden_channels, channels)
    )
