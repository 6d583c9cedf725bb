"""Data set of concatenated sequences.

Shapes: R sequences, N steps of all, F features, K values of a target; B sequences of a batch, T steps of the longest.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_accel.data.sequences.batch import IGNORED, SequenceBatch
from lightning_accel.data.sequences.length_sampler import Chunk


class SequenceDataset(Dataset[SequenceBatch]):
    """Gather batches from R concatenated sequences of unequal lengths.

    One gather takes a quarter of the time of padding sequence by sequence with one feature per step, and the same time
    with 64. An index is a list of sequences, or a single one; the result is always a :class:`SequenceBatch`.

    Args:
        steps: (N, F) floating, or (N,) integers, which batches hold as int64.
        lengths: (R,) int64, sums to N.
        target: (R,) or (R, K), one for each sequence.
        labels: (N,) integers, one for each step, instead of ``target``.

    Raises:
        ValueError: if the sizes do not match, or both ``target`` and ``labels`` are given.
    """

    def __init__(
        self, steps: Tensor, lengths: Tensor, target: Tensor | None = None, labels: Tensor | None = None
    ) -> None:
        if int(lengths.sum()) != len(steps):
            raise ValueError(f"lengths must add up to the number of steps, {len(steps)}; got {int(lengths.sum())}")
        if target is not None and labels is not None:
            raise ValueError("give target, one for each sequence, or labels, one for each step; got both")
        for name, given, needed in (("target", target, len(lengths)), ("labels", labels, len(steps))):
            if given is not None and len(given) != needed:
                raise ValueError(f"{name} must have length {needed}; got {len(given)}")
        self.steps = steps
        self.lengths = lengths
        self.starts = lengths.cumsum(0) - lengths
        self.target = target
        self.labels = labels

    def select(self, rows: Sequence[int] | np.ndarray | Tensor) -> "SequenceDataset":
        """Return the sequences ``rows``, in that order, without copying their steps."""
        chosen = torch.as_tensor(rows, dtype=torch.int64)
        part = SequenceDataset.__new__(SequenceDataset)
        part.steps, part.labels = self.steps, self.labels
        part.starts, part.lengths = self.starts[chosen], self.lengths[chosen]
        part.target = None if self.target is None else self.target[chosen]
        return part

    def without_targets(self) -> "SequenceDataset":
        part = self.select(range(len(self)))
        part.target = part.labels = None
        return part

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int | Sequence[int] | Chunk) -> SequenceBatch:
        if isinstance(index, Chunk):
            return self._chunk(index)
        return self.__getitems__([index] if isinstance(index, int) else index)

    def __getitems__(self, indices: Sequence[int]) -> SequenceBatch:
        """Return the batch of items ``indices``; the DataLoader's fetcher prefers it to ``__getitem__``."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return self._gather(rows, 0, self.lengths[rows])

    def _chunk(self, chunk: Chunk) -> SequenceBatch:
        """Return some steps of a batch; the target of a sequence is in its last chunk, and unknown in earlier ones.

        Without targets, the target is the step that follows each, which a forecasting model could not take from ``x``
        at the end of a chunk.
        """
        rows = torch.tensor(chunk.rows, dtype=torch.int64)
        left = self.lengths[rows] - chunk.start
        batch = self._gather(rows, chunk.start, left.clamp(0, chunk.stop - chunk.start))
        if self.target is not None:
            ends = ((left > 0) | (chunk.start == 0)) & (self.lengths[rows] <= chunk.stop)
            unknown = torch.nan if self.target.is_floating_point() else IGNORED
            target = self.target[rows]
            batch = batch._replace(target=target.masked_fill(~ends.view(-1, *[1] * (target.ndim - 1)), unknown))
        elif self.labels is None:
            batch = batch._replace(target=self._next_steps(rows, chunk.start, batch.x.shape[1]))
        return batch._replace(carried=torch.tensor(chunk.carried, dtype=torch.int64))

    def _next_steps(self, rows: Tensor, first: int, steps: int) -> Tensor:
        """Return the steps that follow ``steps`` steps from ``first`` on; NaN or IGNORED after a sequence's end."""
        position = first + 1 + torch.arange(steps)
        there = position < self.lengths[rows][:, None]  # (B, T)
        following = self.steps[(self.starts[rows][:, None] + position).where(there, 0)]
        following = following if following.is_floating_point() else following.long()
        nothing = torch.nan if following.is_floating_point() else IGNORED
        return following.masked_fill(~there.view(there.shape + (1,) * (following.ndim - 2)), nothing)

    def _gather(self, rows: Tensor, first: int, lengths: Tensor) -> SequenceBatch:
        """Return the batch of ``lengths`` (B,) steps of the sequences ``rows`` (B,), from step ``first`` on."""
        starts = self.starts[rows] + first
        # At least one step, if only padding: recurrent kernels reject empty batches
        position = torch.arange(max(1, int(lengths.max())))
        inside = position < lengths[:, None]  # (B, T)
        where = (starts[:, None] + position).where(inside, 0)
        if not len(self.steps):  # all sequences are empty
            x = self.steps.new_zeros(*where.shape, *self.steps.shape[1:])
        else:  # self.steps[where] takes twice as long with many features
            x = self.steps.index_select(0, where.flatten()).view(*where.shape, *self.steps.shape[1:])
        # (B, T) or (B, T, F)
        x = x if x.is_floating_point() else x.long()
        x.masked_fill_(~inside.view(inside.shape + (1,) * (x.ndim - 2)), 0)
        target = None if self.target is None else self.target[rows]
        if self.labels is not None:
            labels = self.labels[where].long() if len(self.labels) else torch.zeros(where.shape, dtype=torch.int64)
            target = labels.masked_fill(~inside, IGNORED)
        return SequenceBatch(x, lengths, target)
