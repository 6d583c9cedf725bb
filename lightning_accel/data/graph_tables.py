"""Readers of graphs from tables of edges, nodes and graphs. Shapes: n nodes, M edges, F and D features of them."""

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch_geometric.data import Data

from lightning_accel.data.quoting import listed, shown
from lightning_accel.data.tables import as_numbers, as_text, holds_numbers, read_table, require_columns

_ONLY_GRAPH = "0"  # id of the only graph of a file without a column "graph"


@dataclass
class EdgeList:
    """Hold the content of an edge list and a table of nodes."""

    graphs: list[Data]
    ids: list[str]
    node_ids: list[list[str]]
    node_target: list[list[Any]] | None  # one entry for each node of all graphs
    feature_names: list[str] | None
    relation_names: list[str] | None


Names = tuple[list[str] | None, list[str] | None]  # names of the node features, and of the edge types


def read_edge_list(
    path: Path,
    nodes_path: Path | None,
    separator: str,
    decimal: str,
    target: Sequence[str],
    max_bytes: int,
    known: Names | None,
) -> EdgeList:
    """Read graphs from a table with the columns ``source`` and ``target``, and one with a column ``node``.

    A column ``graph`` names the graph of a row; without it there is one graph. ``type`` is the type of an edge, all
    other columns are numeric edge features. The columns of the table of nodes, except ``target``, are node features;
    text columns are one-hot encoded.

    Raises:
        ValueError: if a column is missing, holds no numbers or lacks values, or an edge has an unknown node.
    """
    written = ["source", "target", "graph", "type"]
    edges = read_table(path, separator, decimal, text_columns=written, max_bytes=max_bytes)
    require_columns(edges, ["source", "target"], path)
    nodes = None
    if nodes_path is not None:
        written = ["node", "graph", *target]
        nodes = read_table(nodes_path, separator, decimal, text_columns=written, max_bytes=max_bytes)
        require_columns(nodes, ["node"], nodes_path)
        if ("graph" in nodes) != ("graph" in edges):
            with_it, without = (nodes_path, path) if "graph" in nodes else (path, nodes_path)
            raise ValueError(f"{with_it} has a column 'graph' and {without} has none; both or neither must have one")
    numbering = _NodeNumbers(edges, nodes, path, nodes_path)
    attributes, relation_names = _edge_attributes(edges, path, known and known[1])
    features, feature_names = (None, None)
    if nodes is not None and nodes_path is not None:
        features, feature_names = _node_features(nodes, nodes_path, target, known and known[0])
    graphs = []
    for number in range(len(numbering.ids)):
        of_edges, of_nodes = numbering.edges_of(number), numbering.nodes_of(number)
        graph = Data(edge_index=numbering.edge_index(number), num_nodes=len(of_nodes))
        if attributes is not None:
            graph.edge_attr = torch.from_numpy(attributes[of_edges])
        if features is not None:
            graph.x = torch.from_numpy(features[numbering.rows[of_nodes]])
        graphs.append(graph)
    node_target: list[list[Any]] | None = None
    if nodes is not None and set(target) <= set(nodes.columns):
        node_target = _object_columns(nodes, target)[numbering.rows].tolist()
    node_ids = [[numbering.names[i] for i in numbering.nodes_of(g)] for g in range(len(graphs))]
    return EdgeList(graphs, numbering.ids, node_ids, node_target, feature_names, relation_names)


class _NodeNumbers:
    """Number the nodes, graph by graph, in the order of the table of nodes, else sorted by name."""

    def __init__(self, edges: pd.DataFrame, nodes: pd.DataFrame | None, path: Path, nodes_path: Path | None) -> None:
        ends = [
            list(zip(_graph_column(edges, path), _text_column(edges, name, path), strict=True))
            for name in ("source", "target")
        ]
        if nodes is None or nodes_path is None:
            listed = sorted({*ends[0], *ends[1]}, key=lambda pair: (_natural_key(pair[0]), _natural_key(pair[1])))
        else:
            listed = list(zip(_graph_column(nodes, nodes_path), _text_column(nodes, "node", nodes_path), strict=True))
        self.ids = list(dict.fromkeys(graph for graph, _ in listed))
        number = {graph: i for i, graph in enumerate(self.ids)}
        of = np.array([number[graph] for graph, _ in listed])
        self.rows = np.argsort(of, kind="stable")  # row of each node in the table of nodes
        place = {listed[row]: i for i, row in enumerate(self.rows.tolist())}
        if len(place) < len(listed):
            graph, node = Counter(listed).most_common(1)[0][0]
            raise ValueError(
                f"{nodes_path} has two rows of node {shown(node)}{self._graph_suffix(graph)}; each node may stand once"
            )
        self.names = [listed[row][1] for row in self.rows.tolist()]
        self._of_node = of[self.rows]
        for name, pairs in zip(("source", "target"), ends, strict=True):
            for row, pair in enumerate(pairs, start=1):
                if pair not in place:
                    raise ValueError(
                        f"row {row} of {path} has the {name} {shown(pair[1])}{self._graph_suffix(pair[0])}, which "
                        f"{nodes_path} does "
                        "not list; add the node, or remove the edge"
                    )
        self._ends = np.array([[place[pair] for pair in pairs] for pairs in ends])
        of_edge = self._of_node[self._ends[0]]
        self._edges = np.argsort(of_edge, kind="stable")
        graphs = np.arange(len(self.ids) + 1)
        self._first_edge = np.searchsorted(of_edge[self._edges], graphs)
        self._first_node = np.searchsorted(self._of_node, graphs)

    def _graph_suffix(self, graph: str) -> str:
        return f" in graph {shown(graph)}" if len(self.ids) > 1 else ""

    def edges_of(self, graph: int) -> np.ndarray:
        """Return the rows of a graph's edges in the table of edges."""
        return self._edges[self._first_edge[graph] : self._first_edge[graph + 1]]

    def nodes_of(self, graph: int) -> np.ndarray:
        return np.arange(self._first_node[graph], self._first_node[graph + 1])

    def edge_index(self, graph: int) -> torch.Tensor:
        return torch.from_numpy(self._ends[:, self.edges_of(graph)] - self._first_node[graph])


def _graph_column(table: pd.DataFrame, path: Path) -> list[str]:
    return _text_column(table, "graph", path) if "graph" in table else [_ONLY_GRAPH] * len(table)


def _text_column(table: pd.DataFrame, name: str, path: Path) -> list[str]:
    return as_text(_require_present(table[name], path), path).tolist()


def _object_columns(table: pd.DataFrame, names: Sequence[str]) -> np.ndarray:
    """Return the columns ``names`` as an array of objects, with None for missing values."""
    chosen = table[list(names)].astype(object)
    return chosen.where(chosen.notna(), None).to_numpy()


def _require_present(column: pd.Series, path: Path) -> pd.Series:
    if (missing := column.isna()).any():
        raise ValueError(
            f"column {shown(column.name)} of {path} lacks {missing.sum()} of {len(column)} values, the first in row "
            f"{int(missing.to_numpy().argmax()) + 1}. Fill what is missing, or leave the row out"
        )
    return column


def _natural_key(name: str) -> tuple[float, str]:
    try:
        return float(name), name
    except ValueError:
        return np.inf, name


def _edge_attributes(
    edges: pd.DataFrame, path: Path, known: list[str] | None
) -> tuple[np.ndarray | None, list[str] | None]:
    """Return types (M,) int64, or features (M, D) float64, with one-hot types among them if edges have both."""
    names = [name for name in edges.columns if name not in ("source", "target", "graph", "type")]
    remedy = "Fill what is missing, or remove the column"
    columns = [as_numbers(_require_present(edges[name], path), path, remedy).to_numpy() for name in names]
    features = np.stack(columns, axis=1) if columns else None
    if "type" not in edges:
        return features, None
    text = _text_column(edges, "type", path)
    types = known or sorted({*text}, key=_natural_key)
    if unknown := [name for name in text if name not in types]:
        raise ValueError(f"{path} has the type {shown(unknown[0])}; those trained on are {listed(types)}")
    number = np.array([types.index(name) for name in text])
    if features is None:
        return number, types
    return np.concatenate([features, np.eye(len(types))[number]], axis=1), types


def _node_features(
    nodes: pd.DataFrame, path: Path, target: Sequence[str], known: list[str] | None
) -> tuple[np.ndarray | None, list[str] | None]:
    """Return node features (rows, F) float64 and their names; a text that is not among the ``known`` is all zeros."""
    if known is not None:
        require_columns(nodes, list(dict.fromkeys(name.partition("=")[0] for name in known)), path)
    columns: dict[str, np.ndarray] = {}
    for name in nodes.columns:
        if name in ("node", "graph", *target):
            continue
        column = _require_present(nodes[name], path)
        if holds_numbers(column, path) if known is None else name in known:
            columns[name] = as_numbers(column, path, "Mend the value").to_numpy()
        else:
            text = as_text(column, path).to_numpy()
            columns |= {f"{name}={value}": (text == value).astype(np.float64) for value in sorted({*text})}
    if known is not None:
        return np.stack([columns.get(name, np.zeros(len(nodes))) for name in known], axis=1), known
    return (np.stack(list(columns.values()), axis=1), list(columns)) if columns else (None, None)


def read_graph_targets(
    path: Path,
    ids: Sequence[str],
    target: Sequence[str],
    separator: str,
    decimal: str,
    max_bytes: int,
    by_order: bool,
    edges_path: Path | None = None,
) -> list[list[Any]]:
    """Read the targets of the graphs ``ids`` from a table with a column ``graph``, or with one row per graph in order.

    Raises:
        ValueError: if a column or a graph is missing; or, with a table of edges ``edges_path``, if there are other
            graphs, whose nodes are unknown.
    """
    table = read_table(path, separator, decimal, text_columns=["graph", *target], max_bytes=max_bytes)
    require_columns(table, list(target), path)
    values: list[list[Any]] = _object_columns(table, target).tolist()
    if "graph" not in table:
        if not by_order:
            raise ValueError(f"{path} has no column 'graph', which says whose targets stand in a row")
        if len(table) != len(ids):
            raise ValueError(f"{path} has {len(table)} rows for {len(ids)} graphs; one for each, in order, was needed")
        return values
    names = _text_column(table, "graph", path)
    of = dict(zip(names, values, strict=True))
    if len(of) < len(names):
        raise ValueError(
            f"{path} has two rows of graph {shown(Counter(names).most_common(1)[0][0])}; each may stand once"
        )
    if lacking := [name for name in ids if name not in of]:
        near = difflib.get_close_matches(lacking[0], names, n=1)
        hint = f"; did you mean {shown(near[0])}?" if near else ""
        raise ValueError(f"{path} has no row of graph {shown(lacking[0])}, nor of {len(lacking) - 1} others{hint}")
    known = {*ids}
    if edges_path is not None and (unknown := [name for name in names if name not in known]):
        raise ValueError(
            f"{path} has the graph {shown(unknown[0])} and {len(unknown) - 1} others that {edges_path} has no "
            f"edge of, nor "
            "a table of nodes any node: list the nodes of graphs without edges in nodes_path, or remove their rows"
        )
    return [of[name] for name in ids]
