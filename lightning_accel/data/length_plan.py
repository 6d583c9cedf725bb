"""Batches of rows alike in length. Shapes: R rows, G batches of an epoch, all processes together."""

import math
from typing import NamedTuple

import numpy as np


class Plan(NamedTuple):
    """An epoch's batches, in the order of training."""

    rows: np.ndarray  # (R,) row numbers, those of a batch together, the longest first
    starts: np.ndarray  # (G,) of each batch among them
    stops: np.ndarray  # (G,)


class LengthPlan:
    """Cuts R rows into batches, once; which rows of like length come together is drawn for each epoch.

    Rows are sorted and cut into bins of neighbours, each of several batches. Of as many consecutive rows as a bin has
    batches, one goes to each, by lot. So every epoch has as many batches, and as many sequential steps, as any other.

    Args:
        lengths: (R,) in steps.
        batch_size: most rows of a batch.
        max_tokens: most steps of a batch with its padding, rows times the longest.
        most_steps: of a row that count towards ``max_tokens``.
        window: batches that differ in length; the more, the less padding, and the fewer rows any one may meet; at most
            half of all. None for all, so that only rows of equal length change places.
    """

    def __init__(
        self, lengths: np.ndarray, batch_size: int, max_tokens: int, most_steps: int, window: int | None
    ) -> None:
        self.lengths = lengths
        self._key = lengths.max() - lengths  # rises as the length falls
        if self._key.max() < 2**16:
            self._key = self._key.astype(np.uint16)  # which NumPy sorts ten times as fast
        longest_first = lengths[np.argsort(self._key, kind="stable")]
        room = np.minimum(batch_size, max_tokens // longest_first.clip(1, most_steps))
        sizes, batches = _bins(room, window)
        of = np.repeat(np.arange(len(sizes)), sizes)  # the bin of each place in the sorted rows
        within = np.arange(len(lengths)) - (sizes.cumsum() - sizes)[of]
        stratum, turn = np.divmod(within, batches[of])
        strata = -(-sizes // batches)
        batch = (batches.cumsum() - batches)[of] + turn
        self._stratum = (strata.cumsum() - strata)[of] + stratum
        self._arrangement = np.argsort(batch, kind="stable")
        self._stops = np.bincount(batch).cumsum()
        self._starts = np.r_[0, self._stops[:-1]]
        self.longest = longest_first[self._arrangement[self._starts]]  # (G,) of each batch, in some order
        self.fewest_rows = int((self._stops - self._starts).min())

    def draw(self, seed: int, epoch: int, shuffle: bool) -> Plan:
        """The batches of ``epoch``; without ``shuffle``, those of any, the longest first."""
        if not shuffle:
            return Plan(np.argsort(self._key, kind="stable")[self._arrangement], self._starts, self._stops)
        generator = np.random.default_rng([seed, epoch])
        mixed = generator.permutation(len(self.lengths))
        longest_first = mixed[np.argsort(self._key[mixed], kind="stable")]
        drawn = longest_first[np.argsort(self._stratum + generator.random(len(mixed)))]
        order = generator.permutation(len(self._stops))
        return Plan(drawn[self._arrangement], self._starts[order], self._stops[order])


def _bins(room: np.ndarray, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Rows and batches of each bin; ``room`` (R,) is how many rows a batch may have whose longest is that one."""
    together = 1 if window is None else max(2, round((1 / room).sum() / window))
    sizes, batches, starts = [], [], []
    start = 0
    while start < len(room):
        size = min(int(room[start]) * together, len(room) - start)
        sizes.append(size)
        starts.append(start)
        start += size
    if len(sizes) > 1 and sizes[-1] < room[starts[-1]]:  # less than a batch: rather several nearly full ones
        sizes[-2:] = [sizes[-2] + sizes[-1]]
        starts.pop()
    batches = [math.ceil(size / int(room[start])) for size, start in zip(sizes, starts, strict=True)]
    return np.array(sizes), np.array(batches)
