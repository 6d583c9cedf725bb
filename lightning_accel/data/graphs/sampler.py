"""Sampler of batches of graphs within a budget of nodes and edges. Shapes: R graphs, G batches of an epoch."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from lightning_accel.data.planned_sampler import Plan, PlannedSampler, integer_sizes, share_indices


class BudgetPlan:
    """Assign R items to random batches, none of which costs more than 1.

    Items are sorted by cost and split into strata with as many items as there are batches; each batch gets one random
    item of each stratum. Therefore every batch mixes large and small items, an item is equally likely to be batched
    with any item of similar size, and every epoch has the same number of batches. At most the room of one largest item
    of a batch is wasted. Where few items are so large that this wastes much, they get batches of their own.

    Args:
        cost: (R,) cost of each item, from 0 to 1, as a share of the budget of a batch.
        batch_size: largest number of items of a batch.
    """

    def __init__(self, cost: np.ndarray, batch_size: int) -> None:
        self._cost = cost
        costs = np.sort(cost)[::-1]
        whole = _fewest_batches(costs, batch_size)
        cuts = {int((costs > share).sum()) for share in (1 / 2, 1 / 4, 1 / 8, 1 / 16)} - {0, len(costs)}
        parts = [(_fewest_batches(costs[:cut], batch_size), _fewest_batches(costs[cut:], batch_size)) for cut in cuts]
        self._sizes, self._batches = [len(costs)], [whole]
        for cut, (large, small) in zip(cuts, parts, strict=True):
            if large + small < min(sum(self._batches), 0.6 * whole):  # mixing is worth two thirds more batches
                self._sizes, self._batches = [cut, len(costs) - cut], [large, small]
        self.smallest_batch = min(n // g for n, g in zip(self._sizes, self._batches, strict=True))

    def __len__(self) -> int:
        return sum(self._batches)

    def draw(self, seed: int, epoch: int, shuffle: bool) -> Plan:
        """Draw the batches of ``epoch``, each sorted by descending cost; the same for all if not ``shuffle``."""
        generator = np.random.default_rng([seed, epoch])
        mixed = generator.permutation(len(self._cost)) if shuffle else np.arange(len(self._cost))
        dearest_first = mixed[np.argsort(-self._cost[mixed], kind="stable")]
        batch, first_row, first_batch = [], 0, 0
        for rows, batches in zip(self._sizes, self._batches, strict=True):
            strata = -(-rows // batches)
            turn = np.tile(np.arange(batches), (strata, 1))
            turn = generator.permuted(turn, axis=1) if shuffle else turn
            batch.append(first_batch + turn.ravel()[:rows])
            first_row, first_batch = first_row + rows, first_batch + batches
        of = np.concatenate(batch)
        stops = np.bincount(of).cumsum()
        starts = np.r_[0, stops[:-1]]
        order = generator.permutation(len(stops)) if shuffle else np.arange(len(stops))
        return Plan(dearest_first[np.argsort(of, kind="stable")], starts[order], stops[order])


def _fewest_batches(costs: np.ndarray, batch_size: int) -> int:
    """Return the smallest number of batches that never cost more than 1; ``costs`` are in descending order."""
    least, most = -(-len(costs) // batch_size), len(costs)
    while least < most:
        middle = (least + most) // 2
        if costs[::middle].sum() <= 1 + 1e-9:  # the most expensive item of each stratum
            most = middle
        else:
            least = middle + 1
    return most


class GraphBudgetBatchSampler(PlannedSampler):
    """Sample batches of graphs within a budget of nodes and edges; each graph once per epoch.

    >>> sampler = GraphBudgetBatchSampler(np.array([5, 2, 4, 1]), max_nodes=8)
    >>> sorted(sorted(rows) for rows in sampler) in ([[0, 1], [2, 3]], [[0, 3], [1, 2]])
    True

    Iteration yields lists of indices, equally many on every process, for a data set that returns a whole batch.

    **Sizes are those of a global batch**, over all processes. The batches of an epoch depend on sizes, options,
    ``seed`` and epoch alone; each is then distributed so that all processes have about equally many graphs, nodes and
    edges. A run resumed on another number of processes sees the same graphs at each step. Batches mix large and small
    graphs (:class:`BudgetPlan`), and every epoch has the same number of batches.

    Args:
        nodes: (R,) number of nodes of each graph.
        edges: (R,) number of edges of each graph, columns of ``edge_index``; by default 0.
        batch_size: largest number of graphs of a batch; by default as many as the budget allows.
        max_nodes: largest number of nodes of a batch; each process gets about an equal share of them.
        max_edges: largest number of edges of a batch, likewise.
        shuffle: draw new batches for each epoch; False for the same batches in the same order.
        seed: seed of the batches.
        num_replicas: number of processes; by default that of torch.distributed at the start of the iteration.
        rank: rank of this process.

    Raises:
        ValueError: if there are no graphs, if one graph alone exceeds a budget, or, before iteration, if a batch has
            fewer graphs than there are processes; in ``load_state_dict``, if a run is resumed with other graphs or
            options.
    """

    _plans: BudgetPlan
    item_name = "graph"
    options = ("batch_size", "max_nodes", "max_edges", "shuffle")

    def __init__(
        self,
        nodes: Tensor | np.ndarray,
        edges: Tensor | np.ndarray | None = None,
        batch_size: int | None = None,
        *,
        max_nodes: int | None = None,
        max_edges: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.nodes = integer_sizes(nodes, "a batch needs graphs")
        self.edges = np.zeros_like(self.nodes) if edges is None else integer_sizes(edges, "a batch needs graphs")
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
