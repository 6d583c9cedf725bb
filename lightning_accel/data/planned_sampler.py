"""Base of samplers that plan global batches and distribute them to processes. Shapes: R items."""

import copy
import hashlib
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler


class Plan(NamedTuple):
    """Hold the batches of an epoch in the order of training."""

    rows: np.ndarray  # (R,) indices of the items, grouped by batch, the largest of each batch first
    starts: np.ndarray  # (G,) start of each batch in rows
    stops: np.ndarray  # (G,) end of each batch in rows


class Plans(Protocol):
    """Draw the plans of epochs."""

    smallest_batch: int  # number of items of the smallest batch

    def draw(self, seed: int, epoch: int, shuffle: bool) -> Plan: ...


class PlannedSampler(DistributedSampler[Any]):
    """Plan the global batches of an epoch from sizes, options, seed and epoch alone, and distribute each to processes.

    The position of a run is the number of finished batches, independent of the number of processes. Implements
    :class:`~lightning_accel.data.samplers.Resumable`.
    """

    item_name = "row"  # the name of an item in messages
    options: tuple[str, ...] = ()  # names of the attributes that a plan depends on, in addition to the seed

    _plans: Plans

    def __init__(
        self, sizes: tuple[np.ndarray, ...], shuffle: bool, seed: int, num_replicas: int | None, rank: int | None
    ) -> None:
        super().__init__(sizes[0], num_replicas or 1, rank or 0, shuffle, seed)  # type: ignore[arg-type]
        self._sizes = sizes
        self._fixed_replicas = None if num_replicas is None else (num_replicas, rank or 0)
        self._cached_plan: tuple[int, Plan] | None = None
        self._digests: dict[int, str] = {}
        self._first_batches: dict[int, int] = {}

    def _plan(self, epoch: int) -> Plan:
        if self._cached_plan is None or self._cached_plan[0] != epoch:
            self._cached_plan = epoch, self._plans.draw(self.seed, epoch, self.shuffle)
        return self._cached_plan[1]

    @property
    def first_batch(self) -> int:
        return self._first_batches.get(self.epoch, 0)

    def state_after(self, epoch: int, batches: int) -> dict[str, Any]:
        """Return the position among the global batches, independent of the number of processes."""
        return {
            "seed": self.seed,
            "epoch": epoch,
            "batches": batches % len(self),  # a CombinedLoader may cycle this loader several times per epoch
            "options": self._options(),
            "plan": self._digest(epoch),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start the epoch of ``state_dict`` after its finished batches.

        Raises:
            ValueError: if its batches differ from those of this sampler.
        """
        there = {"seed": state_dict["seed"], **state_dict["options"]}
        here = {"seed": self.seed, **self._options()}
        differing = [
            f"{name}={there.get(name)} there, {here[name]} here" for name in here if there.get(name) != here[name]
        ]
        if differing or state_dict["plan"] != self._digest(state_dict["epoch"]):
            raise ValueError(
                f"the checkpoint was trained on other batches than {type(self).__name__} makes here: "
                f"{'; '.join(differing) or f'other sizes of the {self.item_name}s'}. Give it what that run had; sizes "
                "are those of all processes together, so they stay when the number of processes changes"
            )
        self._first_batches = {state_dict["epoch"]: state_dict["batches"]}

    def _options(self) -> dict[str, int | bool | None]:
        return {f"{self.item_name}s": len(self._sizes[0])} | {name: getattr(self, name) for name in self.options}

    def _digest(self, epoch: int) -> str:
        """Digest the batches of an epoch and the sizes of their items."""
        if epoch not in self._digests:
            plan = self._plan(epoch)
            parts = (plan.rows, plan.starts, *(size[plan.rows] for size in self._sizes))
            joined = b"".join(part.astype("<i8").tobytes() for part in parts)
            self._digests = {epoch: hashlib.blake2b(joined, digest_size=16).hexdigest()}
        return self._digests[epoch]

    def deal_to(self, num_replicas: int, rank: int) -> None:
        """Distribute each batch to ``num_replicas`` processes, for strategies in which several share the same samples.

        Raises:
            ValueError: if the sampler was made with another ``num_replicas`` or ``rank``.
        """
        if self._fixed_replicas not in (None, (num_replicas, rank)):
            raise ValueError(
                f"this {type(self).__name__} was made with num_replicas={self._fixed_replicas[0]} and "
                f"rank={self._fixed_replicas[1]}, "
                f"but the strategy deals rows to {num_replicas} processes, of which this is number {rank}. Leave both "
                "out"
            )
        self._fixed_replicas = num_replicas, rank

    def for_one_process(self) -> "PlannedSampler":
        """Return a copy that yields the whole batches, from the first one on."""
        alone = copy.copy(self)
        alone._fixed_replicas, alone._first_batches = (1, 0), {}
        return alone

    def _replicas_and_rank(self) -> tuple[int, int]:
        """Return the number of processes and the rank of this one; raise a ValueError if a batch is too small."""
        assigned = self._fixed_replicas
        if assigned is None:
            assigned = (
                (dist.get_world_size(), dist.get_rank()) if dist.is_available() and dist.is_initialized() else (1, 0)
            )
        self.num_replicas, self.rank = assigned
        if self._plans.smallest_batch < assigned[0]:
            limits = [f"{name}={getattr(self, name)}" for name in self.options if name.startswith(("batch_", "max_"))]
            raise ValueError(
                f"each of {assigned[0]} processes needs a {self.item_name} of every batch, but one has "
                f"{self._plans.smallest_batch}: "
                f"{', '.join(limits)} are those of all processes together; raise them, or give more {self.item_name}s"
            )
        return assigned


def share_indices(rows: int, replicas: int, rank: int) -> np.ndarray:
    """Return the indices of a process's items in a batch sorted by size, taken in a snake order to balance sizes."""
    there, back = range(rank, rows, 2 * replicas), range(2 * replicas - 1 - rank, rows, 2 * replicas)
    return np.sort(np.r_[np.array(there, np.int64), np.array(back, np.int64)])


def integer_sizes(sizes: Any, what: str) -> np.ndarray:
    """Convert ``sizes`` to an array (R,) int64.

    Raises:
        ValueError: if they are not whole numbers of 0 or more, or there are none.
    """
    found = np.asarray(sizes.cpu() if hasattr(sizes, "cpu") else sizes)
    if found.ndim != 1 or not len(found) or not np.issubdtype(found.dtype, np.integer) or found.min() < 0:
        raise ValueError(
            f"{what}; got {found.dtype} of shape {found.shape}" + (f" with {found.min()}" if found.size else "")
        )
    return found.astype(np.int64)
