"""Loader of batches of similar length. Shapes: B sequences, T steps of the longest."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from lightning_accel.data.length_sampler import Chunk, LengthBatchSampler
from lightning_accel.data.samplers import ResumableLoader
from lightning_accel.data.sequence_batch import IGNORED, SequenceBatch, collate_sequences


def length_batch_loader(
    dataset: Dataset[Any] | Sequence[Any],
    sampler: LengthBatchSampler,
    collate_fn: Callable[[list[Any]], Any] = collate_sequences,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> ResumableLoader:
    """Make a loader of the batches of ``sampler``, for the Trainer on any number of processes, or for your own loop.

    A resumed run continues with the next batch. Two cases need the ``ExactResume`` callback for that: a scheduler that
    reads ``trainer.estimated_stepping_batches``, and ``max_steps`` with checkpoints at the ends of epochs. A complete
    example for any data set of sequences:

        sampler = LengthBatchSampler([len(sequence) for sequence in dataset], batch_size=64)
        loader = length_batch_loader(dataset, sampler, collate_fn=my_collate)
        trainer.fit(model, loader)

    Args:
        dataset: data set with ``len`` and integer indices; its ``__getitems__``, if any, gets the indices of a batch.
        sampler: sampler of as many sequences.
        collate_fn: collates a list of items, or the result of ``__getitems__``. With ``chunk_steps`` it must return a
            :class:`~lightning_accel.data.sequence_batch.SequenceBatch`, which the loader splits into chunks.
        num_workers: workers that load batches.
        pin_memory: whether to pin memory, for copies to a GPU.

    Raises:
        ValueError: if ``dataset`` and ``sampler`` differ in length.
    """
    if len(dataset) != len(sampler.lengths):  # type: ignore[arg-type]  # a dataset with a length
        raise ValueError(
            f"the sampler knows the lengths of {len(sampler.lengths)} sequences, the dataset holds {len(dataset)}; "  # type: ignore[arg-type]
            "make the sampler from the lengths of this dataset"
        )
    return ResumableLoader(
        _Batches(dataset, collate_fn),
        batch_size=None,
        sampler=sampler,
        collate_fn=_identity_collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
    )


class _Batches(Dataset[Any]):
    """Load batches of ``dataset`` by a list of indices, or by a chunk."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: list[int] | int | Chunk) -> Any:
        rows = key.rows if isinstance(key, Chunk) else key
        if isinstance(rows, int):
            raise TypeError(
                "this loader needs its LengthBatchSampler, but found another sampler in its place, as "
                "Trainer(overfit_batches=...) puts there. Take limit_train_batches, and "
                "LengthBatchSampler(..., shuffle=False) for the same batches in each epoch"
            )
        fetch = getattr(self.dataset, "__getitems__", None)
        batch = self.collate_fn(fetch(rows) if fetch else [self.dataset[row] for row in rows])
        return _slice_steps(batch, key) if isinstance(key, Chunk) else batch


def _slice_steps(batch: Any, chunk: Chunk) -> SequenceBatch:
    """Return the steps of ``chunk``; the target of a sequence is in its last chunk, and unknown in earlier ones."""
    if not isinstance(batch, SequenceBatch):
        raise TypeError(
            f"chunk_steps needs a collate_fn that makes a SequenceBatch; got a {type(batch).__name__}. "
            "Return lightning_accel.data.sequence_batch.SequenceBatch(x, lengths, target)"
        )
    lengths = (batch.lengths - chunk.start).clamp(0, chunk.stop - chunk.start)
    x, target = batch.x[:, chunk.start : chunk.stop], batch.target
    if x.shape[1] == 0:  # all sequences of this process have ended, but not those of another
        x = F.pad(x, (0,) * (2 * x.ndim - 3) + (1,))
    if target is not None:
        target = _slice_target(target, batch, chunk, x.shape[1])
    return SequenceBatch(x, lengths, target, torch.tensor(chunk.carried))


def _slice_target(target: Tensor, batch: SequenceBatch, chunk: Chunk, steps: int) -> Tensor:
    of_steps = target.ndim == 2 and not target.is_floating_point()
    if of_steps:
        part = target[:, chunk.start : chunk.stop]
        return F.pad(part, (0, steps - part.shape[1]), value=IGNORED)
    ends = (batch.lengths > chunk.start) | (chunk.start == 0)
    ends &= batch.lengths <= chunk.stop
    unknown = torch.nan if target.is_floating_point() else IGNORED
    return target.masked_fill(~ends.view(-1, *[1] * (target.ndim - 1)), unknown)


def _identity_collate(batch: Any) -> Any:
    return batch
