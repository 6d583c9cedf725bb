"""Graphs from files, from data sets of PyG, or generated.

Shapes: B graphs of a batch, N nodes, M edges, F and D features of nodes and edges, K targets, S nodes with targets, n
nodes of one graph.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data, Dataset

from lightning_accel.data.bounds import require_at_least, require_shares
from lightning_accel.data.digest import require_same_data
from lightning_accel.data.graphs.dataset import GraphDataset, NeighbourDataset, NodeDataset
from lightning_accel.data.graphs.features import Features, Scale, apply_features, features_of, fit_scale, scale_features
from lightning_accel.data.graphs.files import FileGraphs, GraphLayout, read_graphs
from lightning_accel.data.graphs.sampler import GraphBudgetBatchSampler
from lightning_accel.data.graphs.splits import (
    GraphSplits,
    TargetKind,
    TaskName,
    dataset_splits,
    file_splits,
    generated_splits,
    keep_targets,
)
from lightning_accel.data.graphs.substructures import SUBSTRUCTURES
from lightning_accel.data.graphs.tasks import Family, Level
from lightning_accel.data.in_memory import in_memory_loader, resumable_loader
from lightning_accel.data.samplers import ResumableLoader, replicas_and_rank
from lightning_accel.data.tables.files import existing_file
from lightning_accel.ops.renames import renamed_arguments

_PARTS = {"path", "dataset", "karate", "substructures"}
_SOURCES: dict[str, set[str]] = {  # the sources (path, dataset, or a task) for which an option has an effect
    **{name: {"dataset"} for name in ("val_dataset", "test_dataset")},
    **{name: {"path"} for name in ("nodes_path", "predict_path")},
    **{name: {"substructures"} for name in ("family", "num_graphs")},
    "level": {"path", "dataset", "substructures"},
    "target_kind": {"path", "dataset"},
    "target": {"path", "substructures"},
    "fold": {"csl", "dataset"},
    "num_neighbors": {"path", "dataset", "karate"},
    "val_share": _PARTS,
    "test_share": _PARTS,
}
_DEFAULTS: dict[str, Any] = {"fold": 0, "family": "erdos_renyi"}


def _require_effect(source: str, options: Mapping[str, Any]) -> None:
    """Raise a ValueError if an option would have no effect with a ``path``, a ``dataset`` or a task."""
    idle = [
        name
        for name, value in options.items()
        if source not in _SOURCES[name] and value is not None and value != _DEFAULTS.get(name)
    ]
    if idle:
        what = source if source in ("path", "dataset") else f"task={source!r}"
        raise ValueError(
            f"{', '.join(idle)} would have no effect with {what}; {idle[0]} is for "
            f"{', '.join(sorted(_SOURCES[idle[0]]))}. Leave it out"
        )
    parts = [options[name] is not None for name in ("val_dataset", "test_dataset")]
    shares = [name for name in ("val_share", "test_share") if options[name] is not None]
    if parts[0] != parts[1]:
        raise ValueError("val_dataset and test_dataset go together, beside dataset; got one of them")
    if parts[0] and shares:
        raise ValueError(f"{', '.join(shares)} would have no effect beside val_dataset and test_dataset; leave it out")


def _require_sizes(
    global_batch_size: int | None, max_nodes: int | None, max_edges: int | None, num_neighbors: Sequence[int] | None
) -> None:
    """Raise a ValueError if a size is out of range."""
    require_at_least(1, global_batch_size=global_batch_size, max_nodes=max_nodes, max_edges=max_edges)
    if num_neighbors is not None:
        if not num_neighbors or any(most < 1 and most != -1 for most in num_neighbors):
            raise ValueError(
                f"num_neighbors must be numbers of 1 or more, or -1 for all, one for each step; got {num_neighbors}"
            )
        if max_nodes is not None or max_edges is not None:
            raise ValueError("max_nodes and max_edges would have no effect with num_neighbors; set global_batch_size")


Items = GraphDataset | NodeDataset | NeighbourDataset


class GraphDataModule(L.LightningDataModule):
    """Load graphs from files, data sets of PyG or generated tasks as :class:`torch_geometric.data.Batch`.

    **Batches** have ``x`` (N, F) float32, ones (N, 1) if nodes have no features; ``edge_index`` (2, M); ``edge_attr``,
    (M, D) float32 features or (M,) int64 types, if edges have any; ``batch`` (N,), ``ptr`` (B + 1,); and ``y``. If
    graphs have targets, ``y`` is (B,) classes, or (B,) or (B, K) numbers, not standardized. If nodes have targets,
    ``y`` is (N,) or (N, K), and **``target_index`` (S,) lists the nodes that count**: a loss is
    ``loss(out[i], y[i])`` with ``i = batch.target_index``, and ``predict`` returns ``out[i]``.

    **Files.** ``.csv`` and ``.parquet`` files have one edge per row, of one graph: ``source`` and ``target``,
    optionally ``type``, and numeric columns as edge features. ``nodes_path`` is a table with ``node``, the target and
    node features; its text columns are one-hot encoded. ``.jsonl`` files have one graph per line, ``{"edges": [[0, 1],
    [1, 2]], "num_nodes": 3, "x": [[0.5], [1], [2]], "edge_attr": [0, 1], "y": "ring", "id": "a7"}``; only ``edges`` is
    required, and no further field but the target is allowed; whole numbers in ``edge_attr`` are types, lists or
    fractions are features. ``.g6`` files (graph6) have one graph per line, its target after a blank. The reverse of
    each edge is added where a file lacks it; give directed graphs as a data set of PyG. Features are standardized to
    mean 0 and variance 1 over the training data, except those of only zeros and ones.

    **Data sets** of PyG are not standardized. Whole numbers in ``x`` are one-hot encoded; whole numbers in
    ``edge_attr``, or ``edge_type`` if there is no ``edge_attr``, are edge types. A single graph with node targets is
    split by its ``train_mask``, ``val_mask`` and ``test_mask``; without a ``val_mask``, ``val_share`` of the training
    nodes validate. Other masks are an error.

    **Splits** consist of whole graphs, stratified by class; a single graph with node targets is split by nodes. Its
    nodes may lack their target, or be NaN in some of several. The same graphs and ``seed`` give the same splits.

    After ``setup``: ``level``; ``target_kind``; ``num_features``, F; ``edge_dim``, D, None unless edges have features;
    ``num_relations``, None unless edges have types; ``num_classes`` and ``class_names``, None unless targets are
    classes; ``num_targets``, K, None unless targets are numbers, with ``target_mean`` and ``target_std`` (K,) of the
    training targets, in the units of ``y``, the latter 1 for constant targets, and ``target_names``, if they have
    names; ``feature_names`` and ``relation_names``, for tables only; ``predict_ids``, in the order of ``predict``: ids
    of graphs, or of nodes, as ``graph:node`` if there are several graphs.

    Args:
        path: file of graphs or of edges; by default, ``task`` is used.
        task: a generated task, if there is no ``path`` or ``dataset``: ``csl`` (the default), 150 circular skip links
            with ten skips in five folds; ``substructures``, counts of seven small graphs in random graphs; ``karate``,
            Zachary's club and its two factions. See ``tasks``.
        dataset: data set of PyG, such as ``torch_geometric.datasets.TUDataset``; with ``val_dataset`` and
            ``test_dataset``, the training graphs.
        val_dataset: validation graphs; needs ``dataset`` and ``test_dataset``.
        test_dataset: test graphs.
        transform: transform of PyG, called once for each graph, in ``setup``.
        level: whether a target belongs to a ``graph`` or a ``node``; by default, nodes if ``y`` of a data set has an
            entry for each node, or if the table of nodes has the target, else graphs.
        target_kind: a class (``classification``) or numbers (``regression``); by default classes, for a data set with
            floating ``y`` numbers.
        target: column or field of the target in a file, by default ``y``, or several with one number each; for
            ``substructures``, which of them to count, by default all seven.
        nodes_path: table of nodes that accompanies an edge list.
        fold: fold of ``csl``, 0 to 4, or column of masks (n, S) of a data set, 0 to S - 1.
        family: random graphs of ``substructures``: ``erdos_renyi`` or ``regular``.
        num_graphs: number of graphs of ``substructures``, for training, validation and test; by default 5,000.
        global_batch_size: graphs per step, or seed nodes with ``num_neighbors``, over all processes; by default 64, or
            as many as ``max_nodes`` and ``max_edges`` allow. A single graph with node targets is one batch.
        max_nodes: largest number of nodes of a batch, over all processes; each process gets about an equal share.
        max_edges: largest number of edges (columns of ``edge_index``) of a batch, likewise.
        num_neighbors: for a single large graph with node targets, how many neighbours to sample of a seed node, of each
            of those, and so on, -1 for all; batches hold all edges among them. ``n_id`` maps a batch's nodes to those
            of the graph.
        val_share: share of the graphs, or nodes, that validate; by default .1, for ``substructures`` .2.
        test_share: share of the graphs, or nodes, that test; by default .2, for ``substructures`` .5.
        seed: seed of the generated graphs, the split, the order and the neighbours.
        num_workers: workers that load batches.
        predict_path: file to predict, in the format of ``path``, with or without targets; by default the test graphs,
            or all nodes of a single graph.

    Raises:
        FileNotFoundError: if a file does not exist.
        TypeError: in ``setup``, if a data set does not hold :class:`torch_geometric.data.Data`.
        ValueError: if an option is out of range, or has no effect; in ``setup``, if data are not as described, or a
            graph exceeds ``max_nodes`` or ``max_edges``; in ``load_state_dict``, if the checkpoint was trained on other
            graphs.
    """

    level: Level
    target_kind: TargetKind
    num_features: int
    edge_dim: int | None
    num_relations: int | None
    num_classes: int | None
    num_targets: int | None
    class_names: list[str] | None
    target_names: list[str] | None
    target_mean: list[float] | None
    target_std: list[float] | None
    feature_names: list[str] | None
    relation_names: list[str] | None
    predict_ids: list[str]

    @renamed_arguments(batch_size="global_batch_size")
    def __init__(
        self,
        path: str | Path | None = None,
        task: TaskName | None = None,
        *,
        dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        test_dataset: Dataset | None = None,
        transform: Callable[..., Any] | None = None,
        level: Level | None = None,
        target_kind: TargetKind | None = None,
        target: str | Sequence[str] | None = None,
        nodes_path: str | Path | None = None,
        fold: int = 0,
        family: Family = "erdos_renyi",
        num_graphs: int | None = None,
        global_batch_size: int | None = None,
        max_nodes: int | None = None,
        max_edges: int | None = None,
        num_neighbors: Sequence[int] | None = None,
        val_share: float | None = None,
        test_share: float | None = None,
        seed: int = 0,
        num_workers: int = 0,
        predict_path: str | Path | None = None,
    ) -> None:
        super().__init__()
        sources = {"path": path, "task": task, "dataset": dataset}
        if len(named := [name for name, value in sources.items() if value is not None]) > 1:
            raise ValueError(f"give path, task or dataset, one of them; got {' and '.join(named)}")
        self.task: TaskName | None = "csl" if not named else task
        if self.task not in (None, *get_args(TaskName)):
            raise ValueError(f"task must be one of {', '.join(get_args(TaskName))}; got {task!r}")
        names = (target,) if isinstance(target, str) else tuple(target or ())
        _require_effect(
            self.task or named[0],
            {
                "val_dataset": val_dataset, "test_dataset": test_dataset, "level": level, "target_kind": target_kind,
                "target": names or None, "nodes_path": nodes_path, "fold": fold,
                "family": family, "num_graphs": num_graphs, "num_neighbors": num_neighbors, "val_share": val_share,
                "test_share": test_share, "predict_path": predict_path,
            },
        )  # fmt: skip
        for name, value, choices in (
            ("level", level, (None, *get_args(Level))), ("target_kind", target_kind, (None, *get_args(TargetKind))),
            ("family", family, get_args(Family)),
        ):  # fmt: skip
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(filter(None, choices))}; got {value!r}")
        _require_sizes(global_batch_size, max_nodes, max_edges, num_neighbors)
        require_at_least(0, seed=seed, num_workers=num_workers)
        named_shares = {"val_share": val_share, "test_share": test_share}
        self.named_shares = [name for name, share in named_shares.items() if share is not None]
        usual = (0.2, 0.5) if self.task == "substructures" else (0.1, 0.2)  # the former of Chen et al. 2020
        self.shares = (usual[0] if val_share is None else val_share, usual[1] if test_share is None else test_share)
        require_shares(*self.shares)
        if self.task == "csl" and not 0 <= fold < 5:
            raise ValueError(f"fold of csl must be from 0 to 4; got {fold}")
        if self.task == "substructures" and (unknown := set(names) - set(SUBSTRUCTURES)):
            raise ValueError(f"target must be among {', '.join(SUBSTRUCTURES)}; got {', '.join(sorted(unknown))}")
        self.path, self.predict_path, nodes = (
            None if file is None else existing_file(file) for file in (path, predict_path, nodes_path)
        )
        if nodes is not None and self.predict_path is not None:
            raise ValueError("predict_path has no effect beside nodes_path: all nodes of the graph are predicted")
        self.layout = GraphLayout(level, names or ("y",), nodes)
        self.datasets = [part for part in (dataset, val_dataset, test_dataset) if part is not None]
        self.transform = transform
        self.counted = names or tuple(SUBSTRUCTURES)
        self.kind = target_kind
        self.fold = fold
        self.family = family
        self.num_graphs = (5000 if self.task == "substructures" else 0) if num_graphs is None else num_graphs
        self.global_batch_size = global_batch_size
        self.max_nodes = max_nodes
        self.max_edges = max_edges
        self.num_neighbors = None if num_neighbors is None else list(num_neighbors)
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str | None = None) -> None:
        if hasattr(self, "train_rows"):  # the Trainer calls setup once per stage
            return
        splits, read, source = self._read()
        self._digest = splits.digest(source)
        where = self._source_name()
        features = features_of(splits.graphs, where, [] if read is None else read.lines)
        splits.graphs = [apply_features(graph, features, where) for graph in splits.graphs]
        scales = {} if read is None else self._fit_scales(splits)
        scale_features(splits.graphs, scales)
        self._describe(splits, features, read)
        if self.num_neighbors is not None and not splits.of_nodes:
            raise ValueError(
                f"num_neighbors needs one graph whose nodes have targets; {where} has {len(splits.graphs)} graphs and "
                f"level {splits.level}. Set global_batch_size, or max_nodes and max_edges"
            )
        sizes = self.global_batch_size, self.max_nodes, self.max_edges
        if splits.of_nodes and self.num_neighbors is None and any(sizes):
            raise ValueError(
                f"global_batch_size, max_nodes and max_edges would have no effect on the one graph of {where}, which "
                "is a batch by itself; set num_neighbors for batches of parts of it"
            )
        rows = [self._rows(splits, part) for part in (splits.train, splits.val, splits.test)]
        self._sampler(rows[0], shuffle=True)  # raises for a graph beyond a budget
        self.predict_rows, self.predict_ids = self._rows_to_predict(splits)
        if self.predict_path is not None:
            self.predict_rows, self.predict_ids = self._file_to_predict(self.predict_path, features, scales)
        self.train_rows, self.val_rows, self.test_rows = rows

    def _source_name(self) -> str:
        if self.task is not None:
            return f"the task {self.task}"
        return str(self.path) if self.path else f"the dataset {self.datasets[0]}"

    def _read(self) -> tuple[GraphSplits, FileGraphs | None, list[Any] | None]:
        """Return graphs and splits, the graphs of a file if there is one, and those before transforms, for digests."""
        if self.task is not None:
            level = self.layout.level or "graph"
            splits = generated_splits(self.task, self.num_graphs, self.shares, self.seed, self.fold, self.family, level)
            if self.task == "substructures":
                keep_targets(splits, self.counted)
            splits.graphs = [self._transform_graph(graph) for graph in splits.graphs]
            return splits, None, None
        if self.path is not None:
            read = read_graphs(self.path, self.layout)
            kind = self.kind or "classification"
            splits = file_splits(read, self.path, kind, self.layout.target, self.shares, self.seed)
            source = list(splits.graphs)
            splits.graphs = [self._transform_graph(graph) for graph in source]
            return splits, read, source
        given = [list(dataset) for dataset in self.datasets]
        parts = [[self._transform_graph(graph) for graph in dataset] for dataset in given]
        # a data set's own transform may be random, so that its graphs have no digest
        drawn = [getattr(dataset, "transform", None) is not None for dataset in self.datasets]
        source = [None if own else graph for own, part in zip(drawn, given, strict=True) for graph in part]
        where = self._source_name()
        options = self.layout.level, self.kind, self.shares, self.seed, self.fold, self.named_shares
        return dataset_splits(parts, where, *options), None, source

    def _transform_graph(self, graph: Any) -> Data:
        graph = copy.copy(graph)  # the data set may store it
        graph = graph if self.transform is None else self.transform(graph)
        if not isinstance(graph, Data) or graph.edge_index is None:
            raise TypeError(
                "graphs with nodes of one kind, torch_geometric.data.Data with edge_index, are needed; "
                f"{self._source_name()} gives {graph!r:.200}. HeteroData.to_homogeneous() and ToEdgeIndex make such "
                "ones"
            )
        if "edge_type" in graph and "edge_attr" not in graph:  # HeteroData.to_homogeneous() names it so
            graph.edge_attr = graph.edge_type
        return graph

    def _fit_scales(self, splits: GraphSplits) -> dict[str, Scale]:
        edges = splits.graphs[0].edge_attr
        scales = {"x": fit_scale(splits.training_nodes())}
        if edges is not None and edges.is_floating_point():
            scales["edge_attr"] = fit_scale(splits.training_edges())
        return scales

    def _describe(self, splits: GraphSplits, features: Features, read: FileGraphs | None) -> None:
        self.level, self.target_kind = splits.level, splits.kind
        self.num_features, self.edge_dim = features.num_features, features.edge_dim
        self.num_relations = features.num_relations
        self.feature_names, self.relation_names = (
            (None, None) if read is None else (read.feature_names, read.relation_names)
        )
        self.class_names, self.target_names = splits.class_names, splits.target_names
        self.num_classes = None if splits.class_names is None else len(splits.class_names)
        self.num_targets = self.target_mean = self.target_std = None
        if splits.kind == "regression":
            target = splits.training_targets()
            self.num_targets = target.shape[1]
            if lacking := target.isnan().all(0).nonzero().flatten().tolist():
                raise ValueError(
                    f"target {lacking[0]}, counted from 0, of {self._source_name()} has no value in what trains; leave "
                    "it out, or change the split"
                )
            mean = target.nanmean(0)
            std = (target - mean).square().nanmean(0).sqrt()
            self.target_mean, self.target_std = mean.tolist(), torch.where(std > 0, std, 1).tolist()

    def _rows(self, splits: GraphSplits, part: np.ndarray) -> Items:
        if not splits.of_nodes:
            return GraphDataset([splits.graphs[i] for i in part.tolist()], splits.level == "node")
        return self._node_rows(splits.graphs, torch.from_numpy(part))

    def _node_rows(self, graphs: Sequence[Data], rows: Tensor | None = None) -> Items:
        if self.num_neighbors is None or len(graphs) > 1:
            return NodeDataset(graphs, rows)
        return NeighbourDataset(graphs[0], self.num_neighbors, rows, self.seed)

    def _rows_to_predict(self, splits: GraphSplits) -> tuple[Items, list[str]]:
        chosen = [0] if splits.of_nodes else splits.test.tolist()
        graphs = [splits.graphs[i] for i in chosen]
        return self._without_targets(
            graphs, [splits.ids[i] for i in chosen], [splits.node_ids[i] for i in chosen if splits.node_ids]
        )

    def _without_targets(
        self, graphs: Sequence[Data], ids: list[str], node_ids: list[list[str]]
    ) -> tuple[Items, list[str]]:
        """Return the items to predict, without targets, and the id of each."""
        graphs = [graph.clone() for graph in graphs]
        for graph in graphs:
            graph.y = None
        if self.level == "graph":
            return GraphDataset(graphs), ids
        names = node_ids or [[str(node) for node in range(graph.num_nodes or 0)] for graph in graphs]
        if len(graphs) == 1:
            return self._node_rows(graphs), names[0]
        return self._node_rows(graphs), [
            f"{of}:{name}" for of, inside in zip(ids, names, strict=True) for name in inside
        ]

    def _file_to_predict(self, path: Path, features: Features, scales: dict[str, Scale]) -> tuple[Items, list[str]]:
        read = read_graphs(path, self.layout, with_target=False)
        graphs = [self._transform_graph(graph) for graph in read.graphs]
        places = [f"line {line} of {path}" for line in read.lines] or [str(path)] * len(graphs)
        graphs = [apply_features(graph, features, place) for graph, place in zip(graphs, places, strict=True)]
        scale_features(graphs, scales)
        return self._without_targets(graphs, read.ids, read.node_ids)

    def state_dict(self) -> dict[str, Any]:
        return {
            "source": [self.task or ("path" if self.path else "dataset"), self.num_graphs],
            "target": [self.level, self.target_kind, self.class_names, self.target_names],
            "features": [self.num_features, self.edge_dim, self.num_relations, self.feature_names, self.relation_names],
            "split": [self.seed, *self.shares, self.fold],
            "digest of the graphs": self._digest,  # older checkpoints have others under other names
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer: Any = self.trainer
        resuming = trainer is None or trainer.state.fn == TrainerFn.FITTING
        fresh = self.task not in (None, "csl", "karate") and not resuming  # graphs of another seed are new to the model
        now = self.state_dict()
        if fresh and state_dict["source"][0] == self.task:
            del now["source"], now["split"], now["digest of the graphs"]
        remedy = "Give the graphs and the split of its run; new graphs of a file go in predict_path"
        require_same_data(state_dict, now, f"graphs than those of {self._source_name()}", remedy)

    def _sampler(self, rows: Items, shuffle: bool) -> GraphBudgetBatchSampler:
        replicas, rank = replicas_and_rank(self)
        size: int | None
        if isinstance(rows, GraphDataset):
            nodes, edges, limits = rows.nodes, rows.edges, (self.max_nodes, self.max_edges)
            size = 64 if self.global_batch_size is None and limits == (None, None) else self.global_batch_size
        else:
            nodes, edges, limits = torch.ones(len(rows), dtype=torch.int64), None, (None, None)
            size = len(rows) if isinstance(rows, NodeDataset) else self.global_batch_size or 64
        return GraphBudgetBatchSampler(
            nodes,
            edges,
            size,
            max_nodes=limits[0],
            max_edges=limits[1],
            shuffle=shuffle,
            seed=self.seed,
            num_replicas=replicas,
            rank=rank,
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train_rows, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_rows, shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.test_rows, shuffle=False)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return a loader of equally large batches in the order of ``predict_ids``, within the budget of a process."""
        return in_memory_loader(self.predict_rows, self, self._predict_batch_size(), self.num_workers)

    def _predict_batch_size(self) -> int:
        rows, replicas = self.predict_rows, replicas_and_rank(self)[0]
        if isinstance(rows, NodeDataset):  # all nodes of a single graph, else about those of so many graphs
            usual = self.global_batch_size or 64
            return len(rows) if len(rows.graphs) == 1 else max(1, usual * len(rows) // len(rows.graphs) // replicas)
        room = [self.global_batch_size or 64]
        if isinstance(rows, GraphDataset):
            limits = (self.max_nodes, rows.nodes), (self.max_edges, rows.edges)
            room += [most // max(1, int(sizes.max())) for most, sizes in limits if most is not None]
        return max(1, min(room) // replicas)

    def _loader(self, rows: Items, shuffle: bool) -> ResumableLoader:
        return resumable_loader(rows, self._sampler(rows, shuffle), self, self.num_workers)
