"""Batches of sequences of similar length: their plan, sampler and loader.

Shapes: R sequences, G batches of an epoch, for all processes; B sequences of a batch, T steps of the longest.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from lightning_accel.data.in_memory import identity_collate
from lightning_accel.data.planned_sampler import Plan, PlannedSampler, integer_sizes, share_indices
from lightning_accel.data.samplers import ResumableLoader
from lightning_accel.data.sequences.batch import collate_sequences
from lightning_accel.ops.bounds import if_set, require_integers

_UNBOUNDED = 2**62


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


class Chunk(NamedTuple):
    """Describe some consecutive steps of those sequences of a batch that have not ended before."""

    rows: list[int]  # indices of the sequences
    start: int  # the first step
    stop: int  # the step after the last
    carried: list[int]  # for each sequence, its index in the previous chunk, or -1 in the first chunk of a batch


class LengthReport(NamedTuple):
    """Hold the cost of an epoch."""

    batches: int  # number of global batches
    steps: int  # sequential steps: the sum of the longest sequences of all batches
    padding: float  # share of padding in all computed steps, over all processes
    straggling: float  # share of time that processes wait for the one with the most steps, including padding


class LengthBatchSampler(PlannedSampler):
    """Sample batches of sequences of similar length; each sequence once per epoch.

    >>> sampler = LengthBatchSampler([5, 90, 4, 91], batch_size=2, window=None)
    >>> sorted(sorted(rows) for rows in sampler)
    [[0, 2], [1, 3]]

    Iteration yields lists of indices, equally many on every process. :func:`length_batch_loader` makes a loader for any
    data set; the Trainer needs no flag. For a data set that returns a whole batch for a list of indices, use
    ``DataLoader(dataset, sampler=sampler, batch_size=None)``.

    **Sizes are those of a global batch**, over all processes. The batches of an epoch depend on lengths, options,
    ``seed`` and epoch alone; each is then distributed so that all processes have about equally many sequences, tokens
    and steps. A run resumed on another number of processes sees the same sequences at each step. No sequence is
    repeated or dropped: if they do not fill all batches, the shortest form several smaller ones.

    Args:
        lengths: (R,) number of steps of each sequence.
        batch_size: largest number of sequences of a batch.
        max_tokens: largest number of steps of a batch with its padding: its sequences times the longest. Each process
            gets about an equal share of them.
        max_steps: largest number of sequential steps of an epoch, the sum of the longest sequences of its batches;
            ``batch_size``, by default 1, is increased until it is met.
        window: number of length bins: 50 have about 10% padding; None sorts by length, with the least padding, but most
            sequences share a batch with the same others in each epoch.
        shuffle: draw new batches for each epoch; False for the same batches, the longest first.
        seed: seed of the batches.
        chunk_steps: steps per :class:`Chunk` of a batch, for truncated back-propagation through time. A batch is
            yielded as consecutive chunks, and ``max_tokens`` limits a chunk instead of whole sequences.
        num_replicas: number of processes; by default that of torch.distributed at the start of the iteration.
        rank: rank of this process.

    Raises:
        ValueError: if lengths are negative or there are none, if no size is given or one is out of range or too small
            for the longest sequence, or, before iteration, for the number of processes; in ``load_state_dict``, if a
            run is resumed with other lengths or options.
        TypeError: if it is passed to a loader as ``batch_sampler``, once the Trainer inspects it.
    """

    _plans: LengthPlan
    item_name = "sequence"
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
        if isinstance(lengths, Sampler):
            raise TypeError(_BATCH_SAMPLER_ERROR)
        self.lengths = integer_sizes(lengths, "lengths are numbers of steps, one for each sequence")
        sizes = {"batch_size": batch_size, "max_tokens": max_tokens, "max_steps": max_steps}
        require_integers(1, **if_set(**sizes, window=window, chunk_steps=chunk_steps))
        require_integers(0, seed=seed)
        if all(size is None for size in sizes.values()):
            raise ValueError("give batch_size, max_tokens or max_steps, of all processes together")
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
            batch_size = self._smallest_batch_size(max_steps, batch_size or 1)
        self.batch_size = batch_size
        self._plans = self._make_plan(batch_size)

    @property
    def drop_last(self) -> bool:
        """Raise a TypeError, since Lightning reads this only of batch samplers, before it replaces their sampler."""
        if hasattr(self, "_plans"):
            raise TypeError(_BATCH_SAMPLER_ERROR)
        return False

    @drop_last.setter
    def drop_last(self, value: bool) -> None:
        assert not value

    def _make_plan(self, batch_size: int | None) -> LengthPlan:
        return LengthPlan(
            self.lengths,
            batch_size or _UNBOUNDED,
            self.max_tokens or _UNBOUNDED,
            self.chunk_steps or _UNBOUNDED,
            self.window if self.shuffle else None,
        )

    def _smallest_batch_size(self, max_steps: int, least: int) -> int:
        """Return the smallest batch size, from ``least``, whose epochs have at most ``max_steps`` sequential steps."""
        most = len(self.lengths)
        fewest_steps = int(self._make_plan(most).longest.sum())
        if fewest_steps > max_steps:
            raise ValueError(
                f"max_steps={max_steps} cannot be met: an epoch has {fewest_steps} sequential steps or more "
                f"with max_tokens={self.max_tokens}"
            )
        while least < most:
            middle = (least + most) // 2
            if int(self._make_plan(middle).longest.sum()) <= max_steps:
                most = middle
            else:
                least = middle + 1
        return most

    def __len__(self) -> int:
        """Return the number of batches, or chunks with ``chunk_steps``, of each process in an epoch."""
        self._replicas_and_rank()
        return int(self._chunks(self._plans.longest).sum())

    def _chunks(self, longest: np.ndarray) -> np.ndarray:
        return np.ones_like(longest) if self.chunk_steps is None else -(-longest.clip(1) // self.chunk_steps)

    def __iter__(self) -> Iterator[list[int] | Chunk]:
        plan = self._plan(self.epoch)
        replicas, rank = self._replicas_and_rank()
        ends = self._chunks(self.lengths[plan.rows[plan.starts]]).cumsum()
        done = self._first_batches.pop(self.epoch, 0)
        for batch in range(int(np.searchsorted(ends, done, side="right")), len(ends)):
            rows = plan.rows[plan.starts[batch] : plan.stops[batch]]
            mine = rows[share_indices(len(rows), replicas, rank)]
            if self.chunk_steps is None:
                yield mine.tolist()
                continue
            first = int(ends[batch - 1]) if batch else 0
            for chunk in range(max(0, done - first), int(ends[batch]) - first):
                yield self._chunk(mine, chunk * self.chunk_steps)

    def _chunk(self, rows: np.ndarray, start: int) -> Chunk:
        """Return the chunk from step ``start`` on of ``rows``, sorted by descending length; it always has the first."""
        assert self.chunk_steps is not None
        alive = max(1, int((self.lengths[rows] > start).sum())) if start else len(rows)
        carried = range(alive) if start else [-1] * alive
        return Chunk(rows[:alive].tolist(), start, start + self.chunk_steps, list(carried))

    def report(self, num_replicas: int | None = None) -> LengthReport:
        """Return the cost of the current epoch on ``num_replicas`` processes, by default those of this run."""
        plan = self._plan(self.epoch)
        replicas = self._replicas_and_rank()[0] if num_replicas is None else num_replicas
        rows, longest = np.zeros((2, replicas, len(plan.starts)), np.int64)
        for size in np.unique(plan.stops - plan.starts).tolist():  # batches of equal size are distributed alike
            these = np.flatnonzero(plan.stops - plan.starts == size)
            for rank in range(replicas):
                share = share_indices(size, replicas, rank)
                rows[rank, these] = len(share)
                longest[rank, these] = self.lengths[plan.rows[plan.starts[these] + share[0]]] if len(share) else 0
        work = rows * longest  # steps of a process's share of a batch, with padding
        return LengthReport(
            len(plan.starts),
            int(longest.max(0).sum()),
            float(1 - self.lengths.sum() / max(1, work.sum())),
            float(1 - work.mean(0).sum() / max(1, work.max(0).sum())),
        )


_BATCH_SAMPLER_ERROR = (
    "LengthBatchSampler deals its batches to processes itself, and Lightning must not put another sampler into it; "
    "write length_batch_loader(dataset, sampler), not DataLoader(..., batch_sampler=sampler)"
)


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
        collate_fn: collates a list of items, or the result of ``__getitems__``.
        num_workers: workers that load batches.
        pin_memory: whether to pin memory, for copies to a GPU.

    Raises:
        ValueError: if ``dataset`` and ``sampler`` differ in length, or the sampler has ``chunk_steps``.
    """
    if sampler.chunk_steps is not None:
        raise ValueError("chunk_steps needs a data set that takes a Chunk, as those of SequenceDataModule do")
    if len(dataset) != len(sampler.lengths):  # type: ignore[arg-type]  # a dataset with a length
        raise ValueError(
            f"the sampler knows the lengths of {len(sampler.lengths)} sequences, the dataset holds {len(dataset)}; "  # type: ignore[arg-type]
            "make the sampler from the lengths of this dataset"
        )
    return ResumableLoader(
        _Batches(dataset, collate_fn),
        batch_size=None,
        sampler=sampler,
        collate_fn=identity_collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
    )


class _Batches(Dataset[Any]):
    """Load batches of ``dataset`` by a list of indices."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, rows: list[int] | int) -> Any:
        if isinstance(rows, int):
            raise TypeError(
                "this loader needs its LengthBatchSampler, but found another sampler in its place, as "
                "Trainer(overfit_batches=...) puts there. Take limit_train_batches, and "
                "LengthBatchSampler(..., shuffle=False) for the same batches in each epoch"
            )
        fetch = getattr(self.dataset, "__getitems__", None)
        return self.collate_fn(fetch(rows) if fetch else [self.dataset[row] for row in rows])
