"""Batches of rows of shards, read ahead of training by threads. Shapes: B rows of a batch, S streams."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from lightning_accel.data.shards.blocks import Blocks
from lightning_accel.data.shards.sampler import Step, positions_of
from lightning_accel.data.shards.streams import StreamPlan
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = import_on_use("pyarrow")

Rows: TypeAlias = "pa.Table | tuple[Tensor, ...]"

_THREADS = min(4, os.cpu_count() or 1)
_QUEUED = 8  # batches that wait to be taken
_AHEAD_ROWS = 16384  # largest number of rows that are gathered at once
_AHEAD_BYTES = 16 << 20


@dataclass(frozen=True)
class ReadOptions:
    """Hold what is read of blocks, and what batches are made of it.

    Args:
        columns: columns to read.
        collate: makes a batch of the Rows of one.
        encode: makes Rows of the table of a block; by default the table itself.
        row_bytes: bytes of a row of encoded Rows.
        sort_by: returns a key of each of some Rows, (B,), by which those that stand together in a stream are sorted, so
            that batches hold rows of similar keys.
        sorted_rows: rows over all processes that are sorted together, a multiple of those of a step, which must not
            change within a run.
    """

    columns: Sequence[str]
    collate: Callable[[Any], Any]
    encode: Callable[[pa.Table], Rows] | None = None
    row_bytes: int = 0
    sort_by: Callable[[Any], np.ndarray] | None = None
    sorted_rows: int = 0


class ShardBatches(Dataset[Any]):
    """Read the batch of a :class:`~lightning_accel.data.shards.sampler.Step`, and those that follow, ahead of time.

    Threads read, since what takes the time, reading and unpacking, needs no interpreter lock; so the blocks that are
    open are in memory once, not once in each of several worker processes.

    Args:
        blocks: blocks whose rows are read.
        options: what of them.
        streams: number of streams of a plan; None for one for each process.
        seed: seed of the order; None for the order of the files.
        exact: as :class:`~lightning_accel.data.shards.sampler.ShardSampler` has it.
    """

    def __init__(
        self, blocks: Blocks, options: ReadOptions, streams: int | None, seed: int | None, exact: bool = False
    ) -> None:
        self.blocks = blocks
        self.options = options
        self.streams = streams
        self.seed = seed
        self.exact = exact
        self._reading: _Reading | None = None

    def __len__(self) -> int:
        return self.blocks.num_rows

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_reading": None}

    def __getitem__(self, step: Step) -> Any:
        if not isinstance(step, Step):
            raise TypeError(
                "a loader of shards needs its ShardSampler, but found another sampler in its place, as "
                "Trainer(overfit_batches=...) puts there. Take limit_train_batches"
            )
        if self._reading is None or self._reading.next_step != step or self._reading.process != os.getpid():
            self.close()
            self._reading = _Reading(self, step)
        batch = self._reading.take()
        if self._reading.next_step is None:
            self.close()
        return batch

    def close(self) -> None:
        """Stop reading, and free what was read ahead."""
        self._reading = None

    def plan(self, step: Step) -> StreamPlan:
        streams = min(step.replicas if self.streams is None else self.streams, self.blocks.num_rows)
        return StreamPlan(self.blocks.rows, streams, self.seed, step.epoch)


class _Reading:
    """Read the batches from a step to the end of its epoch in a thread, and hand them over one by one."""

    def __init__(self, batches: ShardBatches, step: Step) -> None:
        self.next_step: Step | None = step
        self.process = os.getpid()  # in which the thread runs; a fork has none
        self._queue: queue.Queue[_Read] = queue.Queue(maxsize=_QUEUED)
        stopped = threading.Event()
        weakref.finalize(self, stopped.set)
        reader = _Reader(batches.blocks, batches.options, batches.plan(step), batches.exact, step.stop - step.start)
        # The thread knows nothing of this object, or it would not end with it. It is no daemon: one would be cut off at
        # the end of the interpreter, within a call of Arrow, which aborts.
        threading.Thread(target=_run, args=(reader, step, self._queue, stopped), name="shards").start()

    def take(self) -> Any:
        read = self._queue.get()
        self.next_step = read.next_step
        if read.error is not None:
            raise read.error
        return read.batch


class _Read(NamedTuple):
    """Hold a batch, or the error that reading it raised, and the step that is read after it."""

    batch: Any
    error: BaseException | None
    next_step: Step | None


def _run(reader: _Reader, step: Step, to: queue.Queue[_Read], stopped: threading.Event) -> None:
    """Put the batches from ``step`` on into a queue until it is ``stopped``."""
    with reader:
        following = reader.following(step)
        try:
            for batch in reader.batches(step):
                if not _put(_Read(batch, None, following), to, stopped):
                    return
                following = None if following is None else reader.following(following)
        except BaseException as error:  # raised where the batch is taken
            _put(_Read(None, error, None), to, stopped)


def _put(read: _Read, to: queue.Queue[_Read], stopped: threading.Event) -> bool:
    while not stopped.is_set() and threading.main_thread().is_alive():
        try:
            to.put(read, timeout=0.1)
            return True
        except queue.Full:
            pass
    return False


class _Reader:
    """Gather the rows of steps from the streams that a process takes them of."""

    def __init__(self, blocks: Blocks, options: ReadOptions, plan: StreamPlan, exact: bool, size: int) -> None:
        self._blocks, self._options, self._plan, self._exact, self._size = blocks, options, plan, exact, size
        worker = get_worker_info()
        self._stride = 1 if worker is None else worker.num_workers
        self._readers, self._collaters = ThreadPoolExecutor(_THREADS), ThreadPoolExecutor(_THREADS)
        self._open: dict[int, _OpenBlock] = {}
        self._coming: dict[int, tuple[int, Future[Rows]]] = {}
        at_once = min(_AHEAD_ROWS, _AHEAD_BYTES * blocks.num_rows // max(1, int(blocks.nbytes.sum())))
        self.steps_at_once = max(1, (options.sorted_rows or at_once) // size)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._collaters.shutdown(wait=False, cancel_futures=True)
        self._open.clear()
        self._coming.clear()

    def following(self, step: Step) -> Step | None:
        """Return the step that this process takes next, or None if its epoch has no other; those that train are whole.

        Each of several workers of a loader takes the step after those of the others.
        """
        start = step.start + self._stride * self._size
        left = self._plan.num_rows - start
        if left <= 0 or (self._plan.seed is not None and left < self._size):
            return None
        return step._replace(start=start, stop=start + min(self._size, left))

    def batches(self, step: Step) -> Iterator[Any]:
        """Yield the batches from ``step`` on."""
        with ThreadPoolExecutor(1) as gatherer:  # what comes is gathered while batches are made of what is there
            parts = self._parts(step)
            coming = gatherer.submit(self._gather_next, parts)
            while (found := coming.result()) is not None:
                coming = gatherer.submit(self._gather_next, parts)
                yield from self._collated(found)

    def _gather_next(self, parts: Iterator[tuple[list[np.ndarray], range]]) -> list[Rows] | None:
        part = next(parts, None)
        return None if part is None else self._gather(*part)

    def _parts(self, step: Step) -> Iterator[tuple[list[np.ndarray], range]]:
        """Yield the positions of the steps that are gathered at once, and the window that they are in."""
        ahead: Step | None = step
        while ahead is not None:
            steps: list[Step] = []
            window = self._window(ahead)
            while ahead is not None and len(steps) < self.steps_at_once and self._window(ahead) == window:
                steps.append(ahead)
                ahead = self.following(ahead)
            own = [positions_of(self._shuffled(one), self._exact) for one in steps]
            if own := [positions for positions in own if len(positions)]:
                yield own, window

    def _collated(self, batches: Iterable[Rows]) -> Iterator[Any]:
        """Yield batches in order, of which no more are made at a time than there are threads."""
        making: deque[Future[Any]] = deque()
        for rows in batches:
            making.append(self._collaters.submit(self._options.collate, rows))
            if len(making) > _THREADS:
                yield making.popleft().result()
        while making:
            yield making.popleft().result()

    def _window(self, step: Step) -> range:
        """Return the positions among which rows are sorted with those of a step.

        Rows that training drops are not among them, or they would always be the last in the order of keys.
        """
        size = self._options.sorted_rows
        start = step.start // size * size if size else 0
        rows = min(size, self._plan.num_rows - start)
        return range(start, start + (rows if self._plan.seed is None else rows // self._size * self._size))

    def _shuffled(self, step: Step) -> Step:
        """Return which step of its window a step that trains on sorted rows stands for, else itself."""
        window = self._window(step)
        if not window or self._plan.seed is None:
            return step
        steps = len(window) // self._size
        order = np.random.default_rng([self._plan.seed, step.epoch, window.start]).permutation(steps)
        start = window.start + int(order[(step.start - window.start) // self._size]) * self._size
        return step._replace(start=start, stop=start + self._size)

    def _gather(self, own: list[np.ndarray], window: range) -> list[Rows]:
        """Return the rows of the positions of each step, in the order of their streams."""
        positions = np.concatenate(own)
        number = np.repeat(np.arange(len(own)), [len(one) for one in own])
        by_stream = np.lexsort((positions, positions % self._plan.streams))
        streams, rows = positions[by_stream] % self._plan.streams, positions[by_stream] // self._plan.streams
        cuts = np.flatnonzero(np.diff(streams)) + 1
        wanted = [*zip(streams[np.r_[0, cuts]].tolist(), np.split(rows, cuts), strict=True)]
        for stream, part in wanted:  # so that what is not there is read by all threads
            self._announce(stream, part)
        parts = [one for stream, part in wanted for one in self._take_sorted(stream, part, window)]
        order = np.argsort(number[by_stream], kind="stable")
        return split_rows(take_rows(join_rows(parts), order), [len(one) for one in own])

    def _take_sorted(self, stream: int, rows: np.ndarray, window: range) -> Iterator[Rows]:
        """Yield rows of a stream; by their ranks among its rows in the window, if it is sorted."""
        if self._options.sort_by is None:
            yield from self._take(stream, rows)
            return
        first, stop = (-((stream - end) // self._plan.streams) for end in (window.start, window.stop))
        whole = join_rows([*self._take(stream, np.arange(first, stop))])
        order = np.argsort(self._options.sort_by(whole), kind="stable")
        yield take_rows(whole, order[rows - first])

    def _announce(self, stream: int, rows: np.ndarray) -> None:
        """Begin to read the block of the first row, if it is not open."""
        place = int(self._plan.locate(stream, rows[:1])[0][0])
        if stream not in self._open or self._open[stream].place != place:
            self._begin(stream, place)

    def _take(self, stream: int, rows: np.ndarray) -> Iterator[Rows]:
        """Yield rows of a stream, in ascending order, from each block that they are in."""
        places, within = self._plan.locate(stream, rows)
        cuts = np.flatnonzero(np.diff(places)) + 1
        for place, part in zip(places[np.r_[0, cuts]].tolist(), np.split(within, cuts), strict=True):
            opened = self._opened(stream, place)
            yield take_rows(opened.rows, part if opened.order is None else opened.order[part])
            if 2 * part[-1] > row_count(opened.rows) and place + 1 < self._last_place(stream):
                self._begin(stream, place + 1)

    def _last_place(self, stream: int) -> int:
        """Return the place after that of a stream's last block."""
        last = np.array([self._plan.stream_ends[stream] - self._plan.stream_starts[stream] - 1])
        return int(self._plan.locate(stream, last)[0][0]) + 1

    def _begin(self, stream: int, place: int) -> None:
        coming = self._coming.get(stream)
        if coming is None or coming[0] != place:
            self._coming[stream] = place, self._readers.submit(self._read, int(self._plan.order[place]))

    def _opened(self, stream: int, place: int) -> _OpenBlock:
        opened = self._open.get(stream)
        if opened is None or opened.place != place:
            self._begin(stream, place)
            self._open.pop(stream, None)
            rows = self._coming.pop(stream)[1].result()
            opened = self._open[stream] = _OpenBlock(place, rows, self._plan.rows_of(place))
        return opened

    def _read(self, block: int) -> Rows:
        table = self._blocks.read(block, self._options.columns)
        return table if self._options.encode is None else self._options.encode(table)


@dataclass
class _OpenBlock:
    """Hold the block that a stream is in."""

    place: int
    rows: Rows
    order: np.ndarray | None


def row_count(rows: Rows) -> int:
    return len(rows[0]) if isinstance(rows, tuple) else rows.num_rows


def take_rows(rows: Rows, indices: np.ndarray) -> Rows:
    if isinstance(rows, tuple):
        chosen = torch.from_numpy(indices)
        return tuple(column.index_select(0, chosen) for column in rows)
    return rows.take(pa.array(indices))


def join_rows(parts: Sequence[Rows]) -> Rows:
    first = parts[0]
    if isinstance(first, tuple):
        return tuple(torch.cat([part[number] for part in parts]) for number in range(len(first)))
    return pa.concat_tables(parts).combine_chunks()


def split_rows(rows: Rows, lengths: Sequence[int]) -> list[Rows]:
    if isinstance(rows, tuple):
        columns = [column.split([*lengths]) for column in rows]
        return [*zip(*columns, strict=True)]
    ends = np.cumsum(lengths)
    return [rows.slice(end - length, length) for end, length in zip(ends.tolist(), lengths, strict=True)]
