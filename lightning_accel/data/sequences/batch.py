"""Batches of sequences of unequal lengths. Shapes: B sequences, T steps of the longest, F features."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

IGNORED = -100  # target of a step without one, as in torch.nn.functional.cross_entropy


class SequenceBatch(NamedTuple):
    """Hold a padded batch of sequences, as :class:`lightning_accel.SequenceModel` takes it.

    ``carried`` is used only in truncated back-propagation through time, where a long sequence spans several batches:
    for each sequence, its index in the previous batch, or -1 where it starts.

    Example:
        >>> import torch
        >>> batch = SequenceBatch(torch.zeros(2, 5, 3), lengths=torch.tensor([5, 2]), target=torch.tensor([1, 0]))
    """

    x: Tensor  # (B, T, F) floating, or (B, T) int64 tokens; 0 after a sequence's end
    lengths: Tensor  # (B,) int64, in [0, T]
    target: Tensor | None = (
        None  # (B,) classes, (B,) or (B, K) values, or (B, T) classes of steps, IGNORED after the end
    )
    carried: Tensor | None = None  # (B,) int64

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "SequenceBatch":
        """Move all but ``lengths`` and ``carried``, which are read on the CPU: reading from a GPU waits for it."""
        target = None if self.target is None else self.target.to(device, non_blocking=non_blocking)
        return self._replace(x=self.x.to(device, non_blocking=non_blocking), target=target)


def collate_sequences(items: Sequence[tuple[Tensor, Tensor | None]]) -> SequenceBatch:
    """Collate pairs of a sequence, (T, F) or (T,), and its target: (), (K,), one for each step, (T,), or None.

    >>> collate_sequences([(torch.ones(2, 1), torch.tensor(3)), (torch.ones(3, 1), torch.tensor(4))]).lengths
    tensor([2, 3])
    """
    sequences, targets = zip(*items, strict=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return SequenceBatch(pad_sequence(list(sequences), batch_first=True), lengths, _join_targets(targets, lengths))


def _join_targets(targets: Sequence[Tensor | None], lengths: Tensor) -> Tensor | None:
    if any(target is None for target in targets):
        return None
    present = [torch.as_tensor(target) for target in targets]
    if all(
        target.shape == (length,) and not target.is_floating_point()
        for target, length in zip(present, lengths, strict=True)
    ):
        return pad_sequence(present, batch_first=True, padding_value=IGNORED)
    return torch.stack(present)
