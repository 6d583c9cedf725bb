"""Graphs that are larger than memory, a row each.

Shapes: B graphs of a table, N nodes, M edges, F and D features of nodes and edges, K targets.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from lightning_accel.data.graphs.features import Scale
from lightning_accel.data.graphs.files import FIELDS, add_reverse_edges
from lightning_accel.data.graphs.options import GraphLayout
from lightning_accel.data.quoting import did_you_mean, shown
from lightning_accel.data.sequences.columns import lists_of_column, steps_of_column
from lightning_accel.data.shards.blocks import Blocks, find_blocks
from lightning_accel.data.shards.moments import Moments
from lightning_accel.data.shards.reader import ReadOptions
from lightning_accel.data.shards.splits import Split, split_blocks
from lightning_accel.data.tables.columns import (
    codes_of_column,
    quantities_of_column,
    require_classes,
    texts_of_column,
)
from lightning_accel.data.tables.targets import SET_REGRESSION
from lightning_accel.data.tables.values import LARGEST
from lightning_accel.data.whole_files import kept_json
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = import_on_use("pyarrow")


@dataclass
class GraphStatistics:
    """Hold what describes and encodes graphs: statistics over those that train.

    Args:
        num_features: F.
        has_x: whether nodes have features; else they get a single constant 1.
        edge_dim: D; None unless edges have features.
        num_relations: number of edge types; None unless each edge has one type.
        scales: mean and standard deviation of the columns of ``x`` and ``edge_attr``, 0 and 1 of those to be kept.
        classes: names of the classes, sorted; None unless targets are classes.
        target_mean: (K,) of the targets; None unless they are numbers.
        target_std: (K,), 1 for constant targets.
    """

    num_features: int = 1
    has_x: bool = False
    edge_dim: int | None = None
    num_relations: int | None = None
    scales: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    classes: list[str] | None = None
    target_mean: list[float] | None = None
    target_std: list[float] | None = None


class ShardedGraphs:
    """Hold graphs that are spread over files, a row each, their splits, and their statistics.

    Args:
        location: folder, pattern or URL.
        layout: where targets are, and how files are read.
        shares: shares of the blocks that validate and test, see :func:`split_blocks`.
        seed: seed of the split.

    Raises:
        FileNotFoundError: if there are no files.
        ValueError: if files or columns are not as needed.
    """

    def __init__(self, location: str | Path, layout: GraphLayout, shares: tuple[float, float], seed: int) -> None:
        self.location = location
        self.layout = layout
        self._cache = Path(layout.shards.cache_dir).expanduser()
        blocks = find_blocks(location, self._cache)
        blocks.require_columns(["edges", *layout.columns], layout.columns)
        known = dict.fromkeys([*FIELDS, *layout.columns, "y"])
        if unknown := [name for name in blocks.schema.names if name not in known]:
            raise ValueError(
                f"{location} has the column {shown(unknown[0])}, which would not be read"
                f"{did_you_mean(unknown[0], known)} Known ones are {', '.join(known)}; leave out the others, or name a "
                "target in layout.target"
            )
        splits = split_blocks(blocks, shares, seed, location)
        target = layout.level, layout.target_kind, layout.columns
        made_of = blocks.digest(), blocks.files.versions, target, splits["train"].tolist()
        found = kept_json(self._cache, made_of, lambda: asdict(_collect(blocks, splits["train"], layout)))
        self.statistics = GraphStatistics(**found)
        self.splits: dict[Split, Blocks] = {split: blocks.select(chosen) for split, chosen in splits.items()}
        self.digest = blocks.digest()

    def reading(self, with_target: bool = True) -> ReadOptions:
        """Return what is read of blocks, and how batches are made of it."""
        names = self.splits["train"].schema.names
        columns = [name for name in ("edges", "num_nodes", "x", "edge_attr") if name in names]
        encoder = GraphEncoder(self.statistics, self.layout, with_target, str(self.location))
        return ReadOptions([*columns, *(self.layout.columns if with_target else ())], encoder)

    def to_predict(self, location: str | Path) -> Blocks:
        """Return the blocks of other files with graphs."""
        blocks = find_blocks(location, self._cache)
        blocks.require_columns(["edges", *(["x"] if self.statistics.has_x else [])])
        return blocks

    def ids(self, blocks: Blocks) -> list[str]:
        """Return the names of the graphs of blocks, their numbers if they have none; or of their nodes."""
        names = [str(row) for row in range(blocks.num_rows)]
        if "id" in blocks.schema.names:
            names = [str(one) for block in range(len(blocks)) for one in blocks.read(block, ["id"])["id"].to_pylist()]
        if self.layout.level != "node":
            return names
        columns = [name for name in ("edges", "num_nodes", "x") if name in blocks.schema.names]
        read = [_structure(blocks.read(block, columns), blocks.name_of(block)) for block in range(len(blocks))]
        sizes = np.concatenate([one.num_nodes for one in read]).tolist()
        return [f"{name}:{node}" for name, size in zip(names, sizes, strict=True) for node in range(size)]


class GraphEncoder:
    """Make a :class:`torch_geometric.data.Batch` of a table with a graph a row."""

    def __init__(self, statistics: GraphStatistics, layout: GraphLayout, with_target: bool, where: str) -> None:
        self.statistics = statistics
        self.layout = layout
        self.with_target = with_target
        self.where = where
        self._numbers = {name: number for number, name in enumerate(statistics.classes or [])}

    def __call__(self, table: pa.Table) -> Batch:
        found = _structure(table, self.where)
        sizes = torch.from_numpy(found.num_nodes)
        starts = sizes.cumsum(0) - sizes
        of_edges = torch.from_numpy(np.repeat(starts.numpy(), found.num_edges))
        graph = Data(edge_index=torch.from_numpy(found.edges).t() + of_edges, num_nodes=int(sizes.sum()))
        graph.x = self._encoded(found.x, "x", self.statistics.num_features) if self.statistics.has_x else None
        if self.statistics.num_relations is not None:
            graph.edge_attr = self._types(found.edge_attr)
        elif self.statistics.edge_dim is not None:
            graph.edge_attr = self._encoded(found.edge_attr, "edge_attr", self.statistics.edge_dim)
        add_reverse_edges(graph)
        batch = Batch(
            x=torch.ones(int(sizes.sum()), 1) if graph.x is None else graph.x,
            edge_index=graph.edge_index,
            batch=torch.repeat_interleave(torch.arange(len(sizes)), sizes),
            ptr=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
        )
        if graph.edge_attr is not None:
            batch.edge_attr = graph.edge_attr
        if self.with_target:
            batch.y = self._target(table, found.num_nodes)
        if self.layout.level == "node":
            batch.target_index = torch.arange(int(sizes.sum()))
        return batch

    def _target(self, table: pa.Table, num_nodes: np.ndarray) -> Tensor:
        if self._numbers:
            [column] = _target_columns(table, self.layout, num_nodes, self.where)
            return torch.from_numpy(codes_of_column(column, self._numbers))
        target = torch.tensor(_quantities(table, self.layout, num_nodes, self.where), dtype=torch.float32)
        return target[:, 0] if target.shape[1] == 1 else target

    def _encoded(self, values: np.ndarray | None, name: str, width: int) -> Tensor:
        if values is None or values.ndim != 2 or (len(values) and values.shape[1] != width):
            got = "none" if values is None else "types" if values.ndim == 1 else str(values.shape[1])
            raise ValueError(f"{name} of {self.where} must have the {width} features of the training graphs; got {got}")
        mean, std = (torch.tensor(part, dtype=torch.float64) for part in self.statistics.scales[name])
        return Scale(mean, std)(torch.tensor(values.reshape(-1, width)))

    def _types(self, values: np.ndarray | None) -> Tensor:
        most = self.statistics.num_relations or 0
        if values is None or values.ndim != 1 or (len(values) and values.max() >= most):
            raise ValueError(f"edge_attr of {self.where} must hold a whole number from 0 to {most - 1} for each edge")
        return torch.tensor(values)


@dataclass
class _Structure:
    """Hold the graphs of a table, one after the other, before they are encoded."""

    num_nodes: np.ndarray  # (B,) int64
    num_edges: np.ndarray  # (B,) int64
    edges: np.ndarray  # (M, 2) int64, nodes of each graph from 0
    x: np.ndarray | None  # (N, F) float64
    edge_attr: np.ndarray | None  # (M, D) float64, or (M,) int64 types


def _structure(table: pa.Table, where: str) -> _Structure:
    """Return the graphs of a table.

    Raises:
        ValueError: if numbers of nodes, edges and features do not match, or an edge names a node that is not there.
    """
    found, num_edges = steps_of_column(table["edges"], "edges", where)
    if len(found) and found.shape[1] != 2:
        raise ValueError(f"'edges' of {where} must hold pairs of nodes, as [[0, 1], [1, 2]]")
    edges = found.reshape(-1, 2).astype(np.int64)
    of = np.repeat(np.arange(len(num_edges)), num_edges)
    x, num_nodes = _optional(table, "x", where)
    if num_nodes is None:
        num_nodes = np.zeros(len(num_edges), np.int64)
        np.maximum.at(num_nodes, of, edges.max(axis=1, initial=-1) + 1)
    if "num_nodes" in table.column_names:
        given = table["num_nodes"].cast(pa.float64()).to_numpy()
        given = np.where(np.isnan(given), num_nodes, given).astype(np.int64)
        _require_rows(num_nodes if x is not None else given, given, "x", "nodes", where)
        num_nodes = given
    edge_attr, of_attr = _optional(table, "edge_attr", where)
    if of_attr is not None:
        _require_rows(of_attr, num_edges, "edge_attr", "edges", where)
    wrong = ((edges < 0) | (edges >= num_nodes[of][:, None]) | (edges != found.reshape(-1, 2))).any(axis=1)
    if wrong.any():
        row = of[wrong.argmax()]
        counted = next((name for name in ("num_nodes", "x") if name in table.column_names), "edges")
        raise ValueError(
            f"'edges' of {where} must join nodes 0 to {num_nodes[row] - 1}, numbered from 0, as row {row} (from 0) "
            f"of it has {num_nodes[row]} by its {counted}; got {found[wrong.argmax()].tolist()}"
        )
    return _Structure(num_nodes, num_edges, edges, x, edge_attr)


def _optional(table: pa.Table, name: str, where: str) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return values of nodes or edges, and of how many each row has them; types (M,) int64 if they are whole numbers.

    None for both if there is no such column, or nothing in it.
    """
    if name not in table.column_names or table[name].null_count == len(table[name]):
        return None, None
    values, lengths = steps_of_column(table[name], name, where)
    kind = table[name].type
    if name == "edge_attr" and pa.types.is_integer(kind.value_type):
        values = values[:, 0].astype(np.int64)
        if len(values) and values.min() < 0:
            raise ValueError(f"'edge_attr' of {where} holds the type {values.min()}; 0 or more")
    elif not (np.abs(values) <= LARGEST).all():
        raise ValueError(f"{name!r} of {where} must hold numbers of at most {LARGEST:g}")
    return values, lengths


def _require_rows(found: np.ndarray, needed: np.ndarray, name: str, what: str, where: str) -> None:
    if (found != needed).any():
        row = int((found != needed).argmax())
        raise ValueError(
            f"{name!r} of {where} must have an entry for each of the {needed[row]} {what} of its row {row} (from 0); "
            f"got {found[row]}"
        )


def _target_columns(table: pa.Table, layout: GraphLayout, num_nodes: np.ndarray, where: str) -> list[pa.ChunkedArray]:
    """Return the columns of the targets, with an entry for each graph, or for each node."""
    columns = [table[name] for name in layout.columns]
    if layout.level != "node":
        return columns
    flat = []
    for name, column in zip(layout.columns, columns, strict=True):
        array, lengths = lists_of_column(column, name, where)
        _require_rows(lengths, num_nodes, name, "nodes", where)
        flat.append(pa.chunked_array([array.flatten()]))
    return flat


def _quantities(table: pa.Table, layout: GraphLayout, num_nodes: np.ndarray, where: str) -> np.ndarray:
    """Return targets (B, K) or (N, K) float64."""
    columns = _target_columns(table, layout, num_nodes, where)
    parts = [quantities_of_column(one, name, where) for one, name in zip(columns, layout.columns, strict=True)]
    return np.concatenate(parts, axis=1)


@dataclass
class _Columns:
    """Hold moments of the columns of some values, and whether they hold zeros and ones alone."""

    moments: Moments = field(default_factory=Moments)
    flags: np.ndarray = field(default_factory=lambda: np.ones(1, bool))

    @classmethod
    def of(cls, values: np.ndarray) -> _Columns:
        return cls(Moments.of(values), ((values == 0) | (values == 1)).all(axis=0))

    def add(self, other: _Columns) -> None:
        if other.moments.count:
            self.moments.add(other.moments)
            self.flags = self.flags & other.flags

    def scale(self) -> tuple[list[float], list[float]]:
        """Return means and standard deviations as :func:`lightning_accel.data.graphs.features.fit_scale` does."""
        mean, std = self.moments.mean, np.sqrt(self.moments.deviation / max(1, self.moments.count))
        stays = self.flags | (std <= 1e-12 * np.maximum(np.abs(mean), 1))
        return np.where(stays, 0.0, mean).tolist(), np.where(stays, 1.0, std).tolist()


@dataclass
class _Found:
    """Hold the statistics of a block."""

    x: _Columns | None = None
    edge_attr: _Columns | None = None
    largest_type: int = -1
    classes: set[str] = field(default_factory=set)
    target: Moments | None = None


def _collect(blocks: Blocks, train: np.ndarray, layout: GraphLayout) -> GraphStatistics:
    """Read all blocks once, with threads, and return the statistics of those that ``train``."""
    classes: tuple[set[str], set[str]] = set(), set()
    x, edge_attr, target, largest = _Columns(), _Columns(), Moments(), -1
    of_training = np.isin(np.arange(len(blocks)), train).tolist()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for trains, found in zip(
            of_training, pool.map(partial(_of_block, blocks, layout), range(len(blocks))), strict=True
        ):
            classes[trains].update(found.classes)
            largest = max(largest, found.largest_type)
            for whole, part in ((x, found.x), (edge_attr, found.edge_attr), (target, found.target)):
                if trains and part is not None:
                    whole.add(part)  # type: ignore[arg-type]  # pairs of one type
    statistics = GraphStatistics()
    if x.moments.count:
        statistics.num_features, statistics.has_x = len(x.moments.mean), True
        statistics.scales["x"] = x.scale()
    if edge_attr.moments.count:
        statistics.edge_dim = len(edge_attr.moments.mean)
        statistics.scales["edge_attr"] = edge_attr.scale()
    elif largest >= 0:
        statistics.num_relations = largest + 1
    if layout.target_kind == "regression":
        statistics.target_mean, statistics.target_std = target.mean.tolist(), target.std.tolist()
        return statistics
    where = f"the target {shown(layout.columns[0])} of {blocks.files.root}"
    statistics.classes = require_classes(*classes, where, SET_REGRESSION)
    return statistics


def _of_block(blocks: Blocks, layout: GraphLayout, block: int) -> _Found:
    where = blocks.name_of(block)
    columns = [name for name in ("edges", "num_nodes", "x", "edge_attr") if name in blocks.schema.names]
    table = blocks.read(block, [*columns, *layout.columns])
    structure = _structure(table, where)
    found = _Found()
    if structure.x is not None:
        found.x = _Columns.of(structure.x)
    if structure.edge_attr is not None and structure.edge_attr.ndim == 1:
        found.largest_type = int(structure.edge_attr.max(initial=-1))
    elif structure.edge_attr is not None:
        found.edge_attr = _Columns.of(structure.edge_attr)
    if layout.target_kind == "regression":
        found.target = Moments.of(_quantities(table, layout, structure.num_nodes, where))
        return found
    if len(layout.columns) > 1:
        raise ValueError(
            f"a class of each is one value; layout.target names {', '.join(layout.columns)}. Set layout.target_kind to "
            "regression, or name one"
        )
    [column] = _target_columns(table, layout, structure.num_nodes, where)
    codes, names = texts_of_column(column)
    if (codes < 0).any():
        raise ValueError(f"column {shown(layout.columns[0])} of {where} lacks {int((codes < 0).sum())} classes")
    found.classes = {*names}
    return found
