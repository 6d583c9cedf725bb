"""Batches of graphs within a budget of nodes and edges, for any number of processes. Shapes: R graphs."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from lightning_accel.data.graph_plan import BudgetPlan
from lightning_accel.data.length_plan import Plan


class GraphBudgetBatchSampler(DistributedSampler[Any]):
    """Lists of graph numbers; every graph once an epoch, and every process as many lists as any other.

    >>> sampler = GraphBudgetBatchSampler([5, 2, 4, 1], max_nodes=8)
    >>> sorted(sorted(rows) for rows in sampler) in ([[0, 1], [2, 3]], [[0, 3], [1, 2]])
    True

    Where a dataset gives a whole batch for a list of numbers, ``DataLoader(dataset, sampler=sampler, batch_size=None)``
    makes a loader of it; as a :class:`~lightning_accel.data.samplers.ResumableLoader` a run resumed in mid-epoch goes
    on with the next batch.

    **Sizes are those of a global batch**, all processes together. An epoch's batches depend on sizes, options, ``seed``
    and epoch alone, and then each is dealt to the processes there are, so that all have about as many graphs, nodes and
    edges. A run may go on with other processes: its steps see the same graphs. Batches hold large and small graphs
    alike (:class:`~lightning_accel.data.graph_plan.BudgetPlan`), and every epoch has as many.

    Args:
        nodes: (R,) of each graph.
        edges: (R,) of each graph, columns of ``edge_index``.
        batch_size: most graphs of a batch.
        max_nodes: most nodes of a batch. A process holds about its share of them.
        max_edges: most edges of a batch, likewise.
        shuffle: draw batches anew for each epoch; without it they come in one order.
        seed: of the draw.
        num_replicas: processes; by default those of torch.distributed, when iteration begins.
        rank: this process.

    Raises:
        ValueError: if sizes are negative or there are none, if no limit is given or one is below 1, if a graph alone is
            beyond a budget, or, before iteration, if a batch has fewer graphs than there are processes; in
            ``load_state_dict``, if a run is resumed with other graphs or options.
    """

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
        self.nodes = _checked(nodes, "nodes")
        self.edges = np.zeros_like(self.nodes) if edges is None else _checked(edges, "edges")
        if len(self.edges) != len(self.nodes):
            raise ValueError(f"nodes and edges must be of as many graphs; got {len(self.nodes)} and {len(self.edges)}")
        super().__init__(self.nodes, num_replicas or 1, rank or 0, shuffle, seed)  # type: ignore[arg-type]
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
        self._given = None if num_replicas is None else (num_replicas, rank or 0)
        self._drawn: tuple[int, Plan] | None = None
        self._digests: dict[int, str] = {}
        self._first: dict[int, int] = {}

    def _plan(self, epoch: int) -> Plan:
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self._plans.draw(self.seed, epoch, self.shuffle)
        return self._drawn[1]

    @property
    def first_batch(self) -> int:
        return self._first.get(self.epoch, 0)

    def state_after(self, epoch: int, batches: int) -> dict[str, Any]:
        """Position in the batches of all processes, whose number it does not depend on."""
        return {
            "seed": self.seed,
            "epoch": epoch,
            "batches": batches % len(self),  # of a loader that goes round more than once beside a longer one
            "options": self._options(),
            "plan": self._digest(epoch),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the epoch of ``state_dict`` after the batches that are done.

        Raises:
            ValueError: if its batches are not those that this sampler makes.
        """
        there, here = ({"seed": state["seed"], **state["options"]} for state in (state_dict, self.state_after(0, 0)))
        differing = [f"{name}={there.get(name)} there, {now} here" for name, now in here.items() if there[name] != now]
        if differing or state_dict["plan"] != self._digest(state_dict["epoch"]):
            raise ValueError(
                "the checkpoint was trained on other batches than GraphBudgetBatchSampler makes here: "
                f"{'; '.join(differing) or 'graphs of other sizes'}. Give it what that run had; sizes are those of all "
                "processes together, so they stay when the number of processes changes"
            )
        self._first = {state_dict["epoch"]: state_dict["batches"]}

    def _options(self) -> dict[str, int | bool | None]:
        names = "batch_size", "max_nodes", "max_edges", "shuffle"
        return {"graphs": len(self.nodes)} | {name: getattr(self, name) for name in names}

    def _digest(self, epoch: int) -> str:
        """Of the batches of an epoch and the sizes of their graphs."""
        if epoch not in self._digests:
            plan = self._plan(epoch)
            parts = (plan.rows, plan.starts, self.nodes[plan.rows], self.edges[plan.rows])
            joined = b"".join(part.astype("<i8").tobytes() for part in parts)
            self._digests = {epoch: hashlib.blake2b(joined, digest_size=16).hexdigest()}
        return self._digests[epoch]

    def deal_to(self, num_replicas: int, rank: int) -> None:
        """Deal each batch to so many processes, as a strategy wants where several work on the same rows.

        Raises:
            ValueError: if the sampler was made for others.
        """
        if self._given not in (None, (num_replicas, rank)):
            raise ValueError(
                f"this GraphBudgetBatchSampler was made with num_replicas={self._given[0]} and rank={self._given[1]}, "
                f"but the strategy deals rows to {num_replicas} processes, of which this is number {rank}. Leave both "
                "out"
            )
        self._given = num_replicas, rank

    def _deal(self) -> tuple[int, int]:
        """Processes, and which this is."""
        deal = self._given
        if deal is None:
            deal = (dist.get_world_size(), dist.get_rank()) if dist.is_available() and dist.is_initialized() else (1, 0)
        self.num_replicas, self.rank = deal
        if self._plans.fewest_rows < deal[0]:
            raise ValueError(
                f"each of {deal[0]} processes needs a graph of every batch, but one has {self._plans.fewest_rows}: "
                f"batch_size={self.batch_size}, max_nodes={self.max_nodes} and max_edges={self.max_edges} are those of "
                "all processes together; raise them, or give more graphs"
            )
        return deal

    def __len__(self) -> int:
        """Batches of each process in an epoch."""
        self._deal()
        return len(self._plans)

    def __iter__(self) -> Iterator[list[int]]:
        plan = self._plan(self.epoch)
        replicas, rank = self._deal()
        for batch in range(self._first.pop(self.epoch, 0), len(plan.starts)):
            rows = plan.rows[plan.starts[batch] : plan.stops[batch]]
            yield rows[_share(len(rows), replicas, rank)].tolist()


def _share(rows: int, replicas: int, rank: int) -> np.ndarray:
    """Places in a batch, which is sorted, of one process's rows: dealt to and fro, so that all have alike sizes."""
    place, turn = np.arange(rows) % (2 * replicas), np.arange(rows)
    return turn[(place == rank) | (place == 2 * replicas - 1 - rank)]


def _checked(sizes: Any, name: str) -> np.ndarray:
    found = np.asarray(sizes.cpu() if isinstance(sizes, Tensor) else sizes)
    if found.ndim != 1 or not len(found) or not np.issubdtype(found.dtype, np.integer) or found.min() < 0:
        raise ValueError(
            f"{name} are whole numbers of 0 or more, one for each graph; got {found.dtype} of shape {found.shape}"
            + (f" with {found.min()}" if found.size else "")
        )
    return found.astype(np.int64)


def _require_limits(limits: dict[str, int | None], has_edges: bool) -> None:
    for name, value in limits.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more; got {value}")
    if all(value is None for value in limits.values()):
        raise ValueError("give batch_size, max_nodes or max_edges, of all processes together")
    if limits["max_edges"] is not None and not has_edges:
        raise ValueError("max_edges needs edges, the number of each graph's; got none")
