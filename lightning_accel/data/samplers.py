"""Samplers that a stopped run continues from."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@runtime_checkable
class Resumable(Protocol):
    """A sampler that can begin an epoch after some of its batches."""

    epoch: int

    @property
    def first_batch(self) -> int:
        """How many batches are left out when this epoch is iterated next."""

    def state_after(self, epoch: int, batches: int) -> dict[str, Any]:
        """What a checkpoint holds once this process is done with ``batches`` of ``epoch``."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the epoch of ``state_dict`` after its batches."""

    def set_epoch(self, epoch: int) -> None: ...


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

    @property
    def first_batch(self) -> int:
        return self.start.get(self.epoch, 0) // self.rows_of_a_step

    def state_after(self, epoch: int, batches: int) -> dict[str, Any]:
        return {"epoch": epoch, "rows": batches * self.rows_of_a_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resume_at(state_dict["epoch"], state_dict["rows"])

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
    """A loader with a sampler that is :class:`Resumable`, whose position the Trainer keeps in its checkpoints.

    Without ``progress``, batches count that were handed out: those that workers fetched in advance do not, one that
    training failed on does. Set it to :func:`progress_of` a Trainer, and the Trainer's count holds, also where it makes
    its loaders before it reads the checkpoint.
    """

    progress: Callable[[], tuple[int, int]] | None = None  # returns the epoch, and its batches that are done
    _handed_out: tuple[int, int] | None = None
    _loaded_epoch: int | None = None  # until it has been entered

    def state_dict(self) -> dict[str, Any]:
        done = self._handed_out if self.progress is None else self.progress()
        return self.sampler.state_after(*done) if done is not None and isinstance(self.sampler, Resumable) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict and isinstance(self.sampler, Resumable):
            self.sampler.load_state_dict(state_dict)
            self._loaded_epoch = state_dict["epoch"]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator, so that workers start with the first batch: the Trainer asks for an iterator before it tells the
        # sampler which epoch it is.
        if not isinstance(self.sampler, Resumable):
            yield from super().__iter__()
            return
        if self._loaded_epoch is not None and self.sampler.epoch < self._loaded_epoch:
            return  # a Trainer with max_steps, resumed after the end of an epoch, would take a batch more of it
        if self._loaded_epoch is not None:
            told = self.sampler.epoch
            self.sampler.set_epoch(self._loaded_epoch)
            if not self.sampler.first_batch:  # else max_steps ended within it, and the Trainer counts it as done
                self.sampler.set_epoch(told)
        if self.progress is not None and self._loaded_epoch is None:
            self.sampler.load_state_dict(self.sampler.state_after(*self.progress()))
        self._loaded_epoch = None
        epoch, done = self.sampler.epoch, self.sampler.first_batch
        self._handed_out = epoch, done
        for batch in super().__iter__():
            done += 1
            self._handed_out = epoch, done
            yield batch


def progress_of(trainer: L.Trainer) -> Callable[[], tuple[int, int]]:
    """For :attr:`ResumableLoader.progress`: what ``trainer`` has trained on."""

    def progress() -> tuple[int, int]:
        loop: Any = trainer.fit_loop
        epochs, done = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current.processed
        # Between the last batch of an epoch and the first of the next, the old count stands. An epoch that max_steps
        # ends is counted as processed, though not all of it was.
        within = 0 < done < trainer.num_training_batches and epochs.started
        return (epochs.started - 1, done) if within else (epochs.started if done else epochs.processed, 0)

    return progress
