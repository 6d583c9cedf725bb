"""Graphs that are fetched a batch at a time. Shapes: R graphs, N nodes of a batch, M edges, F features, B graphs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from lightning_accel.data.sequence_batch import IGNORED


def has_target(y: Tensor) -> Tensor:
    """(rows,) whether ``y``, (rows,) or (rows, K), has a class there, or any of its numbers; the others are NaN."""
    y = y.view(len(y), -1)
    return y.isfinite().any(1) if y.is_floating_point() else y[:, 0] != IGNORED


class GraphRows(Dataset[Any]):
    """Graphs, of which a list of numbers gives one :class:`torch_geometric.data.Batch`.

    Args:
        graphs: with the same attributes.
        node_targets: whether ``y`` is of nodes; batches then hold ``target_index`` (S,), nodes whose ``y`` is known.
    """

    def __init__(self, graphs: Sequence[Data], node_targets: bool = False) -> None:
        self.graphs = graphs
        self.node_targets = node_targets
        self.nodes = torch.tensor([graph.num_nodes for graph in graphs])
        self.edges = torch.tensor([graph.num_edges for graph in graphs])

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, rows: int | Sequence[int]) -> Batch:
        return self.__getitems__([rows] if isinstance(rows, int) else rows)

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        """The batch of graphs ``rows``; the DataLoader's fetcher prefers it to ``__getitem__``."""
        batch = Batch.from_data_list([self.graphs[row] for row in rows])
        if self.node_targets:
            y = batch.y.view(batch.num_nodes, -1)
            batch.target_index = has_target(y).nonzero()[:, 0]
        return batch


class NodeRows(Dataset[Any]):
    """Nodes of some graphs, of which a list of numbers gives a batch of the whole graphs that they are in.

    Batches hold ``target_index`` (S,), the place of each listed node among those of the batch, in order.

    Args:
        graphs: with the same attributes.
        rows: (R,) numbers among the nodes of all graphs, laid end to end; by default all.
    """

    def __init__(self, graphs: Sequence[Data], rows: Tensor | None = None) -> None:
        self.graphs = graphs
        sizes = torch.tensor([graph.num_nodes for graph in graphs])
        self.stops = sizes.cumsum(0)
        self.starts = self.stops - sizes
        self.rows = torch.arange(int(sizes.sum())) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: int | Sequence[int]) -> Batch:
        return self.__getitems__([rows] if isinstance(rows, int) else rows)

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        nodes = self.rows[torch.tensor(rows)]
        of = torch.searchsorted(self.stops, nodes, right=True)
        needed, place = of.unique(return_inverse=True)
        batch = Batch.from_data_list([self.graphs[number] for number in needed.tolist()])
        batch.target_index = nodes - self.starts[of] + batch.ptr[place]
        return batch
