"""Data sets of graphs, fetched one batch at a time. Shapes: R items, N nodes of a batch, S nodes with targets."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from lightning_accel.data.sequence_batch import IGNORED


def has_target(y: Tensor) -> Tensor:
    """Return whether each entry of ``y``, (R,) or (R, K), has a class, or at least one number that is not NaN; (R,)."""
    y = y.view(len(y), -1)
    return y.isfinite().any(1) if y.is_floating_point() else y[:, 0] != IGNORED


class GraphDataset(Dataset[Any]):
    """Collate the graphs at a list of indices into one :class:`torch_geometric.data.Batch`.

    Args:
        graphs: graphs with the same attributes.
        node_targets: whether ``y`` has an entry per node; batches then hold ``target_index`` (S,), the nodes with one.
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
        """Return the batch of items ``rows``; the DataLoader's fetcher prefers it to ``__getitem__``."""
        batch = Batch.from_data_list([self.graphs[row] for row in rows])
        if self.node_targets:
            y = batch.y.view(batch.num_nodes, -1)
            batch.target_index = has_target(y).nonzero()[:, 0]
        return batch


class NodeDataset(Dataset[Any]):
    """Collate the whole graphs of the nodes at a list of indices into one batch.

    Batches hold ``target_index`` (S,), the index of each listed node among the nodes of the batch, in order.

    Args:
        graphs: graphs with the same attributes.
        rows: (R,) indices of the items among the concatenated nodes of all graphs; by default all nodes.
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
