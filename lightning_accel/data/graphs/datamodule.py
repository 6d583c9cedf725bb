"""Graphs from files, from data sets of PyG, or generated.

Shapes: B graphs of a batch, N nodes, M edges, F and D features of nodes and edges, K targets, S nodes with targets, n
nodes of one graph.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data, Dataset

from lightning_accel.data.bounds import require_shares
from lightning_accel.data.digest import require_same_data
from lightning_accel.data.graphs.dataset import GraphDataset, NeighbourDataset, NodeDataset
from lightning_accel.data.graphs.features import Features, Scale, apply_features, features_of, fit_scale, scale_features
from lightning_accel.data.graphs.files import FileGraphs, read_graphs
from lightning_accel.data.graphs.leakage import doubts_of_graphs
from lightning_accel.data.graphs.options import (
    GeneratedGraphs,
    GraphBatches,
    GraphLayout,
    GraphSplitOptions,
    require_choices,
    require_effect,
    require_sizes,
)
from lightning_accel.data.graphs.sampler import GraphBudgetBatchSampler
from lightning_accel.data.graphs.sharded import ShardedGraphs
from lightning_accel.data.graphs.splits import (
    GraphSplits,
    TaskName,
    dataset_splits,
    file_splits,
    generated_splits,
    keep_targets,
    require_labels,
)
from lightning_accel.data.graphs.substructures import SUBSTRUCTURES
from lightning_accel.data.graphs.tasks import Level, TargetKind
from lightning_accel.data.in_memory import in_memory_loader, resumable_loader
from lightning_accel.data.samplers import ResumableLoader, replicas_and_rank
from lightning_accel.data.shards.files import is_sharded
from lightning_accel.data.shards.loader import datamodule_loader
from lightning_accel.data.shards.options import ShardOptions
from lightning_accel.data.shards.splits import Split
from lightning_accel.data.tables.files import existing_file
from lightning_accel.ops.bounds import require_integers
from lightning_accel.ops.names import list_of_names
from lightning_accel.ops.options import options_of, read_options
from lightning_accel.ops.renames import renamed_arguments

Items = GraphDataset | NodeDataset | NeighbourDataset


class GraphDataModule(L.LightningDataModule):
    """Load graphs from files, data sets of PyG or generated tasks as :class:`torch_geometric.data.Batch`.

    **Batches** have ``x`` (N, F) float32, ones (N, 1) if nodes have no features; ``edge_index`` (2, M); ``edge_attr``,
    (M, D) float32 features or (M,) int64 types, if edges have any; ``batch`` (N,), ``ptr`` (B + 1,); and ``y``. If
    graphs have targets, ``y`` is (B,) classes, or (B,) or (B, K) numbers, not standardized. If nodes have targets,
    ``y`` is (N,) or (N, K), and **``target_index`` (S,) lists the nodes that count**: a loss is
    ``loss(out[i], y[i])`` with ``i = batch.target_index``, and ``predict`` returns ``out[i]``.

    **Files.** ``.csv`` and ``.parquet`` files have one edge per row, of one graph: ``source`` and ``target``,
    optionally ``type``, and numeric columns as edge features. ``layout.nodes_path`` is a table with ``node``, the
    target and node features; its text columns are one-hot encoded. ``.jsonl`` files have one graph per line,
    ``{"edges": [[0, 1], [1, 2]], "num_nodes": 3, "x": [[0.5], [1], [2]], "edge_attr": [0, 1], "y": "ring", "id":
    "a7"}``; only ``edges`` is required, and no further field but the target is allowed; whole numbers in ``edge_attr``
    are types, lists or fractions are features. ``.g6`` files (graph6) have one graph per line, its target after a
    blank. The reverse of each edge is added where a file lacks it; give directed graphs as a data set of PyG. Features
    are standardized to mean 0 and variance 1 over the training data, except those of only zeros and ones.

    **More than fits in memory.** A folder, a pattern or a URL of Parquet, Arrow or JSON lines files (see
    :func:`lightning_accel.data.shard_loader`) has one graph per row, with the columns of a ``.jsonl`` file. It is read
    ahead of training. The first run reads all of it once, for the statistics, and keeps these in
    ``layout.shards.cache_dir``. Files whose path or name has the word ``train``, ``val``
    (``valid``, ``validation``, ``dev``) or ``test`` are for what it says; else whole blocks of files are the splits.

    **Data sets** of PyG are not standardized. Whole numbers in ``x`` are one-hot encoded; whole numbers in
    ``edge_attr``, or ``edge_type`` if there is no ``edge_attr``, are edge types. A single graph with node targets is
    split by its ``train_mask``, ``val_mask`` and ``test_mask``; without a ``val_mask``, ``split.val_share`` of the
    training nodes validate. Other masks are an error.

    **Splits** consist of whole graphs, stratified by class; a single graph with node targets is split by nodes. Its
    nodes may lack their target, or be NaN in some of several. The same graphs and ``seed`` give the same splits.

    After ``setup``: ``level``; ``target_kind``; ``num_features``, F; ``edge_dim``, D, None unless edges have features;
    ``num_relations``, None unless edges have types; ``num_classes`` and ``class_names``, None unless targets are
    classes; ``num_targets``, K, None unless targets are numbers, with ``target_mean`` and ``target_std`` (K,) of the
    training targets, in the units of ``y``, the latter 1 for constant targets, and ``target_names``, if they have
    names; ``feature_names`` and ``relation_names``, for tables only; ``predict_ids``, in the order of ``predict``: ids
    of graphs, or of nodes, as ``graph:node`` if there are several graphs; and ``predict_columns``, a DataFrame of the
    targets of the test graphs of a file, where these are predicted.

    Args:
        path: file of graphs or of edges, or a folder, pattern or URL of files; by default, ``task`` is used.
        task: a generated task, if there is no ``path`` or ``dataset``: ``csl`` (the default), 150 circular skip links
            with ten skips in five folds; ``substructures``, counts of seven small graphs in random graphs; ``karate``,
            Zachary's club and its two factions. See ``tasks``.
        dataset: data set of PyG, such as ``torch_geometric.datasets.TUDataset``; with ``split.val_dataset`` and
            ``split.test_dataset``, the training graphs.
        transform: transform of PyG, called once for each graph, in ``setup``. Positional encodings that it adds by the
            usual names, those of ``AddRandomWalkPE`` and ``AddLaplacianEigenvectorPE``, become features of nodes, after
            those of ``x``.
        layout: where targets are, and how files store graphs, see :class:`lightning_accel.data.GraphLayout`.
        generated: which graphs of ``substructures`` there are, see :class:`lightning_accel.data.GeneratedGraphs`.
        split: what validates and tests, see :class:`lightning_accel.data.GraphSplitOptions`.
        batches: budgets of nodes and edges, and sampled neighbours, see :class:`lightning_accel.data.GraphBatches`.
        global_batch_size: graphs per step, or seed nodes with ``batches.num_neighbors``, over all processes; by
            default 64, or as many as ``batches.max_nodes`` and ``max_edges`` allow. A single graph with node
            targets is one batch.
        seed: seed of the generated graphs, the split, the order and the neighbours.
        num_workers: workers that load batches.
        predict_path: file to predict, in the format of ``path``, with or without targets; by default the test graphs,
            or all nodes of a single graph. Where ``path`` is a folder, this is one, too.

    Raises:
        FileNotFoundError: if a file does not exist.
        TypeError: in ``setup``, if a data set does not hold :class:`torch_geometric.data.Data`.
        ValueError: if an option is out of range, or has no effect; in ``setup``, if data are not as described, or a
            graph exceeds ``batches.max_nodes`` or ``max_edges``; in ``load_state_dict``, if the checkpoint was
            trained on other graphs.

    Example:
        >>> data = GraphDataModule(task="csl", global_batch_size=15)
        >>> data.setup("fit")
        >>> data.num_classes
        10
        >>> next(iter(data.train_dataloader())).num_graphs
        15
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
    predict_columns: Any = None  # a DataFrame
    _predict_ids: list[str] | None = None

    @renamed_arguments(
        batch_size="global_batch_size",
        **{
            name: f"{group}.{name}"
            for group, held in (
                ("layout", GraphLayout()),
                ("generated", GeneratedGraphs()),
                ("split", GraphSplitOptions()),
                ("batches", GraphBatches()),
            )
            for name in options_of(held)
        },
    )
    def __init__(
        self,
        path: str | Path | None = None,
        task: TaskName | None = None,
        *,
        dataset: Dataset | None = None,
        transform: Callable[..., Any] | None = None,
        layout: GraphLayout = GraphLayout(),
        generated: GeneratedGraphs = GeneratedGraphs(),
        split: GraphSplitOptions = GraphSplitOptions(),
        global_batch_size: int | None = None,
        batches: GraphBatches = GraphBatches(),
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
        layout, generated = read_options(GraphLayout, layout), read_options(GeneratedGraphs, generated)
        split, batches = read_options(GraphSplitOptions, split), read_options(GraphBatches, batches)
        groups = {"layout": layout, "generated": generated, "split": split, "batches": batches}
        given = {f"{group}.{name}": value for group, held in groups.items() for name, value in options_of(held).items()}
        names = tuple(list_of_names(layout.target or ()))
        require_effect(self.task or named[0], {**given, "layout.target": names or None, "predict_path": predict_path})
        require_choices(given)
        require_sizes(global_batch_size, batches)
        require_integers(0, seed=seed, num_workers=num_workers)
        named_shares = {"val_share": split.val_share, "test_share": split.test_share}
        self.named_shares = [name for name, share in named_shares.items() if share is not None]
        usual = (0.2, 0.5) if self.task == "substructures" else (0.1, 0.2)  # the former of Chen et al. 2020
        val, test = (usual[i] if share is None else share for i, share in enumerate(named_shares.values()))
        self.shares = (val, test)
        require_shares(*self.shares)
        if self.task == "csl" and not 0 <= split.fold < 5:
            raise ValueError(f"split.fold of csl must be from 0 to 4; got {split.fold}")
        if self.task == "substructures" and (unknown := set(names) - set(SUBSTRUCTURES)):
            raise ValueError(
                f"layout.target must be among {', '.join(SUBSTRUCTURES)}; got {', '.join(sorted(unknown))}"
            )
        self.is_sharded = path is not None and is_sharded(path)
        self.path, self.predict_path, nodes = path, predict_path, layout.nodes_path
        if not self.is_sharded:
            self.path, self.predict_path, nodes = (
                None if file is None else existing_file(file) for file in (path, predict_path, layout.nodes_path)
            )
        elif idle := [
            name
            for name, value in {"transform": transform, **given}.items()
            if value is not None and (name in ("transform", "layout.nodes_path") or "batches." in name)
        ]:
            raise ValueError(
                f"{', '.join(idle)} would have no effect on {path}, a folder or URL of files with a graph a row; leave "
                "it out"
            )
        if nodes is not None and self.predict_path is not None:
            raise ValueError(
                "predict_path has no effect beside layout.nodes_path: all nodes of the graph are predicted"
            )
        self.layout = replace(layout, nodes_path=nodes, shards=read_options(ShardOptions, layout.shards))
        self.datasets = [part for part in (dataset, split.val_dataset, split.test_dataset) if part is not None]
        self.transform = transform
        self.counted = names or tuple(SUBSTRUCTURES)
        self.fold = split.fold
        self.family = generated.family
        usual_number = 5000 if self.task == "substructures" else 0
        self.num_graphs = usual_number if generated.num_graphs is None else generated.num_graphs
        self.global_batch_size = global_batch_size
        self.max_nodes, self.max_edges = batches.max_nodes, batches.max_edges
        self.num_neighbors = None if batches.num_neighbors is None else list(batches.num_neighbors)
        self.seed = seed
        self.num_workers = num_workers

    @property
    def predict_ids(self) -> list[str]:
        """Return the names of what is predicted, in order; those of a folder are read when they are first asked for."""
        if self._predict_ids is None:
            self._predict_ids = self._graphs.ids(self._predicted)
        return self._predict_ids

    @predict_ids.setter
    def predict_ids(self, names: list[str]) -> None:
        self._predict_ids = names

    @property
    def train_dataset(self) -> Sequence[Data] | None:
        """Return the training graphs, after ``setup``; None for a single graph with node targets, and for folders."""
        rows = getattr(self, "train_rows", None)
        return rows.graphs if isinstance(rows, GraphDataset) else None

    def prepare_data(self) -> None:
        """List the blocks of a folder and collect its statistics, in one process per machine."""
        if self.is_sharded:
            self._sharded_graphs()

    def _sharded_graphs(self) -> ShardedGraphs:
        assert self.path is not None
        level, kind = self.layout.level or "graph", self.layout.target_kind or "classification"
        if kind == "multilabel":
            raise ValueError(
                f"layout.target_kind=multilabel is for graphs in memory, and {self.path} is read in parts; set it to "
                "regression, or give one file"
            )
        return ShardedGraphs(self.path, replace(self.layout, level=level, target_kind=kind), self.shares, self.seed)

    def setup(self, stage: str | None = None) -> None:
        if hasattr(self, "train_rows") or hasattr(self, "_graphs"):  # the Trainer calls setup once per stage
            return
        if self.is_sharded:
            self._setup_shards()
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
                "batches.num_neighbors needs one graph whose nodes have targets; "
                f"{where} has {len(splits.graphs)} graphs and level {splits.level}. Set global_batch_size, "
                "or batches.max_nodes and max_edges"
            )
        sizes = self.global_batch_size, self.max_nodes, self.max_edges
        if splits.of_nodes and self.num_neighbors is None and any(sizes):
            raise ValueError(
                f"global_batch_size, batches.max_nodes and max_edges would have no effect on the one graph of {where}, "
                "which is a batch by itself; set batches.num_neighbors for batches of parts of it"
            )
        rows = [self._rows(splits, part) for part in (splits.train, splits.val, splits.test)]
        self._sampler(rows[0], shuffle=True)  # raises for a graph beyond a budget
        self.predict_rows, self.predict_ids = self._rows_to_predict(splits)
        if self.predict_path is not None:
            assert isinstance(self.predict_path, Path)
            self.predict_rows, self.predict_ids = self._file_to_predict(self.predict_path, features, scales)
        elif self.path is not None and splits.level == "graph":
            self.predict_columns = splits.targets_of_test(self.layout.columns)
        self.train_rows, self.val_rows, self.test_rows = rows
        if self.path is not None and self.trainer is not None:
            rank_zero_info(f"{self.path}: {splits.describe()}")

    def _setup_shards(self) -> None:
        found = self._sharded_graphs()
        statistics, layout = found.statistics, found.layout
        assert layout.level is not None
        assert layout.target_kind is not None
        self._predicted = found.splits["test"] if self.predict_path is None else found.to_predict(self.predict_path)
        self.target_kind = layout.target_kind
        self.num_features, self.edge_dim = statistics.num_features, statistics.edge_dim
        self.num_relations = statistics.num_relations
        self.feature_names = self.relation_names = None
        self.class_names = statistics.classes
        self.num_classes = None if statistics.classes is None else len(statistics.classes)
        self.target_mean, self.target_std = statistics.target_mean, statistics.target_std
        self.num_targets = None if statistics.target_mean is None else len(statistics.target_mean)
        self.target_names = list(layout.columns) if len(layout.columns) == self.num_targets else None
        self._digest = found.digest
        self.level = layout.level
        self._graphs = found

    def _source_name(self) -> str:
        if self.task is not None:
            return f"the task {self.task}"
        if self.path:
            return str(self.path)
        given: Any = self.datasets[0]
        return f"the dataset of {len(given)} graphs" if isinstance(given, list | tuple) else f"the dataset {given}"

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
            assert isinstance(self.path, Path)
            read = read_graphs(self.path, self.layout)
            kind = self.layout.target_kind or "classification"
            splits = file_splits(read, self.path, kind, self.layout.columns, self.shares, self.seed)
            for doubt in doubts_of_graphs(splits, read.feature_names, self.path):
                rank_zero_warn(doubt)
            source = list(splits.graphs)
            splits.graphs = [self._transform_graph(graph) for graph in source]
            return splits, read, source
        given = [list(dataset) for dataset in self.datasets]
        parts = [[self._transform_graph(graph) for graph in dataset] for dataset in given]
        # a data set's own transform may be random, so that its graphs have no digest
        drawn = [getattr(dataset, "transform", None) is not None for dataset in self.datasets]
        source = [None if own else graph for own, part in zip(drawn, given, strict=True) for graph in part]
        where = self._source_name()
        options = self.layout.level, self.layout.target_kind, self.shares, self.seed, self.fold, self.named_shares
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
        self.num_features, self.edge_dim = features.width, features.edge_dim
        self.num_relations = features.num_relations
        self.feature_names, self.relation_names = (
            (None, None) if read is None else (read.feature_names, read.relation_names)
        )
        self.class_names, self.target_names = splits.class_names, splits.target_names
        self.num_classes = None if splits.class_names is None else len(splits.class_names)
        self.num_targets = self.target_mean = self.target_std = None
        if splits.kind != "classification":
            target = splits.training_targets()
            if splits.kind == "multilabel":
                for number, graph in enumerate(splits.graphs):
                    require_labels(graph.y, f"graph {number} of {self._source_name()}")
            self.num_targets = target.shape[1]
            if lacking := target.isnan().all(0).nonzero().flatten().tolist():
                raise ValueError(
                    f"target {lacking[0]}, counted from 0, of {self._source_name()} has no value in what trains; leave "
                    "it out, or change the split"
                )
            if splits.kind == "multilabel":
                return
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

    def _shard_loader(self, split: Split | Literal["predict"]) -> DataLoader[Any]:
        replicas = replicas_and_rank(self)[0]
        size = self.global_batch_size or 64
        if size % replicas:
            raise ValueError(
                f"global_batch_size={size} must be a multiple of the {replicas} processes, each of which takes as many "
                "graphs of a folder of files"
            )
        blocks = self._predicted if split == "predict" else self._graphs.splits[split]
        reading = self._graphs.reading(with_target=split != "predict")
        return datamodule_loader(
            self, blocks, reading, size // replicas, self.num_workers, self.layout.shards, self.seed, split
        )

    def train_dataloader(self) -> DataLoader[Any]:
        if self.is_sharded:
            return self._shard_loader("train")
        return self._loader(self.train_rows, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        if self.is_sharded:
            return self._shard_loader("val")
        return self._loader(self.val_rows, shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        if self.is_sharded:
            return self._shard_loader("test")
        return self._loader(self.test_rows, shuffle=False)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return a loader of equally large batches in the order of ``predict_ids``, within the budget of a process."""
        if self.is_sharded:
            return self._shard_loader("predict")
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
