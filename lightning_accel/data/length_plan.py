"""Batches of sequences of similar length. Shapes: R sequences, G batches of an epoch, for all processes."""

import math
from typing import NamedTuple

import numpy as np


class Plan(NamedTuple):
    """Hold the batches of an epoch in the order of training."""

    rows: np.ndarray  # (R,) indices of the items, grouped by batch, the largest of each batch first
    starts: np.ndarray  # (G,) start of each batch in rows
    stops: np.ndarray  # (G,) end of each batch in rows


class LengthPlan:
    """Split R sequences into batches of similar length, whose members are drawn anew for each epoch.

    Sequences are sorted by length and split into bins of several batches each. A bin of b batches is split further into
    groups of b consecutive sequences, and each batch gets one of each group at random. Therefore every epoch has the
    same number of batches and of sequential steps.

    Args:
        lengths: (R,) number of steps of each sequence.
        batch_size: largest number of sequences of a batch.
        max_tokens: largest number of steps of a batch with its padding: its sequences times its longest one.
        most_steps: largest number of steps of a sequence that counts towards ``max_tokens``.
        window: number of bins. More bins mean less padding, and fewer sequences that may share a batch with a given
            one; there are at most half as many bins as batches. None for one bin per batch, so that only sequences of
            equal length change places.
    """

    def __init__(
        self, lengths: np.ndarray, batch_size: int, max_tokens: int, most_steps: int, window: int | None
    ) -> None:
        self.lengths = lengths
        self._key = lengths.max() - lengths  # sorts by descending length
        if self._key.max() < 2**16:
            self._key = self._key.astype(np.uint16)  # NumPy sorts 16 bits ten times as fast
        longest_first = lengths[np.argsort(self._key, kind="stable")]
        room = np.minimum(batch_size, max_tokens // longest_first.clip(1, most_steps))
        sizes, batches = _bins(room, window)
        of = np.repeat(np.arange(len(sizes)), sizes)  # the bin of each sorted sequence
        within = np.arange(len(lengths)) - (sizes.cumsum() - sizes)[of]
        stratum, turn = np.divmod(within, batches[of])
        strata = -(-sizes // batches)
        batch = (batches.cumsum() - batches)[of] + turn
        self._stratum = (strata.cumsum() - strata)[of] + stratum
        self._arrangement = np.argsort(batch, kind="stable")
        self._stops = np.bincount(batch).cumsum()
        self._starts = np.r_[0, self._stops[:-1]]
        self.longest = longest_first[self._arrangement[self._starts]]  # (G,) longest sequence of each batch, unordered
        self.smallest_batch = int((self._stops - self._starts).min())

    def draw(self, seed: int, epoch: int, shuffle: bool) -> Plan:
        """Draw the batches of ``epoch``; without ``shuffle``, every epoch is the same, the longest batch first."""
        if not shuffle:
            return Plan(np.argsort(self._key, kind="stable")[self._arrangement], self._starts, self._stops)
        generator = np.random.default_rng([seed, epoch])
        mixed = generator.permutation(len(self.lengths))
        longest_first = mixed[np.argsort(self._key[mixed], kind="stable")]
        drawn = longest_first[np.argsort(self._stratum + generator.random(len(mixed)))]
        order = generator.permutation(len(self._stops))
        return Plan(drawn[self._arrangement], self._starts[order], self._stops[order])


def _bins(room: np.ndarray, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequences and batches of each bin; ``room`` (R,) limits a batch by its longest sequence."""
    together = 1 if window is None else max(2, round((1 / room).sum() / window))
    sizes, batches, starts = [], [], []
    start = 0
    while start < len(room):
        size = min(int(room[start]) * together, len(room) - start)
        sizes.append(size)
        starts.append(start)
        start += size
    if len(sizes) > 1 and sizes[-1] < room[starts[-1]]:  # an incomplete batch: several nearly full ones instead
        sizes[-2:] = [sizes[-2] + sizes[-1]]
        starts.pop()
    batches = [math.ceil(size / int(room[start])) for size, start in zip(sizes, starts, strict=True)]
    return np.array(sizes), np.array(batches)
