"""Features of nodes and edges as layers take them. Shapes: n nodes and M edges of a graph, F and D features of them."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

_MOST_TYPES = 10_000
_ENCODINGS = "random_walk_pe", "laplacian_eigenvector_pe"  # as PyG's transforms name them


@dataclass(frozen=True)
class Features:
    """Describe the features of the nodes and edges of a set of graphs."""

    num_features: int  # of x, after one-hot encoding
    node_types: list[int] | None = None  # number of values of each column of x, if it holds whole numbers
    edge_types: list[int] | None = None  # likewise of edge_attr
    edge_dim: int | None = None  # D, None unless edges have features
    num_relations: int | None = None  # number of edge types, None unless each edge has one type
    has_x: bool = True  # else nodes get a single constant 1
    encodings: Mapping[str, int] = field(default_factory=dict)  # attributes of nodes that follow x, and their widths

    @property
    def width(self) -> int:
        """Return F."""
        return self.num_features + sum(self.encodings.values())


def features_of(graphs: Sequence[Data], where: str, lines: Sequence[str] = ()) -> Features:
    """Return the features of some graphs, which must all have the same.

    Args:
        graphs: graphs with at least ``edge_index``.
        where: origin of the graphs, for messages.
        lines: line number of each graph in its file, if it has a line of its own.

    Raises:
        ValueError: if graphs differ, or hold values that cannot be features; the message names the graph and its line.
    """
    names = [f"graph {i} (line {lines[i]})" if lines else f"graph {i}" for i in range(len(graphs))]
    for name, graph in zip(names, graphs, strict=True):
        _require_edges(graph, f"edge_index of {name} of {where}")
    nodes, edges = (_column_types(graphs, names, key, where) for key in ("x", "edge_attr"))
    node_types, width = nodes if nodes else (None, 1)
    edge_types, edge_width = edges if edges else (None, None)
    columns = {name: _column_types(graphs, names, name, where) for name in _ENCODINGS}
    encodings = {name: found[1] for name, found in columns.items() if found}
    if edge_types is not None and len(edge_types) == 1:
        return Features(width, node_types, edge_types, None, edge_types[0], nodes is not None, encodings)
    return Features(width, node_types, edge_types, edge_width, None, nodes is not None, encodings)


def _require_edges(graph: Data, what: str) -> None:
    edges = graph.edge_index
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype != torch.int64:
        raise ValueError(f"{what} must be (2, M) int64; got {tuple(edges.shape)} of {edges.dtype}")
    if edges.numel() and (edges.min() < 0 or edges.max() >= (graph.num_nodes or 0)):
        wrong = int(edges.min() if edges.min() < 0 else edges.max())
        raise ValueError(f"{what} names node {wrong} of {graph.num_nodes}, which are counted from 0")


def _column_types(
    graphs: Sequence[Data], names: Sequence[str], key: str, where: str
) -> tuple[list[int] | None, int] | None:
    """Return the number of values of each column, None for floating ones, and of features; None without any."""
    filled = [(name, graph) for name, graph in zip(names, graphs, strict=True) if _has_items(graph, key)]
    first: Any = filled[0][1].to_dict().get(key) if filled else None
    most: Tensor | None = None
    for name, graph in filled:
        found = graph.to_dict().get(key)
        if (found is None) != (first is None):
            raise ValueError(f"{name} of {where} and its first one differ: one alone has {key}")
        if found is None:
            continue
        rows = graph.num_edges if key == "edge_attr" else graph.num_nodes
        if not isinstance(found, Tensor) or found.ndim not in (1, 2) or len(found) != rows:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"{key} of {name} of {where} must be ({rows}, ...) of numbers; got {got}")
        width, categorical = _as_columns(found).shape[1], _is_categorical(found)
        if (width, categorical) != (_as_columns(first).shape[1], _is_categorical(first)):
            raise ValueError(
                f"{key} must be alike in all graphs of {where}; {name} has {width} of {found.dtype} a row, the first "
                f"one {_as_columns(first).shape[1]} of {first.dtype}"
            )
        if found.is_floating_point() and not found.isfinite().all():
            raise ValueError(f"{key} of {name} of {where} holds {found[~found.isfinite()][0]}; fill it in")
        if categorical:
            if found.min() < 0:
                raise ValueError(f"{key} of {name} of {where} holds the type {int(found.min())}; 0 or more")
            largest = _as_columns(found).amax(0)
            most = largest if most is None else torch.maximum(most, largest)
    if first is None:
        return None
    if not _is_categorical(first):
        return None, _as_columns(first).shape[1]
    assert most is not None
    types = (most + 1).tolist()
    if sum(types) > _MOST_TYPES:
        raise ValueError(
            f"{key} of {where} holds whole numbers up to {max(types) - 1}, which would each become a feature; make "
            "quantities floating with a transform"
        )
    return types, sum(types)


def _has_items(graph: Data, key: str) -> bool:
    return bool(graph.num_edges if key == "edge_attr" else graph.num_nodes)


def _as_columns(values: Tensor) -> Tensor:
    return values[:, None] if values.ndim == 1 else values


def _is_categorical(values: Tensor) -> bool:
    return not values.is_floating_point() and values.dtype not in (torch.bool, torch.uint8)


def apply_features(graph: Data, features: Features, where: str) -> Data:
    """Return a copy with ``x`` (n, F) float32, and ``edge_attr`` (M, D) float32, or (M,) int64 types, or none.

    Raises:
        ValueError: if the graph has other features, or types that ``features`` does not include.
    """
    graph = copy.copy(graph)
    _fill_empty(graph, features)
    if "x" in graph and not features.has_x:
        raise ValueError(f"{where} has x, features of nodes, and the training graphs have none; leave them out")
    if features.has_x:
        graph.x = _encode(graph, "x", features.node_types, features.num_features, where)
    else:
        graph.x = torch.ones(graph.num_nodes or 0, 1)
    for name, width in features.encodings.items():
        graph.x = torch.cat([graph.x, _encode(graph, name, None, width, where)], dim=1)
        del graph[name]
    if features.num_relations is not None:
        graph.edge_attr = _validated_types(graph, "edge_attr", features.edge_types or [], where)[:, 0]
    elif features.edge_dim is not None:
        graph.edge_attr = _encode(graph, "edge_attr", features.edge_types, features.edge_dim, where)
    return graph


def _fill_empty(graph: Data, features: Features) -> None:
    """Give a graph without nodes or edges empty features of the width that the other graphs have."""
    for key, types, width, has in (
        ("x", features.node_types, features.num_features, features.has_x),
        ("edge_attr", features.edge_types, features.edge_dim, features.edge_dim or features.num_relations),
        *((name, None, width, True) for name, width in features.encodings.items()),
    ):
        if not _has_items(graph, key):
            if key in graph:
                del graph[key]
            if has:
                graph[key] = torch.zeros(0, width or 1) if types is None else torch.zeros(0, len(types)).long()


def _encode(graph: Data, key: str, types: list[int] | None, width: int, where: str) -> Tensor:
    if types is not None:
        known = _validated_types(graph, key, types, where)
        return torch.cat([F.one_hot(known[:, i], n) for i, n in enumerate(types)], dim=1).float()
    found = _as_columns(graph[key]).float() if key in graph and not _is_categorical(graph[key]) else None
    if found is None or found.shape[1] != width:
        got = "none" if found is None else str(found.shape[1])
        raise ValueError(f"{key} of {where} must have the {width} features of the training graphs; got {got}")
    return found


def _validated_types(graph: Data, key: str, types: list[int], where: str) -> Tensor:
    found = _as_columns(graph[key]) if key in graph else None
    if found is None or not _is_categorical(found) or found.shape[1] != len(types):
        raise ValueError(f"{key} of {where} must hold {len(types)} whole numbers each, as the training graphs do")
    for i, most in enumerate(types):
        if len(found) and int(found[:, i].max()) >= most:
            raise ValueError(
                f"{key} of {where} holds the type {int(found[:, i].max())}; those trained on go up to {most - 1}"
            )
    return found.long()


class Scale(NamedTuple):
    """Standardize columns by their means and standard deviations, which are 0 and 1 for columns to be kept."""

    mean: Tensor
    std: Tensor

    def __call__(self, values: Tensor) -> Tensor:
        return ((values.double() - self.mean) / self.std).float()


def fit_scale(values: Tensor) -> Scale:
    """Fit a Scale to the columns of ``values``; constant columns, and those of only zeros and ones, are kept."""
    values = values.double()
    flags = ((values == 0) | (values == 1)).all(0)
    std, mean = values.std(0, correction=0), values.mean(0)
    stays = flags | (std <= 1e-12 * mean.abs().clamp(min=1)) | (len(values) == 0)
    return Scale(mean.where(~stays, 0.0), std.where(~stays, 1.0))


def scale_features(graphs: Sequence[Data], scales: Mapping[str, Scale]) -> None:
    """Standardize, in place, the attributes that ``scales`` names."""
    for graph in graphs:
        for key, scale in scales.items():
            graph[key] = scale(graph[key])
