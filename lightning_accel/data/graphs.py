"""Graphs, of the user's own or generated. Shapes: B graphs, N nodes of a batch, M edges, F features, K targets."""

from typing import Any, get_args

import lightning as L
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Data

from lightning_accel.data.graph_rows import GraphRows, NodeRows
from lightning_accel.data.graph_sampler import GraphBudgetBatchSampler
from lightning_accel.data.graph_splits import (
    USUAL_NUMBER,
    USUAL_SHARES,
    GraphSplits,
    TargetKind,
    TaskName,
    attributes_of,
    generated_splits,
    require_task,
    training_targets,
    with_features,
)
from lightning_accel.data.graph_tasks import Family, Level
from lightning_accel.data.in_memory import (
    already_a_batch,
    pins_memory,
    require_loading_options,
    row_loader,
    silence_advice_on_workers,
)
from lightning_accel.data.samplers import ResumableLoader, progress_of


class GraphDataModule(L.LightningDataModule):
    """Graphs of a task that tells layers apart; batches are :class:`torch_geometric.data.Batch`."""

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
    predict_ids: list[str]

    def __init__(
        self,
        task: TaskName = "csl",
        *,
        fold: int = 0,
        family: Family = "erdos_renyi",
        level: Level = "graph",
        num_graphs: int | None = None,
        batch_size: int | None = None,
        max_nodes: int | None = None,
        max_edges: int | None = None,
        val_share: float | None = None,
        test_share: float | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        require_loading_options(batch_size or 1, seed, num_workers)
        require_task(task)
        self.task = task
        self.fold = fold
        self.family = family
        self.wanted_level = level
        self.num_graphs = USUAL_NUMBER.get(task, 0) if num_graphs is None else num_graphs
        usual = USUAL_SHARES.get(task, (0.1, 0.2))
        self.shares = (
            usual[0] if val_share is None else val_share,
            usual[1] if test_share is None else test_share,
        )
        self.batch_size = batch_size
        self.max_nodes = max_nodes
        self.max_edges = max_edges
        self.seed = seed
        self.num_workers = num_workers

    def setup(self, stage: str | None = None) -> None:
        if hasattr(self, "train_rows"):  # a trainer calls setup once a stage
            return
        splits = generated_splits(
            self.task, self.num_graphs, self.shares, self.seed, self.fold, self.family, self.wanted_level
        )
        with_features(splits.graphs)
        self._describe(splits)
        self.train_rows, self.val_rows, self.test_rows = (
            self._rows(splits, part) for part in (splits.train, splits.val, splits.test)
        )
        if splits.of_nodes:
            self.predict_rows, self.predict_ids = NodeRows(splits.graphs), splits.ids
        elif splits.level == "node":
            test = [splits.graphs[i] for i in splits.test.tolist()]
            self.predict_rows = NodeRows(test)
            self.predict_ids = [
                f"{splits.ids[i]}:{node}"
                for i, graph in zip(splits.test.tolist(), test, strict=True)
                for node in range(graph.num_nodes or 0)
            ]
        else:
            self.predict_rows = GraphRows([splits.graphs[i] for i in splits.test.tolist()])
            self.predict_ids = [splits.ids[i] for i in splits.test.tolist()]

    def _rows(self, splits: GraphSplits, part: np.ndarray) -> Dataset[Any]:
        if splits.of_nodes:
            return NodeRows(splits.graphs, torch.from_numpy(part))
        return GraphRows([splits.graphs[i] for i in part.tolist()], splits.level == "node")

    def _describe(self, splits: GraphSplits) -> None:
        self.level, self.target_kind = splits.level, splits.kind
        for name, value in attributes_of(splits.graphs).items():
            setattr(self, name, value)
        self.class_names, self.target_names = splits.class_names, splits.target_names
        self.num_classes = None if splits.class_names is None else len(splits.class_names)
        self.num_targets = self.target_mean = self.target_std = None
        if splits.kind == "regression":
            target = training_targets(splits)
            self.num_targets = target.shape[1]
            self.target_mean = target.mean(dim=0).tolist()
            std = target.std(dim=0, correction=0)
            self.target_std = torch.where(std > 0, std, 1).tolist()

    def _sampler(self, rows: Any, shuffle: bool) -> GraphBudgetBatchSampler:
        replicas, rank = self._deal()
        deal = {"shuffle": shuffle, "seed": self.seed, "num_replicas": replicas, "rank": rank}
        if isinstance(rows, NodeRows):
            return GraphBudgetBatchSampler([1] * len(rows), batch_size=len(rows), **deal)
        size = 64 if self.batch_size is None and self.max_nodes is None and self.max_edges is None else self.batch_size
        return GraphBudgetBatchSampler(
            rows.nodes, rows.edges, size, max_nodes=self.max_nodes, max_edges=self.max_edges, **deal
        )

    def _deal(self) -> tuple[int, int]:
        """How many processes batches are dealt to, and which of them this is."""
        trainer: Any = self.trainer
        # not the world size: several processes may work on the same rows
        deal = None if trainer is None else trainer.distributed_sampler_kwargs
        return (1, 0) if deal is None else (deal["num_replicas"], deal["rank"])

    def train_dataloader(self) -> DataLoader[Any]:
        loader = self._loader(self.train_rows, shuffle=True)
        if self.trainer is not None:
            loader.progress = progress_of(self.trainer)
        return loader

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_rows, shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.test_rows, shuffle=False)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Batches in the order of ``predict_ids``."""
        return row_loader(self.predict_rows, self, self.batch_size or 64, self.num_workers)

    def _loader(self, rows: Any, shuffle: bool) -> ResumableLoader:
        silence_advice_on_workers(self.num_workers)
        return ResumableLoader(
            rows,
            batch_size=None,
            sampler=self._sampler(rows, shuffle),
            num_workers=self.num_workers,
            collate_fn=already_a_batch,
            pin_memory=pins_memory(self),
            persistent_workers=self.num_workers > 0,
        )
