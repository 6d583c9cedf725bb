"""Training, validation and test graphs, or nodes of one graph. Shapes: n nodes of a graph, K targets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_accel.data.graph_tasks import (
    Family,
    Level,
    cfi_set,
    csl_fold,
    csl_graphs,
    karate_club,
    regular_set,
    strongly_regular_set,
    substructure_set,
)
from lightning_accel.data.tables import split_rows

TargetKind = Literal["classification", "regression"]
TaskName = Literal["csl", "strongly_regular", "regular", "cfi", "substructures", "karate"]

USUAL_NUMBER = {"strongly_regular": 400, "regular": 500, "cfi": 600, "substructures": 5000}  # of graphs
USUAL_SHARES = {"substructures": (0.2, 0.5)}  # of validation and test: those of Chen et al. 2020


@dataclass
class GraphSplits:
    """Graphs and which of them train, validate and test; where there is one graph, which of its nodes."""

    graphs: list[Data]
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray
    level: Level
    kind: TargetKind
    of_nodes: bool = False  # whether the splits are of nodes
    class_names: list[str] | None = None
    target_names: list[str] | None = None
    ids: list[str] = field(default_factory=list)  # of graphs, or of nodes where there is one graph


def generated_splits(
    task: TaskName, num_graphs: int, shares: tuple[float, float], seed: int, fold: int, family: Family, level: Level
) -> GraphSplits:
    """The graphs of a task, all of them of ``seed``."""
    where = Path(f"the task {task}")
    match task:
        case "csl":
            graphs, names = csl_graphs(seed)
            splits = GraphSplits(graphs, *csl_fold(fold, seed), "graph", "classification", class_names=names)
        case "karate":
            graph, names = karate_club()
            parts = split(graph.y.numpy(), 34, shares, seed, where)
            splits = GraphSplits([graph], *parts, "node", "classification", True, names)
        case "substructures":
            graphs, names = substructure_set(num_graphs, family, level, seed)
            parts = split(None, num_graphs, shares, seed, where)
            splits = GraphSplits(graphs, *parts, level, "regression", target_names=names)
        case _:
            make: Callable[[int, int], tuple[list[Data], list[str]]] = {
                "strongly_regular": strongly_regular_set, "regular": regular_set, "cfi": cfi_set,
            }[task]  # fmt: skip
            graphs, names = make(num_graphs, seed)
            parts = split(np.array([int(graph.y) for graph in graphs]), num_graphs, shares, seed, where)
            splits = GraphSplits(graphs, *parts, "graph", "classification", class_names=names)
    splits.ids = [str(i) for i in range(34 if task == "karate" else len(splits.graphs))]
    return splits


def split(
    classes: np.ndarray | None, num_rows: int, shares: tuple[float, float], seed: int, path: Path
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    val_share, test_share = shares
    rest, test = split_rows(np.arange(num_rows), classes, test_share, seed, path)
    train, val = split_rows(rest, classes, val_share / (1 - test_share), seed, path)
    return np.sort(train), np.sort(val), np.sort(test)


def require_task(task: str) -> None:
    if task not in get_args(TaskName):
        raise ValueError(f"task must be one of {', '.join(get_args(TaskName))}; got {task!r}")


def training_targets(splits: GraphSplits) -> Tensor:
    """(rows, K) float64, of the training graphs or nodes."""
    if splits.of_nodes:
        y = splits.graphs[0].y[torch.from_numpy(splits.train)]
    else:
        y = torch.cat([splits.graphs[i].y for i in splits.train.tolist()])
    return y.double().view(len(y), -1)


def with_features(graphs: Sequence[Data]) -> None:
    """Give each graph that has no features ones, (n, 1) float32."""
    for graph in graphs:
        if graph.x is None:
            graph.x = torch.ones(graph.num_nodes or 0, 1)


def attributes_of(graphs: Sequence[Data]) -> dict[str, Any]:
    """What a model asks of the features."""
    first = graphs[0]
    attr = first.edge_attr
    typed = attr is not None and not attr.is_floating_point()
    return {
        "num_features": first.x.shape[1],
        "edge_dim": None if attr is None or typed else attr.shape[1],
        "num_relations": 1 + max(int(g.edge_attr.max()) if g.num_edges else 0 for g in graphs) if typed else None,
    }
