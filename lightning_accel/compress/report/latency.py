"""Latency measurements, in rounds of blocks, and comparisons with confidence intervals."""

import math
import random
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch

ROUNDS = 11
CONFIDENCE = 0.98
_MIN_CALLS, _LONG = 3, 0.5  # of a block: number of calls, which may be fewer from this many seconds on
# Two copies of the same program differ by as much within one process, depending on where their buffers lie in memory
TIE = 1.03


class Latency(NamedTuple):
    """Hold the latency of one call in milliseconds: its median and its 95th percentile."""

    p50_ms: float
    p95_ms: float
    num_calls: int
    rounds_ms: tuple[float, ...] = ()  # the median of each round, in which all compared calls take turns

    @property
    def is_noisy(self) -> bool:
        """Return whether so many calls took much longer than others that something else must have run."""
        return self.p95_ms > 3 * self.p50_ms

    @property
    def interval_ms(self) -> tuple[float, float]:
        """Return the 98% interval of the median over rounds, by the sign test; the median itself if rounds are few."""
        rounds = sorted(self.rounds_ms)
        outside = _ranks_outside(len(rounds))
        return (rounds[outside - 1], rounds[-outside]) if outside else (self.p50_ms, self.p50_ms)


class Speedup(NamedTuple):
    """Hold how many times faster one call is than another, with its 98% confidence interval."""

    ratio: float
    low: float = 0.0
    high: float = math.inf

    @property
    def is_faster(self) -> bool:
        """Return whether the interval excludes a tie."""
        return self.low > TIE

    @property
    def margin(self) -> float | None:
        """Return the distance to the farther end of the interval, as a share of the ratio; None if it is unbounded."""
        if not self.low or not math.isfinite(self.high):
            return None
        return max(self.high / self.ratio, self.ratio / self.low) - 1


def speedup(latency: Latency, reference: Latency) -> Speedup:
    """Compare two latencies of one measurement, round by round.

    The interval is that of the sign test for the median of the ratios: it assumes nothing about their distribution, so
    that rounds disturbed by other processes widen it instead of shifting it.

    >>> speedup(Latency(1.0, 1.0, 8, (1.0,) * 8), Latency(2.0, 2.0, 8, (2.0,) * 8))
    Speedup(ratio=2.0, low=2.0, high=2.0)
    """
    pairs = zip(latency.rounds_ms, reference.rounds_ms, strict=False)  # one may have further rounds
    ratios = sorted(other / own for own, other in pairs)
    outside = _ranks_outside(len(ratios))
    if not outside:
        return Speedup(reference.p50_ms / latency.p50_ms)
    return Speedup(float(np.median(ratios)), ratios[outside - 1], ratios[-outside])


def ties(latencies: Mapping[str, Latency], names: Collection[str]) -> list[str]:
    """Return the fastest of ``names``, followed by those that are not significantly slower."""
    if not names:
        return []
    fastest = min(names, key=lambda name: latencies[name].p50_ms)
    others = [name for name in names if name != fastest]
    return [fastest, *(name for name in others if not speedup(latencies[fastest], latencies[name]).is_faster)]


class Stopwatch:
    """Measure calls against each other, without gradients, and add further rounds where they are needed.

    Args:
        calls: functions without arguments, by name.
        warmup: untimed calls of each function, in which compilers run.
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
        """Measure ``rounds`` further rounds.

        In each round, every function is called repeatedly in a block of its share of ``seconds``, as a server repeats
        one model. The order of the blocks is random in each round. The first call of a block, which finds the caches
        filled with other data, is discarded unless it is the only one.

        Args:
            seconds: total time per function; each block has at least 3 calls, or half a second.
            rounds: number of rounds to add.
            names: functions to measure; by default all.
        """
        names = list(self.calls if names is None else names)
        with torch.inference_mode():
            for _ in range(rounds):
                for name in self._random.sample(names, len(names)):
                    self._rounds[name].append(_time_block(self.calls[name], seconds / rounds))

    def latencies(self) -> dict[str, Latency]:
        """Return the latency of each function, over all rounds so far."""
        return {name: _latency(blocks) for name, blocks in self._rounds.items()}


def measure_latency(
    calls: Mapping[str, Callable[[], object]], seconds: float = 0.5, rounds: int = ROUNDS, warmup: int = 3
) -> dict[str, Latency]:
    """Measure the latency of each of ``calls``, in blocks of repeated calls that take turns.

    Args:
        calls: functions without arguments, by name.
        seconds: total time per function; each block has at least 3 calls, or half a second.
        rounds: blocks per function.
        warmup: untimed calls of each function, in which compilers run.

    >>> list(measure_latency({"sum": lambda: sum(range(9))}, seconds=0.01))
    ['sum']
    """
    stopwatch = Stopwatch(calls, warmup)
    stopwatch.run(seconds, rounds)
    return stopwatch.latencies()


def _time_block(call: Callable[[], object], seconds: float) -> list[float]:
    """Return the times of consecutive calls in milliseconds.

    ``torch.utils.benchmark.Timer`` times whole blocks, which hides the tail of single calls.
    """
    times: list[float] = []
    begin = time.perf_counter()
    while _is_too_short(time.perf_counter() - begin, len(times), seconds):
        _synchronize()
        start = time.perf_counter()
        call()
        _synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times[1:] or times


def _is_too_short(taken: float, num_calls: int, seconds: float) -> bool:
    """Return whether a block goes on: a single call finds the caches filled with the data of other forms."""
    return not num_calls or taken < seconds or (num_calls < _MIN_CALLS and taken < _LONG)


def _latency(blocks: list[list[float]]) -> Latency:
    times = [taken for block in blocks for taken in block]
    medians = tuple(float(np.median(block)) for block in blocks)
    return Latency(float(np.median(times)), float(np.percentile(times, 95)), len(times), medians)


def _ranks_outside(count: int) -> int:
    """Return the rank, from each end of ``count`` sorted values, of the ends of an interval for their median."""
    tail, rank = 0.0, 0
    while rank < count:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        rank += 1
    return rank


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
