"""Batches of sequences alike in length, for any number of processes. Shapes: R sequences."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler

from lightning_accel.data.length_plan import LengthPlan, Plan
from lightning_accel.data.planned_sampler import PlannedSampler, share_of, whole_sizes

_UNBOUNDED = 2**62


class Chunk(NamedTuple):
    """Some steps of the sequences of a batch that have not ended before them."""

    rows: list[int]
    start: int  # the first step
    stop: int  # the step after the last
    carried: list[int]  # for each row, its place in the chunk before, or -1 where that was another batch


class LengthReport(NamedTuple):
    """What an epoch costs."""

    batches: int  # of all processes together
    steps: int  # that follow one on another: of each batch, its longest sequence
    padding: float  # share of padding in what is computed, of all processes
    straggling: float  # share of time that processes wait for the one with most steps, padding included


class LengthBatchSampler(PlannedSampler):
    """Lists of row numbers of like length; every row once an epoch, and every process as many lists as any other.

    >>> sampler = LengthBatchSampler([5, 90, 4, 91], batch_size=2, window=None)
    >>> sorted(sorted(rows) for rows in sampler)
    [[0, 2], [1, 3]]

    :func:`length_batch_loader` makes a loader of it, over any dataset; the Trainer needs no flag. Where a dataset gives
    a whole batch for a list of row numbers, ``DataLoader(dataset, sampler=sampler, batch_size=None)`` does.

    **Sizes are those of a global batch**, all processes together. An epoch's batches depend on lengths, options,
    ``seed`` and epoch alone, and then each is dealt to the processes there are, so that all have about as many rows,
    tokens and steps. A run may go on with other processes: its steps see the same rows. Rows are neither repeated nor
    left out: where they do not fill a batch, the shortest ones come in several smaller ones.

    Args:
        lengths: (R,) of the sequences, in steps.
        batch_size: most sequences of a batch.
        max_tokens: most steps of a batch with its padding: its sequences times the longest. A process holds about its
            share of them.
        max_steps: most sequential steps of an epoch, the sum of the longest sequences of its batches; ``batch_size``,
            by default 1, is raised until they are met.
        window: batches that differ in length: 50 pad about 10%, None, for a full sort, pads least, and gives most
            sequences the same mates in each epoch.
        shuffle: draw batches anew for each epoch; without it they come in one order, the longest first.
        seed: of the draw.
        chunk_steps: for truncated back-propagation through time, a batch comes as several in a row, a :class:`Chunk`
            each, of this many steps. They, rather than whole sequences, count towards ``max_tokens``.
        num_replicas: processes; by default those of torch.distributed, when iteration begins.
        rank: this process.

    Raises:
        ValueError: if lengths are negative or there are none, if no size is given or one is out of range or too small
            for the longest sequence, or, before iteration, for the number of processes; in ``load_state_dict``, if a
            run is resumed with other lengths or options.
        TypeError: if it is given to a loader as ``batch_sampler``, once the Trainer looks at it.
    """

    row_is = "sequence"
    options = ("batch_size", "max_tokens", "window", "shuffle", "chunk_steps")

    def __init__(
        self,
        lengths: Sequence[int] | Tensor | np.ndarray,
        batch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        max_steps: int | None = None,
        window: int | None = 50,
        shuffle: bool = True,
        seed: int = 0,
        chunk_steps: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.lengths = _checked(lengths)
        _require_sizes(batch_size, max_tokens, max_steps, window, chunk_steps, seed)
        super().__init__((self.lengths,), shuffle, seed, num_replicas, rank)
        self.chunk_steps = chunk_steps
        longest = int(self.lengths.max())
        self.max_tokens = max_tokens
        if max_tokens is not None and max_tokens < min(longest, chunk_steps or longest):
            raise ValueError(
                f"max_tokens={max_tokens} holds no sequence of {longest} steps; give at least as many, leave long "
                "sequences out, or cut them with chunk_steps"
            )
        self.window = window
        if max_steps is not None:
            batch_size = self._size_within(max_steps, batch_size or 1)
        self.batch_size = batch_size
        self._cut = self._cut_into(batch_size)

    @property
    def drop_last(self) -> bool:
        """No row is dropped; Lightning reads it of samplers of batches alone, before it takes them apart."""
        if hasattr(self, "_cut"):
            raise TypeError(_AS_SAMPLER)
        return False

    @drop_last.setter
    def drop_last(self, value: bool) -> None:
        assert not value

    def _cut_into(self, batch_size: int | None) -> LengthPlan:
        return LengthPlan(
            self.lengths,
            batch_size or _UNBOUNDED,
            self.max_tokens or _UNBOUNDED,
            self.chunk_steps or _UNBOUNDED,
            self.window if self.shuffle else None,
        )

    def _size_within(self, max_steps: int, least: int) -> int:
        """The smallest batch size, ``least`` or more, whose epochs have at most ``max_steps`` sequential steps."""
        most = len(self.lengths)
        fewest_steps = int(self._cut_into(most).longest.sum())
        if fewest_steps > max_steps:
            raise ValueError(
                f"max_steps={max_steps} cannot be met: an epoch has {fewest_steps} sequential steps or more "
                f"with max_tokens={self.max_tokens}"
            )
        while least < most:
            middle = (least + most) // 2
            if int(self._cut_into(middle).longest.sum()) <= max_steps:
                most = middle
            else:
                least = middle + 1
        return most

    def _draw(self, epoch: int) -> Plan:
        return self._cut.draw(self.seed, epoch, self.shuffle)

    @property
    def _fewest_rows(self) -> int:
        return self._cut.fewest_rows

    def __len__(self) -> int:
        """Batches of each process in an epoch; chunks, where sequences come in chunks."""
        self._deal()
        return int(self._chunks(self._cut.longest).sum())

    def _chunks(self, longest: np.ndarray) -> np.ndarray:
        return np.ones_like(longest) if self.chunk_steps is None else -(-longest.clip(1) // self.chunk_steps)

    def __iter__(self) -> Iterator[list[int] | Chunk]:
        plan = self._plan(self.epoch)
        replicas, rank = self._deal()
        ends = self._chunks(self.lengths[plan.rows[plan.starts]]).cumsum()
        done = self._first.pop(self.epoch, 0)
        for batch in range(int(np.searchsorted(ends, done, side="right")), len(ends)):
            rows = plan.rows[plan.starts[batch] : plan.stops[batch]]
            mine = rows[share_of(len(rows), replicas, rank)]
            if self.chunk_steps is None:
                yield mine.tolist()
                continue
            first = int(ends[batch - 1]) if batch else 0
            for chunk in range(max(0, done - first), int(ends[batch]) - first):
                yield self._chunk(mine, chunk * self.chunk_steps)

    def _chunk(self, rows: np.ndarray, start: int) -> Chunk:
        """The part from step ``start`` on of ``rows``, the longest first; the first of them always takes part."""
        assert self.chunk_steps is not None
        alive = max(1, int((self.lengths[rows] > start).sum())) if start else len(rows)
        carried = range(alive) if start else [-1] * alive
        return Chunk(rows[:alive].tolist(), start, start + self.chunk_steps, list(carried))

    def report(self, num_replicas: int | None = None) -> LengthReport:
        """What this epoch costs, on this many processes, by default those there are."""
        plan = self._plan(self.epoch)
        replicas = self._deal()[0] if num_replicas is None else num_replicas
        rows, longest = np.zeros((2, replicas, len(plan.starts)), np.int64)
        for size in np.unique(plan.stops - plan.starts).tolist():  # batches of one size are dealt alike
            these = np.flatnonzero(plan.stops - plan.starts == size)
            for rank in range(replicas):
                share = share_of(size, replicas, rank)
                rows[rank, these] = len(share)
                longest[rank, these] = self.lengths[plan.rows[plan.starts[these] + share[0]]] if len(share) else 0
        work = rows * longest  # a process's part of a batch, with padding
        return LengthReport(
            len(plan.starts),
            int(longest.max(0).sum()),
            float(1 - self.lengths.sum() / max(1, work.sum())),
            float(1 - work.mean(0).sum() / max(1, work.max(0).sum())),
        )


def _checked(lengths: Any) -> np.ndarray:
    if isinstance(lengths, Sampler):
        raise TypeError(_AS_SAMPLER)
    return whole_sizes(lengths, "lengths are numbers of steps, one for each sequence")


_AS_SAMPLER = (
    "LengthBatchSampler deals its batches to processes itself, and Lightning must not put another sampler into it; "
    "write length_batch_loader(dataset, sampler), not DataLoader(..., batch_sampler=sampler)"
)


def _require_sizes(
    batch_size: int | None,
    max_tokens: int | None,
    max_steps: int | None,
    window: int | None,
    chunk_steps: int | None,
    seed: int,
) -> None:
    for name, value in (
        ("batch_size", batch_size), ("max_tokens", max_tokens), ("max_steps", max_steps), ("window", window),
        ("chunk_steps", chunk_steps), ("seed", seed + 1),
    ):  # fmt: skip
        if value is not None and value < 1:
            raise ValueError(f"{name} must be {'0' if name == 'seed' else '1'} or more; got {value - (name == 'seed')}")
    if batch_size is None and max_tokens is None and max_steps is None:
        raise ValueError("give batch_size, max_tokens or max_steps, of all processes together")
