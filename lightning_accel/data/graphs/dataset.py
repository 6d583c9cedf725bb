"""Data sets of graphs, fetched one batch at a time. Shapes: R items, N nodes of a batch, S nodes with targets."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data

from lightning_accel.data.sequences.batch import IGNORED


def has_target(y: Tensor) -> Tensor:
    """Return whether each entry of ``y``, (R,) or (R, K), has a class, or at least one number that is not NaN; (R,)."""
    y = y.view(len(y), -1)
    return y.isfinite().any(1) if y.is_floating_point() else y[:, 0] != IGNORED


class _Batches(Dataset[Any]):
    """Return the batch of a list of indices, by ``__getitems__``, which the DataLoader's fetcher prefers."""

    def __getitem__(self, rows: int | Sequence[int]) -> Batch:
        return self.__getitems__([rows] if isinstance(rows, int) else rows)

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        raise NotImplementedError


class GraphDataset(_Batches):
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

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        batch = Batch.from_data_list([self.graphs[row] for row in rows])
        if self.node_targets:
            y = batch.y.view(batch.num_nodes, -1)
            batch.target_index = has_target(y).nonzero()[:, 0]
        return batch


class NodeDataset(_Batches):
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

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        nodes = self.rows[torch.tensor(rows)]
        of = torch.searchsorted(self.stops, nodes, right=True)
        needed, place = of.unique(return_inverse=True)
        batch = Batch.from_data_list([self.graphs[number] for number in needed.tolist()])
        batch.target_index = nodes - self.starts[of] + batch.ptr[place]
        return batch


class NeighbourDataset(_Batches):
    """Sample the subgraph around the nodes at a list of indices, as one batch.

    From each seed node, ``num_neighbors[0]`` of its incoming edges are followed, from each new node
    ``num_neighbors[1]``, and so on, drawn uniformly without replacement. The batch holds **all** edges among the nodes
    that are found, so that triangles stay whole; PyG's ``NeighborLoader``, which needs pyg-lib or torch-sparse, calls
    this ``subgraph_type="induced"``. The seed nodes come first, ``target_index`` (S,) has their indices, and ``n_id``
    maps the nodes of the batch to those of the graph.

    Draws depend on ``seed`` and the seed nodes alone, so that a resumed run repeats them and validation is the same in
    each epoch; training batches have other seed nodes in each epoch, and so other neighbours.

    Args:
        graph: the graph; batches hold its node and edge attributes only.
        num_neighbors: number of neighbours to sample per hop, -1 for all.
        rows: (R,) nodes that are the items; by default all.
        seed: seed of the draws.
    """

    def __init__(self, graph: Data, num_neighbors: Sequence[int], rows: Tensor | None = None, seed: int = 0) -> None:
        self.graph = graph
        self.num_neighbors = list(num_neighbors)
        self.rows = torch.arange(graph.num_nodes or 0) if rows is None else rows
        self.seed = seed
        source, target = graph.edge_index
        self._edge = torch.argsort(target, stable=True)  # (M,) edges sorted by target
        self._source = source[self._edge]
        self._stop = torch.bincount(target, minlength=graph.num_nodes or 0).cumsum(0)
        self._place = torch.full((graph.num_nodes or 0,), -1)  # index of a node in the current batch
        attributes = [key for key, value in graph.items() if isinstance(value, Tensor) and "index" not in key]
        self._of_nodes = [key for key in attributes if graph.is_node_attr(key)]
        self._of_edges = [key for key in attributes if graph.is_edge_attr(key)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        listed = self.rows[torch.tensor(rows)]
        seeds, target_index = _unique_in_order(listed)
        nodes = self._sample_neighbors(seeds, self._generator(listed))
        self._place[nodes] = torch.arange(len(nodes))
        edges, end = self._incoming_edges(nodes)
        start = self._place[self._source[edges]]
        self._place[nodes] = -1
        inside = start >= 0
        part = Data(edge_index=torch.stack([start[inside], end[inside]]), n_id=nodes)
        for key in self._of_nodes:
            part[key] = self.graph[key][nodes]
        for key in self._of_edges:
            part[key] = self.graph[key][self._edge[edges[inside]]]
        batch = Batch.from_data_list([part])
        batch.target_index = target_index
        return batch

    def _generator(self, listed: Tensor) -> torch.Generator:
        digest = hashlib.blake2b(np.array([self.seed, *listed.tolist()], "<i8").tobytes(), digest_size=7).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little"))

    def _sample_neighbors(self, seeds: Tensor, generator: torch.Generator) -> Tensor:
        """Return the seeds, followed by the nodes that are sampled from them."""
        found, frontier = [seeds], seeds
        self._place[seeds] = 0
        for most in self.num_neighbors:
            edges, of = self._incoming_edges(frontier)
            if most >= 0:
                edges = edges[_sample_per_group(of, most, generator)]
            reached = self._source[edges].unique()
            frontier = reached[self._place[reached] < 0]
            self._place[frontier] = 0
            found.append(frontier)
        return torch.cat(found)

    def _incoming_edges(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions, among the sorted edges, of those that end at ``nodes``, and the index of that node."""
        stop = self._stop[nodes]
        start = torch.where(nodes > 0, self._stop[nodes - 1], 0)
        counts = stop - start
        of = torch.repeat_interleave(torch.arange(len(nodes)), counts)
        return torch.arange(len(of)) + (start - counts.cumsum(0) + counts)[of], of


def _unique_in_order(listed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct values in order and the index of each entry among them; samplers may repeat an item."""
    values, inverse = listed.unique(return_inverse=True)
    first = torch.full_like(values, len(listed)).scatter_reduce(0, inverse, torch.arange(len(listed)), "amin")
    order = first.argsort()
    return values[order], order.argsort()[inverse]


def _sample_per_group(of: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Draw, for each value of the sorted ``of``, at most ``most`` of its positions."""
    order = torch.argsort(of + torch.rand(len(of), generator=generator, dtype=torch.float64))
    counts = torch.bincount(of)
    rank = torch.arange(len(of)) - (counts.cumsum(0) - counts)[of]
    return order[rank < most]
