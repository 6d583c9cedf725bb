"""Samplers that a stopped run continues from."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class ResumableSampler(DistributedSampler[Any]):
    """Row numbers in an order that depends on ``seed`` and epoch alone, each row once an epoch, over all processes.

    Its position is rank-free, the number of rows that all processes together have consumed in an epoch, so a run
    continues on another number of processes without repeating or leaving out a row. The rows that do not fill a batch
    on every process wait for the next epoch's order.

    Args:
        dataset: of known length.
        batch_size: rows per process and step.
        num_replicas: processes.
        rank: this process.
        seed: of the order.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed, drop_last=True)
        self.batch_size = batch_size
        self.start: dict[int, int] = {}

    def resume_at(self, epoch: int, rows: int) -> None:
        """Leave out the first ``rows`` rows, of all processes, when ``epoch`` is run."""
        self.start = {epoch: rows}

    @property
    def rows_of_a_step(self) -> int:
        return self.batch_size * self.num_replicas

    def __len__(self) -> int:
        return len(self.dataset) // self.rows_of_a_step * self.batch_size  # type: ignore[arg-type]  # its length is known

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(
            len(self.dataset),  # type: ignore[arg-type]
            generator=torch.Generator().manual_seed(self.seed + self.epoch),
        )[self.start.pop(self.epoch, 0) :]
        steps = len(order) // self.rows_of_a_step
        batches = order[: steps * self.rows_of_a_step].view(steps, self.num_replicas, self.batch_size)
        return iter(batches[:, self.rank].flatten().tolist())


class ResumableLoader(DataLoader[Any]):
    """A loader with a :class:`ResumableSampler`, whose position the Trainer keeps in its checkpoints.

    Only the Trainer knows how many of the batches, some fetched in advance, it has trained on: set ``progress`` to a
    function that returns the epoch and the number of its batches that this process is done with.
    """

    progress: Callable[[], tuple[int, int]] | None = None

    def state_dict(self) -> dict[str, int]:
        if self.progress is None or not isinstance(self.sampler, ResumableSampler):
            return {}
        epoch, batches = self.progress()
        return {"epoch": epoch, "rows": batches * self.sampler.rows_of_a_step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        if state_dict and isinstance(self.sampler, ResumableSampler):
            self.sampler.resume_at(state_dict["epoch"], state_dict["rows"])
