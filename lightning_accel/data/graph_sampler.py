"""Sampler of batches of graphs within a budget of nodes and edges, for any number of processes. Shapes: R graphs."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from lightning_accel.data.graph_plan import BudgetPlan
from lightning_accel.data.planned_sampler import Plan, PlannedSampler, integer_sizes, share_indices


class GraphBudgetBatchSampler(PlannedSampler):
    """Sample batches of graphs within a budget of nodes and edges; each graph once per epoch.

    >>> sampler = GraphBudgetBatchSampler([5, 2, 4, 1], max_nodes=8)
    >>> sorted(sorted(rows) for rows in sampler) in ([[0, 1], [2, 3]], [[0, 3], [1, 2]])
    True

    Iteration yields lists of indices, equally many on every process. For a data set that returns a whole batch for a
    list of indices, use ``DataLoader(dataset, sampler=sampler, batch_size=None)``; with a
    :class:`~lightning_accel.data.samplers.ResumableLoader`, a run resumed in mid-epoch continues with the next batch.

    **Sizes are those of a global batch**, over all processes. The batches of an epoch depend on sizes, options,
    ``seed`` and epoch alone; each is then distributed so that all processes have about equally many graphs, nodes and
    edges. A run resumed on another number of processes sees the same graphs at each step. Batches mix large and small
    graphs (:class:`~lightning_accel.data.graph_plan.BudgetPlan`), and every epoch has the same number of batches.

    Args:
        nodes: (R,) number of nodes of each graph.
        edges: (R,) number of edges of each graph, columns of ``edge_index``.
        batch_size: largest number of graphs of a batch.
        max_nodes: largest number of nodes of a batch; each process gets about an equal share of them.
        max_edges: largest number of edges of a batch, likewise.
        shuffle: draw new batches for each epoch; False for the same batches in the same order.
        seed: seed of the batches.
        num_replicas: number of processes; by default that of torch.distributed at the start of the iteration.
        rank: rank of this process.

    Raises:
        ValueError: if sizes are negative or there are none, if no limit is given or one is below 1, if one graph alone
            exceeds a budget, or, before iteration, if a batch has fewer graphs than there are processes; in
            ``load_state_dict``, if a run is resumed with other graphs or options.
    """

    item_name = "graph"
    options = ("batch_size", "max_nodes", "max_edges", "shuffle")

    def __init__(
        self,
        nodes: Sequence[int] | Tensor | np.ndarray,
        edges: Sequence[int] | Tensor | np.ndarray | None = None,
        batch_size: int | None = None,
        *,
        max_nodes: int | None = None,
        max_edges: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        limits = {"batch_size": batch_size, "max_nodes": max_nodes, "max_edges": max_edges}
        _require_limits(limits, edges is not None)
        self.nodes = integer_sizes(nodes, "nodes are whole numbers of 0 or more, one for each graph")
        self.edges = (
            np.zeros_like(self.nodes)
            if edges is None
            else integer_sizes(edges, "edges are whole numbers of 0 or more, one for each graph")
        )
        if len(self.edges) != len(self.nodes):
            raise ValueError(f"nodes and edges must be of as many graphs; got {len(self.nodes)} and {len(self.edges)}")
        super().__init__((self.nodes, self.edges), shuffle, seed, num_replicas, rank)
        self.batch_size = batch_size
        self.max_nodes = max_nodes
        self.max_edges = max_edges
        cost = np.zeros(len(self.nodes))
        for sizes, most, name in ((self.nodes, max_nodes, "nodes"), (self.edges, max_edges, "edges")):
            if most is not None:
                if sizes.max() > most:
                    raise ValueError(
                        f"max_{name}={most} holds no graph of {sizes.max()} {name}, as graph {sizes.argmax()}, counted "
                        f"from 0, has; give at least as many, or leave the {(sizes > most).sum()} larger graphs out"
                    )
                cost = np.maximum(cost, sizes / most)
        self._plans = BudgetPlan(cost, batch_size or len(self.nodes))

    def _draw(self, epoch: int) -> Plan:
        return self._plans.draw(self.seed, epoch, self.shuffle)

    @property
    def _smallest_batch(self) -> int:
        return self._plans.smallest_batch

    def __len__(self) -> int:
        """Return the number of batches of each process in an epoch."""
        self._replicas_and_rank()
        return len(self._plans)

    def __iter__(self) -> Iterator[list[int]]:
        plan = self._plan(self.epoch)
        replicas, rank = self._replicas_and_rank()
        for batch in range(self._first_batches.pop(self.epoch, 0), len(plan.starts)):
            rows = plan.rows[plan.starts[batch] : plan.stops[batch]]
            yield rows[share_indices(len(rows), replicas, rank)].tolist()


def _require_limits(limits: dict[str, int | None], has_edges: bool) -> None:
    for name, value in limits.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more; got {value}")
    if all(value is None for value in limits.values()):
        raise ValueError("give batch_size, max_nodes or max_edges, of all processes together")
    if limits["max_edges"] is not None and not has_edges:
        raise ValueError("max_edges needs edges, the number of each graph's; got none")
