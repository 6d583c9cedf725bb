"""Doubts about graphs that are copies of training graphs, and of features that tell the target on their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_accel.data.graphs.splits import GraphSplits
from lightning_accel.data.quoting import listed
from lightning_accel.data.tables.column_checks import doubts_of_code
from lightning_accel.data.tables.leakage import doubts_of_answers, doubts_of_equal
from lightning_accel.ops.extras import import_on_use
from lightning_accel.ops.hashes import hash_neighbours, hash_rows, join_hashes, mix_bits

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")

_DIFFERENT = "\0"  # name of a column of texts that tell which rows are no copies
_LAYERS = 3  # of message passing that tell graphs apart
_MOST_VALUES = 2_000_000  # of nodes and their features that are looked at


def doubts_of_graphs(splits: GraphSplits, names: Sequence[str] | None, path: str | Path) -> Iterator[str]:
    """Yield warnings of a file of graphs before transforms.

    Graphs without nodes are told; copies, if 5 % of the graphs that validate and test, and five or more, equal training
    graphs in all that the file holds, up to the order of nodes and edges, and to what three layers of message passing
    cannot tell apart, while most training graphs differ; features that tell the target on their own, as
    :func:`~lightning_accel.data.tables.leakage.doubts_of_answers` has it, or whose means over the nodes or edges of a
    graph do; and features of nodes and edges that are constant, or hold a code for missing values.

    Args:
        splits: the graphs and their targets.
        names: names of the features, if the file has any.
        path: the file, for messages.
    """
    if empty := sum(not graph.num_nodes for graph in splits.graphs):
        yield (
            f"{empty} of {len(splits.graphs)} graphs of {path} have no nodes, so that they all get one prediction; "
            "leave them out, unless that is meant"
        )
    if not splits.of_nodes:
        yield from _doubt_of_copies(splits, path)
    yield from _doubts_of_features(splits, names, path)
    yield from _doubts_of_values(splits, names, path)


def _doubts_of_values(splits: GraphSplits, names: Sequence[str] | None, path: str | Path) -> Iterator[str]:
    for key, what in ("x", "nodes"), ("edge_attr", "edges"):
        found = [graph[key] for graph in splits.graphs if graph.get(key) is not None and len(graph[key])]
        found = [*map(_rows, found)]
        if len({values.shape[1] for values in found}) != 1 or not found[0].is_floating_point():  # types of edges
            continue
        values = torch.cat(found)
        table = pd.DataFrame(
            values[: _MOST_VALUES // max(1, values.shape[1])].double().numpy(),
            columns=pd.Index((names if key == "x" else None) or _numbered(key, values.shape[1])),
        )
        constant = [name for name in table if table[name].nunique() == 1]
        if constant and len(constant) < len(table.columns):
            yield (
                f"features of {what} of {path} that hold one value everywhere: {listed(constant, 5)}. Models learn "
                "nothing from them; leave them out of the file"
            )
        for name in table.columns.difference(constant, sort=False):
            yield from doubts_of_code(table[name], path, f"fill it, or leave those graphs or {what} out")


def _numbered(key: str, count: int) -> list[str]:
    return [f"{key} {number}" for number in range(count)]


def _doubt_of_copies(splits: GraphSplits, path: str | Path) -> Iterator[str]:
    hashes = _hashes_of(splits.graphs, splits.level)
    held_out = np.concatenate([splits.val, splits.test])
    parts = "edges, features and target, in whatever order nodes and edges are"
    yield from doubts_of_equal(hashes, splits.train, held_out, "graphs", path, parts)


def _hashes_of(graphs: Sequence[Data], level: str) -> np.ndarray:
    """Return hashes of graphs and their targets; all orders of nodes share one, and graphs that layers confuse."""
    sizes = torch.tensor([graph.num_nodes or 0 for graph in graphs])
    owner = torch.arange(len(graphs)).repeat_interleave(sizes)
    first = sizes.cumsum(0) - sizes
    edges = torch.cat([graph.edge_index + begin for graph, begin in zip(graphs, first, strict=True)], dim=1)
    arcs = _hash_parts([graph.get("edge_attr") for graph in graphs])
    targets = _hash_parts([graph.y for graph in graphs])
    colour = _hash_parts([graph.x for graph in graphs])
    if colour is None:
        colour = torch.zeros(len(owner), dtype=torch.int64)
    if level == "node" and targets is not None:
        colour = join_hashes(colour, targets)
    for _ in range(_LAYERS):
        colour = join_hashes(colour, hash_neighbours(colour, edges, arcs))
    hashes = torch.zeros(len(graphs), dtype=torch.int64).index_add(0, owner, mix_bits(colour))
    hashes = join_hashes(hashes, targets) if level == "graph" and targets is not None else hashes
    return hashes.numpy()


def _hash_parts(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the hashes of the rows of all graphs, if each has some."""
    tensors = [part for part in parts if part is not None]
    if len(tensors) < len(parts):
        return None
    if len({part.shape[1:] for part in tensors}) > 1:
        return torch.cat([*map(hash_rows, tensors)])
    return hash_rows(torch.cat(tensors))


def _doubts_of_features(splits: GraphSplits, names: Sequence[str] | None, path: str | Path) -> Iterator[str]:
    rows = torch.from_numpy(splits.train)
    graphs = splits.graphs if splits.of_nodes else [splits.graphs[i] for i in rows.tolist()]
    graphs = [graph for graph in graphs if graph.num_nodes]
    if not graphs or len({None if graph.x is None else graph.x.shape[1] for graph in graphs}) > 1:
        return
    y = torch.cat([graph.y for graph in graphs])
    if y.ndim > 1 or (graphs[0].x is None and splits.level == "node"):
        return
    names = list(names or _numbered("x", 0 if graphs[0].x is None else graphs[0].x.shape[1]))
    if splits.level == "graph":
        different = [*map(str, _hashes_of(graphs, splits.level))]
        x = torch.stack([torch.empty(0) if graph.x is None else _mean_of(graph.x) for graph in graphs])
        edges = [_of_edges(graph) for graph in graphs]
        widths = {len(one) for one in edges if len(one)}
        if len(widths) == 1:
            (width,) = widths
            nothing = torch.full([width], torch.nan, dtype=torch.float64)
            x = torch.cat([x, torch.stack([one if len(one) else nothing for one in edges])], dim=1)
            names = [*names, *_numbered("edge_attr", width)]
        if not names:
            return
    else:
        x = torch.cat([graph.x for graph in graphs])
        x, y = (x[rows], y[rows]) if splits.of_nodes else (x, y)
        different = [*map(str, range(len(x)))]  # nodes of equal features have other edges
    most = _MOST_VALUES // max(1, x.shape[1])
    table = _columns(x[:most], names)
    table[_DIFFERENT] = different[:most]
    first = np.flatnonzero(~table[_DIFFERENT].duplicated())  # means of copies may differ by rounding
    table, y = table.iloc[first], y[torch.from_numpy(first)]
    is_quantity = splits.kind == "regression"
    remedy = "leave it out of the file"
    yield from doubts_of_answers(table, y.numpy(), path, is_quantity, remedy, missing_tells=False)


def _of_edges(graph: Data) -> Tensor:
    """Return the features (D,) that all edges share, or their means; none without edges or their features."""
    values = graph.get("edge_attr")
    if values is None or not len(values):
        return torch.empty(0, dtype=torch.float64)
    return _mean_of(_rows(values))


def _rows(values: Tensor) -> Tensor:
    """Return features of nodes or edges as (rows, features)."""
    return values[:, None] if values.ndim == 1 else values.flatten(1)


def _mean_of(x: Tensor) -> Tensor:
    """Return the features (F,) that all rows share, means where they differ."""
    x = x.double()
    return x[0].where((x == x[0]).all(0), x.mean(0))


def _columns(x: Tensor, names: Sequence[str]) -> pd.DataFrame:
    """Return features (rows, F) by name, and one-hot encoded ones, named ``kind=a`` and so on, as texts of ``kind``."""
    values = x.double().numpy()
    of_kind: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        of_kind.setdefault(name.partition("=")[0] if "=" in name else name, []).append(place)
    columns: dict[str, np.ndarray] = {}
    for kind, places in of_kind.items():
        texts = np.array([names[place] for place in places], dtype=object)
        columns[kind] = texts[values[:, places].argmax(1)] if "=" in texts[0] else values[:, places[0]]
    return pd.DataFrame(columns)
