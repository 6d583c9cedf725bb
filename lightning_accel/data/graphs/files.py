"""Readers of graphs from files. Shapes: R graphs, n nodes of a graph, M edges, F features, K targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data

from lightning_accel.data.bounds import require_allowed
from lightning_accel.data.graphs.options import GraphLayout
from lightning_accel.data.graphs.tasks import Level
from lightning_accel.data.quoting import WITHOUT_TARGET, did_you_mean, shown
from lightning_accel.data.tables.files import read_table, require_columns
from lightning_accel.data.tables.values import as_numbers, as_text, holds_numbers, numbers_first, require_present
from lightning_accel.data.text.lines import lines_of, numbers_of, parse_object, require_distinct_ids, require_field
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")

_NODE_BYTES = 64  # memory of a node without attributes: features, indices in batches, and their copies
_FILL = "Fill what is missing, or remove the column"
FIELDS = "edges", "num_nodes", "x", "edge_attr", "id"


@dataclass
class FileGraphs:
    """Hold the graphs and targets of files, before classes are encoded as numbers."""

    graphs: list[Data]  # with num_nodes, edge_index, and x and edge_attr if the file has them
    ids: list[str]  # one for each graph
    level: Level
    node_ids: list[list[str]] = field(default_factory=list)  # for each graph, the names of its nodes
    target: list[list[Any]] = field(default_factory=list)  # for each graph, or node, its K targets; empty without any
    feature_names: list[str] | None = None
    relation_names: list[str] | None = None  # names of the edge types
    lines: list[str] = field(default_factory=list)  # line number of each graph, if each has a line of its own


def read_graphs(path: Path, layout: GraphLayout, with_target: bool = True) -> FileGraphs:
    """Read graphs from a file, by its suffix: ``.csv`` or ``.parquet``, ``.jsonl`` or ``.ndjson``, ``.g6``.

    Args:
        path: file of the edges of one graph, or of several graphs.
        layout: how the files store graphs.
        with_target: whether targets are required.

    Raises:
        ValueError: if the suffix is another, a file is empty, or its content does not match the layout; the message
            names the line or the row.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    match suffixes[-1:]:
        case [".csv" | ".parquet"]:
            found = _read_tables(path, layout)
        case [".jsonl" | ".ndjson"]:
            found = _read_json_lines(path, layout, with_target)
        case [".g6"]:
            found = _read_graph6_lines(path, layout, with_target)
        case _:
            raise ValueError(
                "need a .csv or .parquet file with an edge a row, a .jsonl file with a graph a line, or a .g6 file in "
                f"the graph6 format; got {path}"
            )
    repeated = 0
    for graph in found.graphs:
        add_reverse_edges(graph)
        source, target = graph.edge_index
        edges = (source * (graph.num_nodes or 0) + target)[:, None].double()
        if (values := graph.edge_attr) is not None:
            edges = torch.cat([edges, (values[:, None] if values.ndim == 1 else values).double()], dim=1)
        repeated += len(edges.unique(dim=0)) < len(edges)
    if repeated:
        rank_zero_warn(
            f"{repeated} of {len(found.graphs)} graphs of {path} list an edge more than once: layers that sum over "
            "neighbours count it as often. Unless that is meant, remove repeated edges from the file"
        )
    return found


def add_reverse_edges(graph: Data) -> None:
    """Add the reverse of each edge that lacks it, with the same attributes, in place."""
    source, target = graph.edge_index
    n = graph.num_nodes or 0
    lacking = ~torch.isin(target * n + source, source * n + target)
    graph.edge_index = torch.cat([graph.edge_index, graph.edge_index[:, lacking].flip(0)], dim=1)
    if graph.edge_attr is not None:
        graph.edge_attr = torch.cat([graph.edge_attr, graph.edge_attr[lacking]])


def _read_tables(path: Path, layout: GraphLayout) -> FileGraphs:
    """Read one graph from a table with the columns ``source`` and ``target``, and one with a column ``node``.

    ``type`` is the type of an edge, all other columns are numeric edge features. The columns of the table of nodes,
    except the targets, are node features; text columns are one-hot encoded.
    """
    if layout.nodes_path is None or layout.level == "graph":
        raise ValueError(
            f"{path} holds the edges of one graph, whose nodes have targets: give a table with the columns node and "
            f"{layout.columns[0]} in layout.nodes_path, and leave layout.level out. Several graphs go in a .jsonl file"
        )
    nodes_path = Path(layout.nodes_path)
    edges = read_table(path, text_columns=["source", "target", "type"])
    require_columns(edges, ["source", "target"], path)
    nodes = read_table(nodes_path, text_columns=["node", *layout.columns])
    require_columns(nodes, ["node", *layout.columns], nodes_path)
    names = _text_column(nodes, "node", nodes_path)
    place = {name: row for row, name in enumerate(names)}
    if len(place) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise ValueError(f"{nodes_path} has two rows of node {shown(twice)}; each node may stand once")
    ends = [_text_column(edges, name, path) for name in ("source", "target")]
    for column in ends:
        for row, name in enumerate(column):
            if name not in place:
                raise ValueError(
                    f"row {row} (from 0) of {path} has the node {shown(name)}, which {nodes_path} does not list; "
                    "add the node, or remove the edge"
                )
    graph = Data(edge_index=torch.tensor([[place[name] for name in column] for column in ends]), num_nodes=len(names))
    attributes, relation_names = _edge_attributes(edges, path)
    features, feature_names = _node_features(nodes, nodes_path, layout.columns)
    graph.update({key: value for key, value in (("edge_attr", attributes), ("x", features)) if value is not None})
    chosen = nodes[list(layout.columns)].astype(object)
    target = chosen.where(chosen.notna(), None).to_numpy().tolist()
    return FileGraphs([graph], ["0"], "node", [names], target, feature_names, relation_names)


def _text_column(table: pd.DataFrame, name: str, path: Path) -> list[str]:
    return as_text(require_present(table[name], path, _FILL), path).tolist()


def _edge_attributes(edges: pd.DataFrame, path: Path) -> tuple[Tensor | None, list[str] | None]:
    """Return types (M,) int64, or features (M, D) float64, with one-hot types among them if edges have both."""
    names = [name for name in edges.columns if name not in ("source", "target", "type")]
    columns = [as_numbers(require_present(edges[name], path, _FILL), path, _FILL).to_numpy() for name in names]
    features = torch.from_numpy(np.stack(columns, axis=1)) if columns else None
    if "type" not in edges:
        return features, None
    text = _text_column(edges, "type", path)
    types = sorted({*text}, key=numbers_first)
    number = torch.tensor([types.index(name) for name in text])
    return number if features is None else torch.cat([features, torch.eye(len(types)).double()[number]], dim=1), types


def _node_features(nodes: pd.DataFrame, path: Path, target: Sequence[str]) -> tuple[Tensor | None, list[str] | None]:
    """Return node features (n, F) float64 and their names."""
    columns: dict[str, np.ndarray] = {}
    for name in nodes.columns:
        if name in ("node", *target):
            continue
        column = require_present(nodes[name], path, _FILL)
        if holds_numbers(column, path, has_options=False):
            columns[name] = as_numbers(column, path, "Mend the value").to_numpy()
        else:
            text = as_text(column, path).to_numpy()
            columns |= {f"{name}={value}": (text == value).astype(np.float64) for value in sorted({*text})}
    return (torch.from_numpy(np.stack(list(columns.values()), axis=1)), list(columns)) if columns else (None, None)


def _read_graph6_lines(path: Path, layout: GraphLayout, with_target: bool) -> FileGraphs:
    if layout.level == "node":
        raise ValueError(f"{path} has no room for targets of nodes; write a .jsonl file, or leave level out")
    found = FileGraphs([], [], "graph")
    for where, line in lines_of(path, "a graph"):
        text, *target = line.removeprefix(">>graph6<<").split(maxsplit=1)
        if with_target and not target:
            raise ValueError(f"{where} has no target: write it after the graph and a blank{WITHOUT_TARGET}")
        found.graphs.append(read_graph6(text, where))
        found.target.append(list(target))
        found.ids.append(where.split()[1])
    found.lines = found.ids
    return found


def _read_json_lines(path: Path, layout: GraphLayout, with_target: bool) -> FileGraphs:
    """Read lines such as ``{"edges": [[0, 1], [1, 2]], "num_nodes": 3, "x": [[0.5], [1], [2]], "y": "ring"}``."""
    found = FileGraphs([], [], layout.level or "graph")
    num_nodes = 0  # sum over the graphs read so far
    for where, line in lines_of(path, "a graph"):
        entry = parse_object(line, where, '{"edges": [[0, 1]], "y": 0}')
        graph = _parse_graph(entry, where, (num_nodes, path))
        num_nodes += graph.num_nodes or 0
        found.graphs.append(graph)
        found.ids.append(str(entry.get("id", where.split()[1])))
        found.lines.append(where.split()[1])
        if with_target:
            found.target += _entry_targets(entry, layout, found.level, graph.num_nodes or 0, where)
        _reject_unknown_fields(entry, layout, where)
    require_distinct_ids(found.ids, found.lines, path)
    return found


def _reject_unknown_fields(entry: dict[str, Any], layout: GraphLayout, where: str) -> None:
    known = list(dict.fromkeys([*FIELDS, *layout.columns, "y"]))
    if unknown := [name for name in entry if name not in known]:
        raise ValueError(
            f"{where} has the field {shown(unknown[0])}, which would not be read{did_you_mean(unknown[0], known)} "
            f"Known ones are {', '.join(known)}; leave out the others, or name those that are targets in layout.target"
        )


def _parse_graph(entry: dict[str, Any], where: str, read: tuple[int, Path]) -> Data:
    """Make the graph of a line; ``read`` holds the number of nodes before it, and the file."""
    require_field(entry, "edges", where)
    edges = numbers_of(entry["edges"], "edges", where, whole=True)
    if edges.size and (edges.ndim != 2 or edges.shape[1] != 2):
        raise ValueError(
            f"'edges' in {where} must hold pairs of nodes, as [[0, 1], [1, 2]]; got {shown(entry['edges'])}"
        )
    edges = edges.reshape(-1, 2)
    x = None if entry.get("x") is None else numbers_of(entry["x"], "x", where)
    n = entry.get("num_nodes", len(x) if x is not None else int(edges.max(initial=-1)) + 1)
    if not isinstance(n, int) or isinstance(n, bool) or n < 0:
        raise ValueError(f"'num_nodes' in {where} must be a whole number; got {shown(n)}")
    what = f"the nodes up to {where}, of which that has {shown(n)}, at {_NODE_BYTES} bytes each,"
    require_allowed((read[0] + n) * _NODE_BYTES, read[1], what, "number the nodes from 0 without gaps")
    if edges.size and (edges.min() < 0 or edges.max() >= n):
        wrong = edges[(edges < 0).any(1) | (edges >= n).any(1)][0].tolist()
        known = f"num_nodes is {n}" if "num_nodes" in entry else f"x has {n} rows" if x is not None else f"it has {n}"
        raise ValueError(
            f"'edges' in {where} must join nodes 0 to {n - 1}, since {known} and nodes are numbered from 0; got {wrong}"
        )
    graph = Data(edge_index=torch.from_numpy(edges.astype(np.int64)).t().contiguous(), num_nodes=n)
    for name, values, rows in (("x", x, n), ("edge_attr", entry.get("edge_attr"), len(edges))):
        if values is not None:
            values = values if isinstance(values, np.ndarray) else numbers_of(values, name, where)
            if len(values) != rows:
                what = "nodes" if name == "x" else "edges"
                raise ValueError(
                    f"{name!r} in {where} must have an entry for each of its {rows} {what}; got {len(values)}"
                )
            graph[name] = _as_tensor(values, name)
    return graph


def _as_tensor(values: np.ndarray, name: str) -> Tensor:
    """Convert values to int64 types (M,) if they are one whole number per edge, else to float64 features."""
    if name == "edge_attr" and values.ndim == 1 and values.dtype.kind in "iu":
        return torch.from_numpy(values.astype(np.int64))
    values = values.astype(np.float64)
    return torch.from_numpy(values if values.ndim == 2 else values[:, None])


def _entry_targets(entry: dict[str, Any], layout: GraphLayout, level: Level, n: int, where: str) -> list[list[Any]]:
    for name in layout.columns:
        require_field(entry, name, where, is_target=True)
    values = [entry[name] for name in layout.columns]
    if level == "node":
        for name, value in zip(layout.columns, values, strict=True):
            if not isinstance(value, list) or len(value) != n:
                got = f"{len(value)} entries" if isinstance(value, list) else shown(value)
                raise ValueError(
                    f"{name!r} in {where} must be a list with an entry for each of its {n} nodes; got {got}"
                )
        return [_flatten(row) for row in zip(*values, strict=True)]
    return [_flatten(values)]


def _flatten(values: Sequence[Any]) -> list[Any]:
    """Flatten the lists among the values of several fields into one list of targets."""
    return [part for value in values for part in (value if isinstance(value, list) else [value])]


def read_graph6(text: str, where: str = "the text") -> Data:
    """Parse a graph in the graph6 format, as nauty and networkx write it.

    Source: McKay, https://users.cecs.anu.edu.au/~bdm/data/formats.txt

    Raises:
        ValueError: if the text is not graph6, or too short or too long for its number of nodes.

    >>> read_graph6("Bw").edge_index.tolist()
    [[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]]
    """
    codes = np.frombuffer(text.encode(), np.uint8) - np.uint8(63)  # codes below 63 wrap around to above 63
    if not len(codes) or codes.max() > 63:
        raise ValueError(f"{where} is no graph6, whose characters go from ? to ~; got {shown(text)}")
    lead = 1 if codes[0] < 63 else 4 if codes[1:2].tolist() != [63] else 8
    digits = codes[:lead].astype(np.int64) if lead == 1 else codes[lead // 4 : lead].astype(np.int64)
    n = int(digits @ 64 ** np.arange(len(digits))[::-1]) if len(codes) >= lead else 0
    needed = -(-(n * (n - 1) // 2) // 6) if len(codes) >= lead else 0
    if len(codes) < lead or len(codes) - lead != needed:
        raise ValueError(
            f"{where} must have {needed} characters after the number of nodes, {n}; got {max(0, len(codes) - lead)}"
        )
    bits = np.unpackbits(codes[lead:, None], axis=1)[:, 2:].ravel()[: n * (n - 1) // 2]
    place = np.flatnonzero(bits)  # index of a pair in the order of the format: 0 1, 0 2, 1 2, 0 3, ...
    column = ((1 + np.sqrt(1 + 8 * place)) / 2).astype(np.int64)  # exact: n is below 2**18 if all pairs are in memory
    edges = np.stack([place - column * (column - 1) // 2, column])
    both = np.concatenate([edges, edges[::-1]], axis=1)
    return Data(edge_index=torch.from_numpy(both[:, np.lexsort((both[1], both[0]))]), num_nodes=n)
