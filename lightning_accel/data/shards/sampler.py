"""Steps of an epoch over shards, distributed to processes. Shapes: N rows, B rows of a batch."""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from lightning_accel.data.samplers import RowPosition


class Step(NamedTuple):
    """Say which rows of an epoch a process takes: of the positions ``start`` to ``stop``, every ``replicas``-th."""

    epoch: int
    start: int
    stop: int
    replicas: int
    rank: int


class ShardSampler(DistributedSampler[Any]):
    """Yield the steps of an epoch. Implements :class:`lightning_accel.data.samplers.Resumable`.

    The position of a run is the number of rows that all processes have taken, so that it resumes on another number of
    processes. Rows that do not fill a batch on every process are dropped if ``shuffle``; each epoch drops others.
    Otherwise the last batches are smaller, and a process without a row where others have one takes its last one again,
    so that all take equally many steps, as with Lightning's sampler; or not, if ``exact``.

    Args:
        num_rows: N.
        batch_size: B, rows per process and step.
        digest: digest of the files and of the order.
        seed: seed of the order.
        shuffle: whether the steps train.
        exact: whether no row is taken twice, so that processes may differ in their number of steps by one.
        num_replicas: number of processes; by default that of torch.distributed.
        rank: rank of this process.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        digest: str,
        *,
        seed: int = 0,
        shuffle: bool = True,
        exact: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(range(num_rows), num_replicas or 1, rank or 0, shuffle, seed)  # type: ignore[arg-type]
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.digest = digest
        self.exact = exact
        self._fixed = None if num_replicas is None else (num_replicas, rank or 0)
        self._position = RowPosition(num_rows, batch_size)

    @property
    def dealt_to(self) -> tuple[int, int]:
        """Return the number of processes that take different rows, and the number of this one."""
        if self._fixed is not None:
            return self._fixed
        return (dist.get_world_size(), dist.get_rank()) if dist.is_available() and dist.is_initialized() else (1, 0)

    def deal_to(self, num_replicas: int, rank: int) -> None:
        """Distribute rows to ``num_replicas`` processes, for strategies in which several share the same rows."""
        self._fixed = num_replicas, rank

    def for_one_process(self) -> "ShardSampler":
        """Return a sampler of the same rows for a single process, from the first row on."""
        alone = copy.copy(self)
        alone._fixed, alone._position = (1, 0), RowPosition(self.num_rows, self.batch_size)
        return alone

    @property
    def position(self) -> RowPosition:
        return self._position.resized(self.batch_size * self.dealt_to[0])  # which may be known after a state is loaded

    @property
    def first_batch(self) -> int:
        return self.position.first_batch(self.epoch)

    def state_after(self, epoch: int, batches: int) -> dict[str, Any]:
        return self.position.state_after(epoch, batches) | {"seed": self.seed, "digest": self.digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start the epoch of ``state_dict`` after its rows.

        Raises:
            ValueError: if it was trained on other files, or in another order.
        """
        for name in ("seed", "digest"):
            if state_dict[name] != getattr(self, name):
                raise ValueError(
                    "the checkpoint was trained on other shards, or in another order: "
                    f"{name} {state_dict[name]} there, {getattr(self, name)} here. The digest is of the names of the "
                    "files, of their blocks and rows, and of what is mixed (shuffle_bytes, and global_batch_size of "
                    "sequences). Give those of its run, or begin a new one without ckpt_path"
                )
        self.position.load(state_dict)

    def __len__(self) -> int:
        replicas, rank = self.dealt_to
        if self.shuffle:
            return self.position.steps
        most = len(range(rank if self.exact else 0, self.num_rows, replicas))
        return -(-most // self.batch_size)

    def require_steps(self) -> None:
        """Raise a ValueError if the rows do not fill a step."""
        if self.shuffle and not self.position.steps:
            raise ValueError(
                f"{self.num_rows} rows train, fewer than batch_size={self.batch_size} on each of {self.dealt_to[0]} "
                "processes; give more rows, or a smaller batch_size"
            )

    def __iter__(self) -> Iterator[Step]:
        replicas, rank = self.dealt_to
        size = self.batch_size * replicas
        start = self.position.start(self.epoch) if self.shuffle else 0
        steps = (self.num_rows - start) // size if self.shuffle else len(self)
        if self.shuffle and not start:
            self.require_steps()
        for first in range(start, start + steps * size, size):
            yield Step(self.epoch, first, min(first + size, self.num_rows), replicas, rank)


def positions_of(step: Step, exact: bool) -> np.ndarray:
    """Return the positions (B,) int64 of the rows that a process takes in a step, see :class:`ShardSampler`."""
    own = range(step.start + step.rank, step.stop, step.replicas)
    most = len(range(step.start, step.stop, step.replicas))
    if len(own) == most or exact:
        return np.array(own, np.int64)
    again = step.start + step.rank + (most - 2) * step.replicas
    return np.array([*own, again if again >= 0 else step.rank % step.stop], np.int64)
