"""Order of the rows of an epoch. Shapes: K blocks, N rows, S streams."""

import numpy as np

_STREAMS = (192, 96, 48, 24, 16, 8, 4, 2, 1)  # numbers that many numbers of processes divide


class StreamPlan:
    """Plan the order of the rows of an epoch: shuffled blocks, split into streams that are read side by side.

    Position p of the order is row p // S of stream p % S, so that neighbours come from S blocks. A process that takes
    every R-th position reads S / R of the streams if R divides S, and no two processes read the same block, except
    where a stream ends within one. The rows of a block are shuffled, too. Nothing else determines the order, so
    that a position, the number of rows that all processes have taken, is all that a run needs to continue.

    With n rows a batch is, in the mean of a value over its rows, at least as good as 1 / (1 / n + 1 / S) rows that are
    drawn from all, however the files are sorted.

    Args:
        rows: (K,) rows of each block.
        streams: S, at most N.
        seed: seed of the order, with ``epoch``; None for the order of the files.
        epoch: number of the epoch.
    """

    def __init__(self, rows: np.ndarray, streams: int, seed: int | None = None, epoch: int = 0) -> None:
        self.seed, self.epoch = seed, epoch
        self.streams = streams
        shuffled = None if seed is None else np.random.default_rng([seed, epoch]).permutation(len(rows))
        self.order = np.arange(len(rows)) if shuffled is None else shuffled
        self.ends = rows[self.order].cumsum()
        self.starts = self.ends - rows[self.order]
        self.num_rows = int(self.ends[-1])
        lengths = (self.num_rows - np.arange(streams) + streams - 1) // streams
        self.stream_ends = lengths.cumsum()
        self.stream_starts = self.stream_ends - lengths

    def locate(self, stream: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return in which places of ``order`` ``rows`` of a stream are, and which rows of their blocks they are.

        The latter are those before the block is shuffled by :meth:`rows_of`.
        """
        at = rows + self.stream_starts[stream]
        places = np.searchsorted(self.ends, at, side="right")
        return places, at - self.starts[places]

    def rows_of(self, place: int) -> np.ndarray | None:
        """Return the order of the rows of the block in a place, or None if it is not shuffled."""
        if self.seed is None:
            return None
        block = int(self.order[place])
        number = int(self.ends[place] - self.starts[place])
        return np.random.default_rng([self.seed, self.epoch, block]).permutation(number)


def choose_streams(rows: np.ndarray, nbytes: np.ndarray, shuffle_bytes: int) -> int:
    """Return how many streams are read side by side, of which each holds a block in memory, and soon the next one.

    It depends on the files alone, not on the number of processes, so that a run can go on with another number.
    """
    fitting = max(1, shuffle_bytes // max(1, 2 * int(nbytes.max())))
    return next(number for number in _STREAMS if number <= min(fitting, len(rows)))
