"""How long calls take, measured in turns, so that what else the machine does falls on all alike."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch


class Latency(NamedTuple):
    """Milliseconds of one call: the median, and what 95 of 100 calls stay below."""

    p50_ms: float
    p95_ms: float
    num_calls: int

    @property
    def is_noisy(self) -> bool:
        """Whether so many calls took much longer than others that something else must have run."""
        return self.p95_ms > 3 * self.p50_ms


def measure_latency(
    calls: Mapping[str, Callable[[], object]], seconds: float = 0.5, min_calls: int = 11, warmup: int = 3
) -> dict[str, Latency]:
    """Time each of ``calls``, one of each in turn, without gradients.

    Args:
        calls: by the name under which each is reported; none takes arguments.
        seconds: of measurement for each of them, on average; a round that has begun is ended.
        min_calls: of each, however long they take.
        warmup: calls of each before the first that counts; a compiler works in them.

    >>> list(measure_latency({"sum": lambda: sum(range(9))}, seconds=0.01))
    ['sum']
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for call in calls.values():
            for _ in range(warmup):
                call()
        end = time.perf_counter() + seconds * len(calls)
        rounds = 0
        while rounds < min_calls or time.perf_counter() < end:
            for name, call in calls.items():
                _finish_queued_work()
                start = time.perf_counter()
                call()
                _finish_queued_work()
                times[name].append(1e3 * (time.perf_counter() - start))
            rounds += 1
    return {
        name: Latency(float(np.median(taken)), float(np.percentile(taken, 95)), len(taken))
        for name, taken in times.items()
    }


def _finish_queued_work() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
