"""Processes that fall behind the others, and loaders that a run waits for."""

import json
import socket
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning_accel._private.torch import default_store
from lightning_accel.measure.step_parts import PART_NAMES

_STEPS = 20  # at least between two looks
_BEHIND = 0.1  # of a step that a process takes longer than most, in two looks in a row
_STARVED = 0.2  # of the time that the run waits for data, likewise
_OWN = ("data", "transfer")  # in which no process waits for another


class Times(NamedTuple):
    """Hold what a process has done since the begin of its fit.

    Attributes:
        step: training batches.
        parts: seconds by part, those of :data:`lightning_accel.measure.RUN_PARTS`.
        host: name of the machine.
    """

    step: int
    parts: Mapping[str, float]
    host: str

    def since(self, before: "Times") -> "Times":
        """Return the batches and seconds since ``before``."""
        parts = {part: spent - before.parts[part] for part, spent in self.parts.items()}
        return Times(self.step - before.step, parts, self.host)


class StepTimes:
    """Compare where the time of processes goes, through the store of their group, without a collective.

    Each process publishes its times. The first one compares how long each takes for its batches, and in the forward
    pass if it meets no others there, against the median of all. In the other parts of a step processes wait for each
    other, so that those who are fast take as long.

    Args:
        rank: of this process.
        world_size: number of processes.
        has_collectives: whether processes meet in their forward passes, as they do where buffers are broadcast.
        num_workers: of the training loader, None where that is not known.
    """

    def __init__(self, rank: int, world_size: int, has_collectives: bool, num_workers: int | None) -> None:
        self.rank, self.world_size, self.num_workers = rank, world_size, num_workers
        self._own = _OWN if has_collectives else (*_OWN, "forward")
        self._host = socket.gethostname()
        self._now: Times | None = None
        self._before: dict[int, Times] = {}
        self._suspects: set[str] = set()
        self._told: set[str] = set()
        self._is_first = True

    def note(self, step: int, parts: Mapping[str, float]) -> None:
        """Take the batches and seconds so far; the thread of the Trainer calls it after each batch."""
        self._now = Times(step, parts, self._host)

    def exchange(self) -> dict[str, str]:
        """Publish the times of this process, and return what the first one finds: texts by kind of finding."""
        now = self._now
        if now is None:
            return {}
        times = {self.rank: now}
        if self.world_size > 1:
            store: Any = default_store()
            store.set(self._key(self.rank), json.dumps(now))
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            if self.rank == 0 and self._is_first:
                self._is_first = False
                for rank in others:  # an earlier fit of these processes may have left some
                    store.delete_key(self._key(rank))
            if self.rank or not store.check([self._key(rank) for rank in others]):
                return {}
            times |= {rank: Times(*json.loads(store.get(self._key(rank)))) for rank in others}
        if not self._before:
            self._before = times
            return {}
        spent = {rank: one.since(self._before[rank]) for rank, one in times.items()}
        if min(one.step for one in spent.values()) < _STEPS:
            return {}
        self._before = times
        found = self._slow(spent) | self._starved(spent[0])
        due = {kind: text for kind, text in found.items() if kind in self._suspects and kind not in self._told}
        self._suspects = set(found)
        self._told |= set(due)
        return due

    def _slow(self, spent: Mapping[int, Times]) -> dict[str, str]:
        own = {
            rank: {part: time / one.step for part, time in one.parts.items() if part in self._own}
            for rank, one in spent.items()
        }
        totals = {rank: sum(parts.values()) for rank, parts in own.items()}
        slowest = max(totals, key=totals.__getitem__)
        typical = {part: statistics.median_low(parts[part] for parts in own.values()) for part in own[0]}
        excess = totals[slowest] - statistics.median_low(totals.values())
        step = sum(spent[0].parts[part] for part in spent[0].parts if part not in ("validation", "checkpoints"))
        step /= spent[0].step
        if excess < _BEHIND * step:
            return {}
        part = max(typical, key=lambda part: own[slowest][part] - typical[part])
        return {
            f"rank {slowest}": f"rank {slowest} of {self.world_size} ({spent[slowest].host}) falls behind: it takes "
            f"{1e3 * totals[slowest]:.3g} ms for its own part of a step, {1e3 * excess:.3g} more than most, most of it "
            f"in {PART_NAMES.get(part, part)}, and the others wait {excess / step:.0%} of each step of "
            f"{1e3 * step:.3g} ms"
        }

    def _starved(self, spent: Times) -> dict[str, str]:
        training = sum(time for part, time in spent.parts.items() if part not in ("validation", "checkpoints"))
        share = spent.parts["data"] / training
        if share < _STARVED:
            return {}
        advice = "lightning-accel doctor says which part of loading takes the time"
        if self.num_workers == 0:
            advice = "the loader has num_workers=0 and loads while nothing trains: give it workers; " + advice
        elif self.num_workers:
            advice = f"its {self.num_workers} workers are too slow or too few: {advice}"
        return {
            "data": f"the run waits for data {share:.0%} of its time, {1e3 * spent.parts['data'] / spent.step:.3g} ms "
            f"a step; {advice}"
        }

    def _key(self, rank: int) -> str:
        return f"watchdog/times/{rank}"
