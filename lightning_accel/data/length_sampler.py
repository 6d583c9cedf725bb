"""Batches of sequences alike in length, for any number of processes. Shapes: R sequences."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_accel.data.length_plan import LengthPlan, Plan

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


class LengthBatchSampler(DistributedSampler[Any]):
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
        super().__init__(self.lengths, num_replicas or 1, rank or 0, shuffle, seed)  # type: ignore[arg-type]
        self._given = None if num_replicas is None else (num_replicas, rank or 0)
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
        self._drawn: tuple[int, Plan] | None = None
        self._digests: dict[int, str] = {}
        self._first: dict[int, int] = {}

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

    def _plan(self, epoch: int) -> Plan:
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self._cut.draw(self.seed, epoch, self.shuffle)
        return self._drawn[1]

    @property
    def first_batch(self) -> int:
        return self._first.get(self.epoch, 0)

    def state_after(self, epoch: int, batches: int) -> dict[str, Any]:
        """Position in the batches of all processes, whose number it does not depend on."""
        return {
            "seed": self.seed,
            "epoch": epoch,
            "batches": batches % len(self),  # of a loader that goes round more than once beside a longer one
            "options": self._options(),
            "plan": self._digest(epoch),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the epoch of ``state_dict`` after the batches that are done.

        Raises:
            ValueError: if its batches are not those that this sampler makes.
        """
        there = {"seed": state_dict["seed"], **state_dict["options"]}
        here = {"seed": self.seed, **self._options()}
        differing = [
            f"{name}={there.get(name)} there, {here[name]} here" for name in here if there.get(name) != here[name]
        ]
        if differing or state_dict["plan"] != self._digest(state_dict["epoch"]):
            raise ValueError(
                "the checkpoint was trained on other batches than LengthBatchSampler makes here: "
                f"{'; '.join(differing) or 'other lengths of the sequences'}. Give it what that run had; sizes are "
                "those of all processes together, so they stay when the number of processes changes"
            )
        self._first = {state_dict["epoch"]: state_dict["batches"]}

    def _options(self) -> dict[str, int | bool | None]:
        names = "batch_size", "max_tokens", "window", "shuffle", "chunk_steps"
        return {"sequences": len(self.lengths)} | {name: getattr(self, name) for name in names}

    def _digest(self, epoch: int) -> str:
        """Of the batches of an epoch and their lengths."""
        if epoch not in self._digests:
            plan = self._plan(epoch)
            parts = (plan.rows, plan.starts, self.lengths[plan.rows])
            joined = b"".join(part.astype("<i8").tobytes() for part in parts)
            self._digests = {epoch: hashlib.blake2b(joined, digest_size=16).hexdigest()}
        return self._digests[epoch]

    def deal_to(self, num_replicas: int, rank: int) -> None:
        """Deal each batch to so many processes, as a strategy wants where several work on the same rows.

        Raises:
            ValueError: if the sampler was made for others.
        """
        if self._given not in (None, (num_replicas, rank)):
            raise ValueError(
                f"this LengthBatchSampler was made with num_replicas={self._given[0]} and rank={self._given[1]}, but "
                f"the strategy deals rows to {num_replicas} processes, of which this is number {rank}. Leave both out"
            )
        self._given = num_replicas, rank

    def _deal(self) -> tuple[int, int]:
        """Processes, and which this is."""
        deal = self._given
        if deal is None:
            deal = (dist.get_world_size(), dist.get_rank()) if dist.is_available() and dist.is_initialized() else (1, 0)
        self.num_replicas, self.rank = deal
        if self._cut.fewest_rows < deal[0]:
            raise ValueError(
                f"each of {deal[0]} processes needs a sequence of every batch, but one has {self._cut.fewest_rows}: "
                f"batch_size={self.batch_size} and max_tokens={self.max_tokens} are those of all processes together; "
                "raise them, or give more sequences"
            )
        return deal

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
            mine = rows[_share(len(rows), replicas, rank)]
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
                share = _share(size, replicas, rank)
                rows[rank, these] = len(share)
                longest[rank, these] = self.lengths[plan.rows[plan.starts[these] + share[0]]] if len(share) else 0
        work = rows * longest  # a process's part of a batch, with padding
        return LengthReport(
            len(plan.starts),
            int(longest.max(0).sum()),
            float(1 - self.lengths.sum() / max(1, work.sum())),
            float(1 - work.mean(0).sum() / max(1, work.max(0).sum())),
        )


def _share(rows: int, replicas: int, rank: int) -> np.ndarray:
    """Places in a batch, which is sorted, of one process's rows: dealt to and fro, so that all have alike lengths."""
    there, back = range(rank, rows, 2 * replicas), range(2 * replicas - 1 - rank, rows, 2 * replicas)
    return np.sort(np.r_[np.array(there, np.int64), np.array(back, np.int64)])


def _checked(lengths: Any) -> np.ndarray:
    if isinstance(lengths, Sampler):
        raise TypeError(_AS_SAMPLER)
    found = np.asarray(lengths.cpu() if isinstance(lengths, Tensor) else lengths)
    if found.ndim != 1 or not len(found) or not np.issubdtype(found.dtype, np.integer) or found.min() < 0:
        raise ValueError(
            f"lengths are numbers of steps, one for each sequence; got {found.dtype} of shape {found.shape}"
            + (f" with {found.min()}" if found.size else "")
        )
    return found.astype(np.int64)


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
