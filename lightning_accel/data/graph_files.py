"""Readers of graphs from files. Shapes: R graphs, n nodes of a graph, M edges, F features, K targets."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_accel.data.bounds import MAX_BYTES, require_allowed
from lightning_accel.data.graph_tables import read_edge_list, read_graph_targets
from lightning_accel.data.graph_tasks import Level
from lightning_accel.data.quoting import listed, shown
from lightning_accel.data.tables import LARGEST
from lightning_accel.data.text_lines import holds_booleans, lines_of, parse_object

_NODE_BYTES = 64  # memory of a node without attributes: features, indices in batches, and their copies
_FIELDS = "edges", "num_nodes", "x", "edge_attr", "id"


@dataclass(frozen=True)
class GraphLayout:
    """Describe how files store graphs.

    Args:
        level: whether nodes or graphs have targets; None to infer it from the table with the target, else graphs.
        target: column or field of the target, or several with one number each.
        nodes_path: table of nodes that accompanies an edge list.
        graphs_path: table of graphs, with their targets.
        undirected: whether to add the reverse of each edge where the file lacks it.
        separator: separator of the fields of a CSV file.
        decimal: decimal mark of a CSV file.
        max_bytes: largest size of an unpacked compressed file, and of the file's nodes at 64 bytes each.
    """

    level: Level | None = None
    target: Sequence[str] = ("y",)
    nodes_path: Path | None = None
    graphs_path: Path | None = None
    undirected: bool = True
    separator: str = ","
    decimal: str = "."
    max_bytes: int = MAX_BYTES


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


def read_graphs(
    path: Path, layout: GraphLayout, with_target: bool = True, like: FileGraphs | None = None
) -> FileGraphs:
    """Read graphs from a file, by its suffix: ``.csv`` or ``.parquet``, ``.jsonl`` or ``.ndjson``, ``.g6``.

    Args:
        path: file of the edge list, or of the graphs.
        layout: how the files store graphs.
        with_target: whether targets are required.
        like: graphs read before, whose names of types and features are reused.

    Raises:
        ValueError: if the suffix is another, a file is empty, or its content does not match the layout; the message
            names the line or the row.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    match suffixes[-1:]:
        case [".csv" | ".parquet"]:
            found = _read_tables(path, layout, with_target, like)
        case [".jsonl" | ".ndjson"]:
            found = _read_json_lines(path, layout, with_target)
        case [".g6"]:
            found = _read_graph6_lines(path, layout, with_target)
        case _:
            raise ValueError(
                "need a .csv or .parquet file with an edge a row, a .jsonl file with a graph a line, or a .g6 file in "
                f"the graph6 format; got {path}"
            )
    if layout.undirected:
        for graph in found.graphs:
            add_reverse_edges(graph)
    return found


def add_reverse_edges(graph: Data) -> None:
    """Add the reverse of each edge that lacks it, with the same attributes, in place."""
    source, target = graph.edge_index
    n = graph.num_nodes or 0
    lacking = ~torch.isin(target * n + source, source * n + target)
    graph.edge_index = torch.cat([graph.edge_index, graph.edge_index[:, lacking].flip(0)], dim=1)
    if graph.edge_attr is not None:
        graph.edge_attr = torch.cat([graph.edge_attr, graph.edge_attr[lacking]])


def _read_tables(path: Path, layout: GraphLayout, with_target: bool, like: FileGraphs | None) -> FileGraphs:
    read = read_edge_list(
        path,
        layout.nodes_path,
        layout.separator,
        layout.decimal,
        list(layout.target),
        layout.max_bytes,
        None if like is None else (like.feature_names, like.relation_names),
    )
    in_nodes = read.node_target is not None
    level = layout.level or ("node" if in_nodes and layout.graphs_path is None else "graph")
    found = FileGraphs(read.graphs, read.ids, level, read.node_ids)
    found.feature_names, found.relation_names = read.feature_names, read.relation_names
    if not with_target:
        return found
    if level == "node":
        if read.node_target is None:
            where = (
                f"a table of nodes with the column {layout.target[0]!r}" if not layout.nodes_path else layout.nodes_path
            )
            raise ValueError(f"level node needs a target of each node: give {where} in nodes_path; {path} has none")
        found.target = read.node_target
    else:
        if layout.graphs_path is None:
            raise ValueError(
                f"{path} holds {len(read.ids)} graphs and no target of theirs: give a table with the columns graph and "
                f"{layout.target[0]} in graphs_path, or one of nodes with {layout.target[0]} in nodes_path"
            )
        named = layout.graphs_path, read.ids, layout.target, layout.separator, layout.decimal, layout.max_bytes
        found.target = read_graph_targets(*named, by_order=False, edges_path=path)
    return found


def _read_graph6_lines(path: Path, layout: GraphLayout, with_target: bool) -> FileGraphs:
    graphs, targets, places = [], [], []
    for where, line in lines_of(path, "a graph", layout.max_bytes):
        text, *rest = line.removeprefix(">>graph6<<").split(maxsplit=1)
        graphs.append(read_graph6(text, where))
        targets.append(rest)
        places.append(where)
    if layout.level == "node":
        raise ValueError(f"{path} has no room for targets of nodes; write a .jsonl file, or leave level out")
    numbers = [where.split()[1] for where in places]
    found = FileGraphs(graphs, numbers, "graph", lines=numbers)
    if with_target and layout.graphs_path is not None:
        found.target = read_graph_targets(
            layout.graphs_path,
            found.ids,
            layout.target,
            layout.separator,
            layout.decimal,
            layout.max_bytes,
            by_order=True,
        )
    elif with_target:
        for target, where in zip(targets, places, strict=True):
            if not target:
                raise ValueError(
                    f"{where} has no target: write it after the graph and a blank, or give a table with the column "
                    f"{layout.target[0]!r} and a row a graph in graphs_path"
                )
        found.target = [list(target) for target in targets]
    return found


def _read_json_lines(path: Path, layout: GraphLayout, with_target: bool) -> FileGraphs:
    """Read lines such as ``{"edges": [[0, 1], [1, 2]], "num_nodes": 3, "x": [[0.5], [1], [2]], "y": "ring"}``."""
    found = FileGraphs([], [], layout.level or "graph")
    num_nodes = 0  # sum over the graphs read so far
    for where, line in lines_of(path, "a graph", layout.max_bytes):
        entry = parse_object(line, where, '{"edges": [[0, 1]], "y": 0}')
        graph = _parse_graph(entry, where, (num_nodes, path, layout.max_bytes))
        num_nodes += graph.num_nodes or 0
        found.graphs.append(graph)
        found.ids.append(str(entry.get("id", where.split()[1])))
        found.lines.append(where.split()[1])
        if with_target and layout.graphs_path is None:
            found.target += _entry_targets(entry, layout, found.level, graph.num_nodes or 0, where)
        _reject_unknown_fields(entry, layout, where)
    if with_target and layout.graphs_path is not None:
        named = layout.graphs_path, found.ids, layout.target, layout.separator, layout.decimal, layout.max_bytes
        found.target = read_graph_targets(*named, by_order=False)
    if twice := pd.Series(found.ids)[pd.Series(found.ids).duplicated()].tolist():
        lines = [line for name, line in zip(found.ids, found.lines, strict=True) if name == twice[0]]
        raise ValueError(
            f"{path} has two lines with id {shown(twice[0])}, {' and '.join(lines[:2])}, where a line without "
            f"a field 'id' "
            "has its number; give each graph its own"
        )
    return found


def _reject_unknown_fields(entry: dict[str, Any], layout: GraphLayout, where: str) -> None:
    known = list(dict.fromkeys([*_FIELDS, *layout.target, "y"]))
    if unknown := [name for name in entry if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"{where} has the field {shown(unknown[0])}, which would not be read{hint} Known ones are "
            f"{', '.join(known)}; "
            "leave out the others, or name a target in target"
        )


def _parse_graph(entry: dict[str, Any], where: str, read: tuple[int, Path, int]) -> Data:
    """Make the graph of a line; ``read`` holds the number of nodes before it, the file and its ``max_bytes``."""
    if "edges" not in entry:
        raise ValueError(f"{where} has no field 'edges', a list of pairs of nodes. Its fields: {listed(list(entry))}")
    edges = _number_list(entry["edges"], "edges", where, whole=True)
    if edges.size and (edges.ndim != 2 or edges.shape[1] != 2):
        raise ValueError(
            f"'edges' in {where} must hold pairs of nodes, as [[0, 1], [1, 2]]; got {shown(entry['edges'])}"
        )
    edges = edges.reshape(-1, 2)
    x = None if entry.get("x") is None else _number_list(entry["x"], "x", where)
    n = entry.get("num_nodes", len(x) if x is not None else int(edges.max(initial=-1)) + 1)
    if not isinstance(n, int) or isinstance(n, bool) or n < 0:
        raise ValueError(f"'num_nodes' in {where} must be a whole number; got {shown(n)}")
    what = f"the nodes up to {where}, of which that has {shown(n)}, at {_NODE_BYTES} bytes each,"
    require_allowed((read[0] + n) * _NODE_BYTES, read[1], read[2], what)
    if edges.size and (edges.min() < 0 or edges.max() >= n):
        wrong = edges[(edges < 0).any(1) | (edges >= n).any(1)][0].tolist()
        raise ValueError(f"'edges' in {where} must join nodes 0 to {n - 1}, since it has {n}; got {wrong}")
    graph = Data(edge_index=torch.from_numpy(edges.astype(np.int64)).t().contiguous(), num_nodes=n)
    for name, values, rows in (("x", x, n), ("edge_attr", entry.get("edge_attr"), len(edges))):
        if values is not None:
            values = values if isinstance(values, np.ndarray) else _number_list(values, name, where)
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
    for name in layout.target:
        if name not in entry:
            left = [key for key in entry if key not in _FIELDS]
            raise ValueError(f"{where} has no field {name!r}, the target. Its other fields: {listed(left) or 'none'}")
    values = [entry[name] for name in layout.target]
    if level == "node":
        for name, value in zip(layout.target, values, strict=True):
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


def _number_list(found: Any, name: str, where: str, whole: bool = False) -> np.ndarray:
    """Convert a list of numbers, or of equally long lists of numbers, to an array.

    Raises:
        ValueError: if it is something else, or holds booleans, fractions where ``whole``, or numbers beyond 1e30.
    """
    if isinstance(found, list) and holds_booleans(found):
        raise ValueError(f"{name!r} in {where} must be a list of numbers; got booleans among them")
    kinds = "iu" if whole else "biuf"
    what = "whole numbers" if whole else "numbers"
    try:
        values = np.array(found) if isinstance(found, list) else np.array(None)
    except (ValueError, OverflowError):
        values = np.array(None)
    if values.size == 0:
        return np.zeros((len(values), *values.shape[1:]), np.int64)
    if values.dtype.kind not in kinds or values.ndim > 2 or not (np.abs(values.astype(np.float64)) <= LARGEST).all():
        raise ValueError(
            f"{name!r} in {where} must be a list of {what}, or of equally long lists of them; "
            f"{_describe_mismatch(found)}"
        )
    return values


def _describe_mismatch(found: Any) -> str:
    """Describe, for a message, the first entry that is no number or is not as long as the first one."""
    if not isinstance(found, list):
        return f"got {shown(found)}"
    widths = [len(entry) if isinstance(entry, list) else None for entry in found]
    for number, entry in enumerate(found):
        if widths[number] != widths[0]:
            return f"entry {number}, counted from 0, is {shown(entry)} and the first one {shown(found[0])}"
        inner = entry if isinstance(entry, list) else [entry]
        if wrong := [part for part in inner if not isinstance(part, int | float) or not abs(part) <= LARGEST]:
            return f"got {shown(wrong[0])} in entry {number}, counted from 0"
    return f"got {shown(found)}"


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
