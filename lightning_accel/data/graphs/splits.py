"""Splits of graphs, or of the nodes of one graph, for training, validation and test. Shapes: F features, K targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data

from lightning_accel.data.digest import digest_of
from lightning_accel.data.graphs.dataset import has_target
from lightning_accel.data.graphs.files import FileGraphs
from lightning_accel.data.graphs.tasks import (
    Family,
    Level,
    TargetKind,
    csl_fold,
    csl_graphs,
    karate_club,
    substructure_set,
)
from lightning_accel.data.quoting import told_classes
from lightning_accel.data.sequences.batch import IGNORED
from lightning_accel.data.splits import split_in_three, split_rows
from lightning_accel.data.tables.targets import SET_REGRESSION, read_classes, read_known_classes
from lightning_accel.data.tables.values import as_numbers
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")

TaskName = Literal["csl", "substructures", "karate"]

_MASKS = ("train_mask", "val_mask", "test_mask")


@dataclass
class GraphSplits:
    """Hold graphs and the indices of those that train, validate and test, or of the nodes of a single graph."""

    graphs: list[Data]
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray
    level: Level
    kind: TargetKind
    of_nodes: bool = False  # whether the indices are of nodes
    class_names: list[str] | None = None
    target_names: list[str] | None = None
    ids: list[str] = field(default_factory=list)  # one for each graph
    node_ids: list[list[str]] = field(default_factory=list)  # for each graph, those of its nodes; empty for 0, 1, ...

    def training_nodes(self) -> Tensor:
        """Return features (nodes, F) of the training nodes, or of all nodes of the training graphs."""
        if self.of_nodes:
            return self.graphs[0].x[torch.from_numpy(self.train)]
        return torch.cat([self.graphs[i].x for i in self.train.tolist()])

    def training_edges(self) -> Tensor:
        """Return features (edges, D) of edges that end at training nodes, or of all edges of the training graphs."""
        if self.of_nodes:
            return self.graphs[0].edge_attr[torch.isin(self.graphs[0].edge_index[1], torch.from_numpy(self.train))]
        return torch.cat([self.graphs[i].edge_attr for i in self.train.tolist()])

    def training_targets(self) -> Tensor:
        """Return the targets of the training graphs or nodes, (items, K) float64, NaN where one is unknown."""
        y = self._targets(self.train)
        y = y.double().view(len(y), -1)
        return y.where(y.isfinite(), torch.nan)

    def _targets(self, part: np.ndarray) -> Tensor:
        if self.of_nodes:
            y: Tensor = self.graphs[0].y[torch.from_numpy(part)]
            return y
        return torch.cat([self.graphs[i].y for i in part.tolist()])

    def targets_of_test(self, names: Sequence[str]) -> pd.DataFrame:
        """Return the targets of the test graphs, by ``names``; classes by their own, missing ones as None or NaN."""
        if not len(self.test):
            return pd.DataFrame()
        targets = self._targets(self.test)
        if self.class_names is not None:
            known = [None if number < 0 else self.class_names[number] for number in targets.tolist()]
            return pd.DataFrame({names[0]: known})
        values = targets.view(len(targets), -1).numpy()
        count = values.shape[1]
        return pd.DataFrame(values, columns=[*names] if len(names) == count else [f"y_{i}" for i in range(count)])

    def describe(self) -> str:
        """Return how targets are read, and how many graphs or nodes train, validate and test."""
        values = self.training_targets()
        if self.class_names is not None:
            train, val = (self._targets(part).numpy() if len(part) else None for part in (self.train, self.val))
            target = f"target of {told_classes(self.class_names, train, val)}"
        elif self.kind == "multilabel" or values.shape[1] > 1:
            target = f"target of {values.shape[1]} {'labels' if self.kind == 'multilabel' else 'numbers'}"
        else:
            mean, std = values.nanmean(), (values - values.nanmean()).square().nanmean().sqrt()
            target = f"target, a quantity of mean {mean:.4g} and standard deviation {std:.4g}"
        sizes = "{:,} {} train, {:,} validate, {:,} test"
        kind = "nodes" if self.of_nodes else "graphs"
        return f"{target}; {sizes.format(len(self.train), kind, len(self.val), len(self.test))}"

    def digest(self, source: Sequence[object] | None) -> str:
        """Digest the training and validation data: their targets, and all other tensors before a transform.

        Args:
            source: the graphs before transforms, which may be random; None where only the edges afterwards are known.
        """
        fitted = np.concatenate([self.train, self.val])
        parts = [self.train, self.val]
        for i in [0] if self.of_nodes else fitted.tolist():
            graph, given = self.graphs[i], None if source is None else source[i]
            parts.append(_as_array(graph.y[torch.from_numpy(fitted)] if self.of_nodes else graph.y))
            parts += _tensors_of(given) if isinstance(given, Data) else [_as_array(graph.edge_index)]
        return digest_of(*parts)


def _tensors_of(graph: Data) -> list[np.ndarray]:
    """Return the tensors of a graph except targets and masks."""
    found = []
    for name in sorted(graph.keys()):
        value = graph[name]
        if not isinstance(value, Tensor) or name == "y" or name.endswith("_mask"):
            continue
        if value.layout != torch.strided:
            sparse = value.to_sparse_coo().coalesce()
            found += [_as_array(sparse.indices()), _as_array(sparse.values())]
        else:
            found.append(_as_array(value))
    return found


def _as_array(values: Tensor) -> np.ndarray:
    return (values.double() if values.is_floating_point() else values).numpy()


def generated_splits(
    task: TaskName,
    num_graphs: int,
    shares: tuple[float, float],
    seed: int,
    fold: int = 0,
    family: Family = "erdos_renyi",
    level: Level = "graph",
) -> GraphSplits:
    """Generate the graphs of a task and split them."""
    where = Path(f"the task {task}")
    if task == "karate":
        graph, names = karate_club()
        parts = _split(graph.y, True, True, 1, shares, seed, where)
        return GraphSplits([graph], *parts, "node", "classification", True, names, ids=["0"])
    if task == "csl":
        graphs, names = csl_graphs(seed)
        splits = GraphSplits(graphs, *csl_fold(fold, seed), "graph", "classification", class_names=names)
    else:
        graphs, names = substructure_set(num_graphs, family, level, seed)
        splits = GraphSplits(
            graphs, *_split(graphs[0].y, False, False, num_graphs, shares, seed, where), level, "regression"
        )
        splits.target_names = names
    splits.ids = [str(i) for i in range(len(splits.graphs))]
    return splits


def keep_targets(splits: GraphSplits, names: Sequence[str]) -> None:
    """Keep only the targets ``names``, in that order, in place; a single one loses its dimension."""
    assert splits.target_names is not None
    chosen = [splits.target_names.index(name) for name in names]
    for graph in splits.graphs:
        graph.y = graph.y[:, chosen[0]] if len(chosen) == 1 else graph.y[:, chosen]
    splits.target_names = list(names)


def file_splits(
    read: FileGraphs, path: Path, kind: TargetKind, names: Sequence[str], shares: tuple[float, float], seed: int
) -> GraphSplits:
    """Add the targets to the graphs of a file; split the graphs, or the nodes of a single graph with node targets."""
    of_nodes = read.level == "node" and len(read.graphs) == 1
    if read.level == "node" and not of_nodes:
        _require_targets(read, path, names)
    sizes = [graph.num_nodes for graph in read.graphs]
    if read.level == "graph" and len(set(sizes)) > 1 and sizes == list(map(len, read.target)):
        raise ValueError(
            f"each graph of {path} has as many targets {names[0]!r} as nodes; if they are targets of the nodes, set "
            "layout.level to node"
        )
    y, classes = _encode(read, path, kind, names, of_nodes)
    by_class = classes is not None and (of_nodes or read.level == "graph")
    parts = _split(y, of_nodes, by_class, len(read.graphs), shares, seed, path)
    sizes = [graph.num_nodes or 0 for graph in read.graphs] if read.level == "node" else [1] * len(read.graphs)
    for graph, target in zip(read.graphs, y.split(sizes), strict=True):
        graph.y = target
    splits = GraphSplits(read.graphs, *parts, read.level, kind, of_nodes, classes, None, read.ids, read.node_ids)
    if kind != "classification":
        splits.target_names = list(names) if len(names) == (1 if y.ndim == 1 else y.shape[1]) else None
    return splits


def _require_targets(read: FileGraphs, path: Path, names: Sequence[str]) -> None:
    """Raise a ValueError if a node of one of several graphs lacks a target."""
    nodes = [(of, node) for of, graph in enumerate(read.graphs) for node in range(graph.num_nodes or 0)]
    lacking = [pair for pair, row in zip(nodes, read.target, strict=True) if pd.isna(np.array(row, object)).any()]
    if lacking:
        of, node = lacking[0]
        name = read.node_ids[of][node] if read.node_ids else str(node)
        raise ValueError(
            f"node {name} of graph {read.ids[of]} of {path} has no {' and '.join(names)}, nor have "
            f"{len(lacking) - 1} others all targets; only nodes of one graph alone may lack them. Fill them in, or "
            "leave these graphs out"
        )


def _encode(
    read: FileGraphs, path: Path, kind: TargetKind, names: Sequence[str], gaps: bool
) -> tuple[Tensor, list[str] | None]:
    """Return targets as models take them, and class names; ``gaps`` allows missing targets, which are unknown."""
    name, found = names[0], read.target
    widths = {len(row) for row in found}
    if len(widths) > 1:
        raise ValueError(
            f"all targets {name!r} of {path} must be equally many; got {' and '.join(map(str, sorted(widths)))}"
        )
    lines = pd.Index(read.lines, name="line") if len(read.lines) == len(found) else None
    table = pd.DataFrame(list(found), lines, dtype=object)
    if kind == "classification":
        if table.shape[1] != 1:
            raise ValueError(
                f"a class of each is one value; {path} has {table.shape[1]} in {', '.join(names)}. Set "
                "layout.target_kind to regression, or name one in layout.target"
            )
        encode = read_known_classes if gaps else read_classes
        numbers, classes = encode(table[0].rename(name), path, SET_REGRESSION)
        return torch.from_numpy(numbers), classes
    titles = [*names, *[name] * table.shape[1]]
    columns = [as_numbers(table[i].rename(titles[i]), path, "Mend the value") for i in range(table.shape[1])]
    values = torch.from_numpy(np.stack([column.to_numpy() for column in columns], axis=1))
    if not gaps and values.isnan().any():
        row = int(values.isnan().any(1).int().argmax())
        place = f"entry {row + 1}" if lines is None else f"line {lines[row]}"
        raise ValueError(f"the target {name!r} of {path} lacks a value in {place}; fill it in, or leave it out")
    return (values[:, 0] if values.shape[1] == 1 else values).float(), None


def dataset_splits(
    parts: Sequence[Sequence[Data]],
    where: str,
    level: Level | None,
    kind: TargetKind | None,
    shares: tuple[float, float],
    seed: int,
    fold: int,
    named_shares: Sequence[str] = (),
) -> GraphSplits:
    """Split the graphs of one data set, or the nodes of its single graph, by masks or at random; three are the splits.

    Raises:
        ValueError: if there is no target, targets differ in shape, masks are incomplete, or ``fold`` or one of
            ``named_shares`` has no effect.
    """
    graphs = [graph for part in parts for graph in part]
    for number, graph in enumerate(graphs):
        if not isinstance(graph.y, Tensor):
            raise ValueError(f"graph {number} of {where} has no target y, a tensor; add it with a transform")
    level = level or _infer_level(graphs)
    if kind is None and graphs[0].y.is_floating_point() and _are_binary(graphs):
        rank_zero_warn(
            f"y of {where} is floating and taken for quantities, but holds 0 and 1 alone. For labels, set "
            "layout.target_kind to multilabel; for one-hot classes, replace y by y.argmax() in a transform. Set it to "
            "regression to keep this"
        )
    kind = kind or ("regression" if graphs[0].y.is_floating_point() else "classification")
    of_nodes = level == "node" and len(graphs) == 1
    classes = _shape_targets(graphs, level, kind, where)
    masks = _masks_of(graphs, of_nodes and len(parts) == 1, where)
    _require_effect_with_masks(masks, graphs[0], fold, named_shares, where)
    if len(parts) == 3:
        stops = np.cumsum([len(part) for part in parts])
        train, val, test = np.split(np.arange(len(graphs)), stops[:2])
    elif masks:
        chosen = {name: _masked_nodes(graphs[0], name, fold, where) for name in masks}
        train, test = chosen["train_mask"], chosen["test_mask"]
        if "val_mask" in chosen:
            val = chosen["val_mask"]
        else:
            train, val = split_rows(train, graphs[0].y.numpy() if classes else None, shares[0], seed, Path(where))
    else:
        y = graphs[0].y if of_nodes else torch.cat([graph.y for graph in graphs])
        by_class = classes is not None and (of_nodes or level == "graph")
        train, val, test = _split(y, of_nodes, by_class, len(graphs), shares, seed, Path(where))
    for graph in graphs:
        for name in _MASKS:
            if name in graph:
                del graph[name]  # batches have target_index instead
    ids = [str(i) for i in range(len(graphs))]
    return GraphSplits(graphs, train, val, test, level, kind, of_nodes, classes, ids=ids)


def _are_binary(graphs: Sequence[Data]) -> bool:
    y = torch.cat([graph.y.flatten() for graph in graphs])
    zero, one = y == 0, y == 1
    return bool(zero.any() and one.any() and (zero | one | y.isnan()).all())


def _infer_level(graphs: Sequence[Data]) -> Level:
    of_nodes = all(graph.y.ndim > 0 and len(graph.y) == graph.num_nodes for graph in graphs)
    return "node" if of_nodes and any(graph.num_nodes != 1 for graph in graphs) else "graph"


def _shape_targets(graphs: Sequence[Data], level: Level, kind: TargetKind, where: str) -> list[str] | None:
    """Set ``y`` of each graph to classes from 0, (items,), or numbers, (items,) or (items, K); return class names."""
    for number, graph in enumerate(graphs):
        rows = graph.num_nodes if level == "node" else 1
        y = graph.y.reshape(rows, -1) if graph.y.numel() % max(1, rows or 0) == 0 and graph.y.numel() else None
        if y is None or y.shape[1] != graphs[0].y.numel() // (graphs[0].num_nodes if level == "node" else 1):
            raise ValueError(
                f"y of graph {number} of {where} must have as many values {'a node' if level == 'node' else ''} "
                f"as that of the first graph; got shape {tuple(graph.y.shape)}"
            )
        graph.y = y[:, 0] if y.shape[1] == 1 else y
    if kind != "classification":
        for graph in graphs:
            missing = graph.y == IGNORED if kind == "multilabel" else torch.zeros_like(graph.y, dtype=torch.bool)
            graph.y = graph.y.float().masked_fill(missing, torch.nan)
        return None
    y = torch.cat([graph.y for graph in graphs])
    if y.ndim > 1 or (y != y.round()).any():
        raise ValueError(
            f"y of {where} must hold one class each; got shape {tuple(graphs[0].y.shape)} of {y.dtype}. For quantities "
            "set layout.target_kind to regression, for labels of 0 and 1 to multilabel; choose one of several classes "
            "with a transform"
        )
    present = y[y >= 0].unique().long()
    if len(present) < 2:
        raise ValueError(f"y of {where} holds one class only, {present.tolist()}; two or more are needed")
    for graph in graphs:
        y = graph.y.long()
        graph.y = torch.searchsorted(present, y).masked_fill(y < 0, IGNORED)  # a class below 0 means none
    return [str(name) for name in present.tolist()]


def _split(
    y: Tensor, of_nodes: bool, by_class: bool, num_graphs: int, shares: tuple[float, float], seed: int, path: Path
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split the graphs, or the nodes with a target, at random, stratified where ``by_class``."""
    rows = np.flatnonzero(has_target(y).numpy()) if of_nodes else np.arange(num_graphs)
    train, val, test = split_in_three(y[rows].numpy() if by_class else None, len(rows), shares, seed, path)
    return rows[np.sort(train)], rows[np.sort(val)], rows[np.sort(test)]


def _masks_of(graphs: Sequence[Data], split_by_nodes: bool, where: str) -> list[str]:
    """Return the names of the masks that split the nodes of the only graph: three, two (train and test) or none."""
    found = [name for name in _MASKS if any(name in graph for graph in graphs)]
    remedy = "drop them with a transform for a split at random"
    if found and not split_by_nodes:
        raise ValueError(
            f"graphs of {where} have {', '.join(found)}, which would have no effect: masks split the nodes of one "
            f"graph, given as dataset alone. Give split.val_dataset and split.test_dataset without masks, or {remedy}"
        )
    if found and not {"train_mask", "test_mask"} <= {*found}:
        lacking = [name for name in _MASKS if name not in found]
        raise ValueError(
            f"the graph of {where} has {', '.join(found)} and no {', '.join(lacking)}: train_mask and test_mask are "
            f"needed at least. Add {lacking[-1]}, as RandomNodeSplit does, or {remedy}"
        )
    return found


def _require_effect_with_masks(
    masks: Sequence[str], graph: Data, fold: int, named_shares: Sequence[str], where: str
) -> None:
    """Raise a ValueError if ``fold``, or a share that was passed, would have no effect with these masks."""
    idle = [name for name in named_shares if name.replace("share", "mask") in masks]
    idle += [f"fold={fold}"] if fold != 0 and not any(graph[name].ndim == 2 for name in masks) else []
    if idle:
        has = f"whose masks are {', '.join(masks)}" if masks else "which has no masks that split its nodes"
        raise ValueError(
            f"{', '.join(idle)} would have no effect with {where}, {has}; a fold is a column of masks (n, S). Leave it "
            "out, or drop the masks with a transform"
        )


def _masked_nodes(graph: Data, name: str, fold: int, where: str) -> np.ndarray:
    """Return the nodes with a target in the mask ``graph[name]``, (n,), or in its column ``fold``, (n, S)."""
    mask = graph[name]
    if mask.ndim == 2:
        if not 0 <= fold < mask.shape[1]:
            raise ValueError(f"{name} of {where} holds {mask.shape[1]} splits; got fold={fold}")
        mask = mask[:, fold]
    return np.flatnonzero((mask & has_target(graph.y)).numpy())


def require_labels(y: Tensor, where: str) -> None:
    """Raise a ValueError unless targets are 0, 1 or NaN."""
    if len(wrong := y[~((y == 0) | (y == 1) | y.isnan())]):
        raise ValueError(
            f"labels are 0 or 1, and NaN where they are missing; {where} has {wrong[0].item()}. For quantities the "
            "kind of target is regression"
        )
