"""Doubts about graphs that are copies of training graphs, and of features that tell the target on their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_accel.data.digest import digest_of
from lightning_accel.data.graphs.splits import GraphSplits
from lightning_accel.data.quoting import listed
from lightning_accel.data.tables.column_checks import doubts_of_code
from lightning_accel.data.tables.leakage import FEWEST_COPIES, SMALLEST_SHARE, doubts_of_answers
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")

_DIFFERENT = "\0"  # name of a column of texts that tell which rows are no copies
_MOST_VALUES = 2_000_000  # of nodes and their features that are looked at


def doubts_of_graphs(splits: GraphSplits, names: Sequence[str] | None, path: str | Path) -> Iterator[str]:
    """Yield warnings of a file of graphs before transforms.

    Graphs without nodes are told; copies, if 5 % of the graphs that validate and test, and five or more, equal training
    graphs in all that the file holds, while most training graphs differ; features that tell the target on their own, as
    :func:`~lightning_accel.data.tables.leakage.doubts_of_answers` has it, which all nodes or edges of a graph share if
    graphs have targets; and features of nodes that are constant, or hold a code for missing values.

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
    found = [graph.x for graph in splits.graphs if graph.num_nodes and graph.get("x") is not None]
    if len({x.shape[1] for x in found}) != 1:
        return
    x = torch.cat(found)
    table = pd.DataFrame(
        x[: _MOST_VALUES // max(1, x.shape[1])].double().numpy(),
        columns=pd.Index(names or [f"x {number}" for number in range(x.shape[1])]),
    )
    constant = [name for name in table if table[name].nunique() == 1]
    if constant and len(constant) < len(table.columns):
        yield (
            f"features of nodes of {path} that hold one value everywhere: {listed(constant, 5)}. Models learn nothing "
            "from them; leave them out of the file"
        )
    for name in table.columns.difference(constant, sort=False):
        yield from doubts_of_code(table[name], path, "fill it, or leave those graphs or nodes out")


def _doubt_of_copies(splits: GraphSplits, path: str | Path) -> Iterator[str]:
    digests = np.array([_digest(graph) for graph in splits.graphs])
    held_out = np.concatenate([splits.val, splits.test])
    trained = digests[splits.train]
    count = int(np.isin(digests[held_out], trained).sum())
    if count < max(FEWEST_COPIES, SMALLEST_SHARE * len(held_out)) or 2 * len(np.unique(trained)) < len(trained):
        return
    yield (
        f"{count} of the {len(held_out)} graphs of {path} that validate and test ({count / len(held_out):.0%}) are "
        "copies of training graphs, equal in edges, features and target, so that metrics are in part those of graphs "
        "that the model has trained on. Unless they are separate samples, remove repeated graphs from the file"
    )


def _digest(graph: Data) -> str:
    tensors = [graph[name] for name in ("edge_index", "x", "edge_attr", "y") if graph.get(name) is not None]
    return digest_of(np.array(graph.num_nodes), *(tensor.numpy() for tensor in tensors))


def _doubts_of_features(splits: GraphSplits, names: Sequence[str] | None, path: str | Path) -> Iterator[str]:
    rows = torch.from_numpy(splits.train)
    graphs = splits.graphs if splits.of_nodes else [splits.graphs[i] for i in rows.tolist()]
    graphs = [graph for graph in graphs if graph.num_nodes]
    if not graphs or len({None if graph.x is None else graph.x.shape[1] for graph in graphs}) > 1:
        return
    y = torch.cat([graph.y for graph in graphs])
    if graphs[0].x is None or y.ndim > 1:
        return
    names = names or [f"x {number}" for number in range(graphs[0].x.shape[1])]
    if splits.level == "graph":
        x, different = torch.stack([_shared(graph.x) for graph in graphs]), [*map(_digest, graphs)]
        edges = [_of_edges(graph) for graph in graphs]
        if len({len(one) for one in edges}) == 1 and len(edges[0]):
            x = torch.cat([x, torch.stack(edges)], dim=1)
            names = [*names, *(f"edge_attr {number}" for number in range(len(edges[0])))]
    else:
        x = torch.cat([graph.x for graph in graphs])
        x, y = (x[rows], y[rows]) if splits.of_nodes else (x, y)
        different = [*map(str, range(len(x)))]  # nodes of equal features have other edges
    most = _MOST_VALUES // max(1, x.shape[1])
    table = _columns(x[:most], names)
    table[_DIFFERENT] = different[:most]
    is_quantity = splits.kind == "regression"
    yield from doubts_of_answers(table, y[:most].numpy(), path, is_quantity, "leave it out of the file")


def _of_edges(graph: Data) -> Tensor:
    """Return the features (D,) that all edges share, NaN where they differ; none without edges or their features."""
    values = graph.get("edge_attr")
    if values is None or not len(values):
        return torch.empty(0, dtype=torch.float64)
    return _shared(values.double().view(len(values), -1))


def _shared(x: Tensor) -> Tensor:
    """Return the features (F,) that all rows share, NaN where they differ."""
    x = x.double()
    return x[0].where((x == x[0]).all(0), torch.nan)


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
