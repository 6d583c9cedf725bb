"""Samplers and a loader whose position checkpoints store, so that a run resumes in mid-epoch."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


@runtime_checkable
class Resumable(Protocol):
    """Describe a sampler that can start an epoch after some of its batches."""

    epoch: int

    @property
    def first_batch(self) -> int:
        """Return how many batches the next iteration of this epoch skips."""

    def state_after(self, epoch: int, batches: int) -> dict[str, Any]:
        """Return the state to store in a checkpoint after ``batches`` batches of ``epoch``."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start the epoch of ``state_dict`` after the batches that it counts."""

    def set_epoch(self, epoch: int) -> None: ...


class ResumableSampler(DistributedSampler[Any]):
    """Sample items in an order that depends on ``seed`` and epoch alone, each once per epoch over all processes.

    Its position is the number of items that all processes together have consumed in an epoch, so that a run resumes on
    another number of processes without repeating or skipping an item. Items that do not fill a batch on every process
    are dropped; each epoch's order drops others.

    Args:
        dataset: data set with a length.
        batch_size: samples per process and step.
        num_replicas: number of processes.
        rank: rank of this process.
        seed: seed of the order.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed, drop_last=True)
        self.batch_size = batch_size
        self._position = RowPosition(len(dataset), batch_size * num_replicas)  # type: ignore[arg-type]  # its length is known

    @property
    def position(self) -> "RowPosition":
        return self._position.resized(self.batch_size * self.num_replicas)  # callbacks change the batch size

    def resume_at(self, epoch: int, rows: int) -> None:
        """Skip the first ``rows`` items, counted over all processes, when ``epoch`` is iterated."""
        self.position.load({"epoch": epoch, "rows": rows})

    @property
    def first_batch(self) -> int:
        return self.position.first_batch(self.epoch)

    def state_after(self, epoch: int, batches: int) -> dict[str, Any]:
        return self.position.state_after(epoch, batches)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position.load(state_dict)

    def __len__(self) -> int:
        return self.position.steps * self.batch_size

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(
            len(self.dataset),  # type: ignore[arg-type]
            generator=torch.Generator().manual_seed(self.seed + self.epoch),
        )[self.position.start(self.epoch) :]
        steps = len(order) // self.position.size
        batches = order[: steps * self.position.size].view(steps, self.num_replicas, self.batch_size)
        return iter(batches[:, self.rank].flatten().tolist())


class RowPosition:
    """Count the rows that all processes together have taken in an epoch, in steps of ``size`` rows.

    A run that resumes with steps of another size starts where the other stopped. It counts what it has not done of an
    epoch in its own steps, and its batches such that the last one has the number that it has in a whole epoch.

    Args:
        num_rows: rows of an epoch, of which those that do not fill a step are dropped.
        size: rows of a step, over all processes.
    """

    def __init__(self, num_rows: int, size: int) -> None:
        self.num_rows = num_rows
        self.size = size
        self._loaded: dict[str, Any] | None = None  # until the first iteration after it
        self._resumed: tuple[int, int, int] | None = None  # epoch, rows and batches of it
        self._begun: int | None = None  # the last epoch that was iterated since

    def resized(self, size: int) -> "RowPosition":
        """Return the position, in steps of another size if the batch size or the number of processes has changed."""
        if size != self.size:
            self.size, self._resumed = size, None
            if self._loaded is not None:
                self.load(self._loaded)
        return self

    @property
    def steps(self) -> int:
        return self.num_rows // self.size

    def load(self, state: dict[str, Any]) -> None:
        epoch, rows = state["epoch"], state["rows"]
        left = (self.num_rows - rows) // self.size
        if rows and not left:  # what is left does not fill a step
            self._resumed = epoch + 1, 0, 0
        elif state.get("size") == self.size:
            self._resumed = epoch, rows, state["batches"]
        else:
            self._resumed = epoch, rows, self.steps - left
        self._loaded, self._begun = state, None

    @property
    def epoch(self) -> int:
        """Return the epoch with which a run goes on from a loaded state."""
        return 0 if self._resumed is None else self._resumed[0]

    def first_batch(self, epoch: int) -> int:
        """Return the number of the batch that the next iteration of ``epoch`` begins with."""
        resumed = self._resumed
        return 0 if resumed is None or resumed[0] != epoch or self._begun == epoch else resumed[2]

    def start(self, epoch: int) -> int:
        """Return how many rows an iteration of ``epoch`` skips, which begins."""
        resumed, begun = self._resumed, self._begun
        self._loaded, self._begun = None, epoch
        return 0 if resumed is None or resumed[0] != epoch or begun == epoch else resumed[1]

    def state_after(self, epoch: int, batches: int) -> dict[str, Any]:
        first, rows = (self._resumed[2], self._resumed[1]) if self._resumed and self._resumed[0] == epoch else (0, 0)
        if not first and batches > self.steps > 0:
            batches %= self.steps  # a CombinedLoader may cycle a loader several times per epoch
        rows = rows + (batches - first) * self.size if batches >= first else batches * self.size
        if rows and not (self.num_rows - rows) // self.size:  # over, though smaller steps may fit into what is left
            epoch, rows, batches = epoch + 1, 0, 0
        return {"epoch": epoch, "rows": rows, "batches": batches, "size": self.size}


class ResumableLoader(DataLoader[Any]):
    """Load batches of a :class:`Resumable` sampler, whose position the Trainer stores in its checkpoints.

    Without ``progress``, the position counts yielded batches: batches prefetched by workers are not counted, a batch
    that training failed on is. Set it to :func:`progress_of` a Trainer to use the Trainer's count instead, which also
    holds where the Trainer makes its loaders before it reads the checkpoint.
    """

    progress: Callable[[], tuple[int, int]] | None = None  # returns the epoch and the number of its finished batches
    _position: tuple[int, int] | None = None
    _loaded_epoch: int | None = None  # epoch of a loaded state, until its iteration starts

    def state_dict(self) -> dict[str, Any]:
        done = self._position if self.progress is None else self.progress()
        return self.sampler.state_after(*done) if done is not None and isinstance(self.sampler, Resumable) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict and isinstance(self.sampler, Resumable):
            self.sampler.load_state_dict(state_dict)
            self._loaded_epoch = state_dict["epoch"]
            position = getattr(self.sampler, "position", None)
            if isinstance(position, RowPosition):
                self._loaded_epoch = position.epoch
                if (
                    isinstance(self.progress, TrainerProgress)
                    and state_dict.get("size", position.size) != position.size
                ):
                    self.progress.renumber(position.epoch, position.first_batch(position.epoch), position.steps)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator, so that workers start with the first batch: the Trainer makes an iterator before it sets the
        # epoch of the sampler.
        if not isinstance(self.sampler, Resumable):
            yield from super().__iter__()
            return
        if self._loaded_epoch is not None and self.sampler.epoch < self._loaded_epoch:
            return  # else a Trainer with max_steps, resumed after the end of an epoch, trains on one more batch
        if self._loaded_epoch is not None:
            current_epoch = self.sampler.epoch
            self.sampler.set_epoch(self._loaded_epoch)
            if not self.sampler.first_batch:  # else max_steps ended within the epoch, which the Trainer counts as done
                self.sampler.set_epoch(current_epoch)
        if self.progress is not None and self._loaded_epoch is None:
            self.sampler.load_state_dict(self.sampler.state_after(*self.progress()))
        self._loaded_epoch = None
        epoch, done = self.sampler.epoch, self.sampler.first_batch
        self._position = epoch, done
        for batch in super().__iter__():
            done += 1
            self._position = epoch, done
            yield batch


def replicas_and_rank(datamodule: L.LightningDataModule) -> tuple[int, int]:
    """Return the number of processes that batches are distributed to, and the rank of this one among them."""
    trainer: Any = datamodule.trainer
    # not the world size: several processes may share the same samples
    sampler_kwargs = None if trainer is None else trainer.distributed_sampler_kwargs
    return (1, 0) if sampler_kwargs is None else (sampler_kwargs["num_replicas"], sampler_kwargs["rank"])


class TrainerProgress:
    """Read, or renumber, the batches of an epoch that a Trainer has finished."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer

    def __call__(self) -> tuple[int, int]:
        """Return the epoch and the number of its finished batches."""
        loop: Any = self._trainer.fit_loop
        epochs, done = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current.processed
        # The Trainer resets its count of batches with the first batch of the next epoch, not after the last of one. An
        # epoch that max_steps ends is counted as processed, even if it was not finished.
        within = 0 < done < self._trainer.num_training_batches and epochs.started
        return (epochs.started - 1, done) if within else (epochs.started if done else epochs.processed, 0)

    def renumber(self, epoch: int, batches: int, steps: int) -> None:
        """Count the batches of a checkpoint whose steps had another size in those of this run.

        Args:
            epoch: epoch with which the run goes on.
            batches: how many of its ``steps`` are finished.
            steps: number of batches of an epoch.
        """
        loop: Any = self._trainer.fit_loop
        current = loop.epoch_loop.batch_progress.current
        is_over = epoch >= loop.epoch_progress.current.started  # the epoch that the Trainer counts the batches of
        added = (steps if is_over else batches) - current.processed if current.processed else 0
        for name in ("ready", "started", "processed", "completed"):  # the last one less, if saved before it was counted
            setattr(current, name, getattr(current, name) + added)


def progress_of(trainer: L.Trainer) -> TrainerProgress:
    """Return what :attr:`ResumableLoader.progress` calls to read the progress of ``trainer``."""
    return TrainerProgress(trainer)
