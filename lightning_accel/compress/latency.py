"""How long calls take, in rounds of blocks, and whether one is faster than another or only seemed so."""

import math
import random
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch

ROUNDS = 11
CONFIDENCE = 0.98
# Two copies of one program differ by as much within one process, by where their buffers happen to lie
TIE = 1.03


class Latency(NamedTuple):
    """Milliseconds of one call: the median, and what 95 of 100 calls stay below."""

    p50_ms: float
    p95_ms: float
    num_calls: int
    rounds_ms: tuple[float, ...] = ()  # the median of each round, in which all that is compared had its turn

    @property
    def is_noisy(self) -> bool:
        """Whether so many calls took much longer than others that something else must have run."""
        return self.p95_ms > 3 * self.p50_ms


class Speedup(NamedTuple):
    """How many times faster one is than another, with an interval that holds the truth in 98 of 100 measurements."""

    ratio: float
    low: float = 0.0
    high: float = math.inf

    @property
    def is_faster(self) -> bool:
        """Whether the interval excludes a tie."""
        return self.low > TIE

    @property
    def margin(self) -> float | None:
        """How far the interval reaches to its farther side, as a share of the ratio; None if it has no end."""
        if not self.low or not math.isfinite(self.high):
            return None
        return max(self.high / self.ratio, self.ratio / self.low) - 1


def speedup(latency: Latency, reference: Latency) -> Speedup:
    """Compare two latencies of one measurement, round by round.

    The interval is that of the sign test for the median of the ratios: it asks nothing of their distribution, so that
    rounds in which something else ran widen it instead of moving it.

    >>> speedup(Latency(1.0, 1.0, 8, (1.0,) * 8), Latency(2.0, 2.0, 8, (2.0,) * 8))
    Speedup(ratio=2.0, low=2.0, high=2.0)
    """
    pairs = zip(latency.rounds_ms, reference.rounds_ms, strict=False)  # what was measured again has further rounds
    ratios = sorted(other / own for own, other in pairs)
    outside = _ranks_outside(len(ratios))
    if not outside:
        return Speedup(reference.p50_ms / latency.p50_ms)
    return Speedup(float(np.median(ratios)), ratios[outside - 1], ratios[-outside])


def ties(latencies: Mapping[str, Latency], names: Collection[str]) -> list[str]:
    """Return the fastest of ``names``, first, and those that it cannot be said to be faster than."""
    if not names:
        return []
    fastest = min(names, key=lambda name: latencies[name].p50_ms)
    others = [name for name in names if name != fastest]
    return [fastest, *(name for name in others if not speedup(latencies[fastest], latencies[name]).is_faster)]


class Stopwatch:
    """Measure calls against each other, without gradients, and go on where that was not enough.

    Args:
        calls: by the name under which each is reported; none takes arguments.
        warmup: calls of each before the first that counts; a compiler works in them.
    """

    def __init__(self, calls: Mapping[str, Callable[[], object]], warmup: int = 3) -> None:
        self.calls = calls
        self._rounds: dict[str, list[list[float]]] = {name: [] for name in calls}
        self._random = random.Random(0)
        with torch.inference_mode():
            for call in calls.values():
                for _ in range(warmup):
                    call()

    def run(self, seconds: float, rounds: int = ROUNDS, names: Collection[str] | None = None) -> None:
        """Add ``rounds`` to what was measured.

        In each, every call is repeated in a row for its share of ``seconds``, as a server repeats one model's. The
        order of the blocks differs from round to round. The first call of a block, which finds the caches full of
        another's data, does not count where there is a second one.

        Args:
            seconds: for each call, if that is enough for one in each round.
            rounds: how many to add.
            names: of the calls to measure; by default all.
        """
        names = list(self.calls if names is None else names)
        with torch.inference_mode():
            for _ in range(rounds):
                for name in self._random.sample(names, len(names)):
                    self._rounds[name].append(_block(self.calls[name], seconds / rounds))

    def latencies(self) -> dict[str, Latency]:
        """Return what was measured of each call so far."""
        return {name: _latency(blocks) for name, blocks in self._rounds.items()}


def measure_latency(
    calls: Mapping[str, Callable[[], object]], seconds: float = 0.5, rounds: int = ROUNDS, warmup: int = 3
) -> dict[str, Latency]:
    """Time each of ``calls``, in blocks of one call in a row, which take turns.

    Args:
        calls: by the name under which each is reported; none takes arguments.
        seconds: of measurement for each of them; a block that has begun has at least one call.
        rounds: blocks of each.
        warmup: calls of each before the first that counts; a compiler works in them.

    >>> list(measure_latency({"sum": lambda: sum(range(9))}, seconds=0.01))
    ['sum']
    """
    stopwatch = Stopwatch(calls, warmup)
    stopwatch.run(seconds, rounds)
    return stopwatch.latencies()


def _block(call: Callable[[], object], seconds: float) -> list[float]:
    """Milliseconds of calls in a row.

    ``torch.utils.benchmark.Timer`` times blocks as a whole, and so knows no tail of single calls.
    """
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        _finish_queued_work()
        start = time.perf_counter()
        call()
        _finish_queued_work()
        times.append(1e3 * (time.perf_counter() - start))
    return times[1:] or times


def _latency(blocks: list[list[float]]) -> Latency:
    times = [taken for block in blocks for taken in block]
    medians = tuple(float(np.median(block)) for block in blocks)
    return Latency(float(np.median(times)), float(np.percentile(times, 95)), len(times), medians)


def _ranks_outside(count: int) -> int:
    """How many of ``count`` sorted values lie on each side of an interval for their median, that one included."""
    tail, rank = 0.0, 0
    while rank < count:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        rank += 1
    return rank


def _finish_queued_work() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
