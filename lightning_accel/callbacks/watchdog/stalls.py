"""Runs that stand still: what they wait for, and their end."""

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist

from lightning_accel._private.torch import LoaderIterator, awaited_worker, dataset_of, default_store

_log = logging.getLogger(__name__)
_GRACE = 5.0  # seconds for other processes to report that they wait, too


class StallWatch:
    """Watch from a thread of its own whether a run makes progress, and say what it waits for when it does not.

    Args:
        timeout: seconds without progress before the first warning; each further one comes after twice as long.
        ends: end the process with the first warning, with status 1, after the stacks of its threads are on stderr.
        found: takes the first warning of each time that the run stands still.
        tick: called every ``min(timeout / 4, 5)`` seconds while the run makes progress, from a further thread, since
            what it asks may not answer.
    """

    def __init__(self, timeout: float, ends: bool, found: Callable[[str], None], tick: Callable[[], None]) -> None:
        self.timeout, self.ends, self.found, self.tick = timeout, ends, found, tick
        self._activity = ""
        self._since = 0.0
        self._rank, self._world_size = 0, 1
        self._ended = threading.Event()

    def start(self, rank: int, world_size: int) -> None:
        """Begin to watch the calling thread, which is that of the Trainer."""
        self.stop()
        self._rank, self._world_size = rank, world_size
        self.note("while setting up")
        self._ended = threading.Event()
        arguments = (threading.get_ident(), self._ended)
        threading.Thread(target=self._watch, args=arguments, name="stalls", daemon=True).start()

    def stop(self) -> None:
        """End the watch; the thread is not joined, since it may be waiting for processes that do not answer."""
        self._ended.set()

    def note(self, activity: str) -> None:
        """Take it that the run makes progress, and begins with ``activity``."""
        self._activity, self._since = activity, time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ended": None}  # events cannot be copied or sent

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ended=threading.Event())

    # ---- watching thread

    def _watch(self, watched: int, ended: threading.Event) -> None:
        pause, since, asked = self.timeout, self._since, False
        ticking: threading.Thread | None = None
        while not ended.wait(min(self.timeout / 4, _GRACE)):
            if self._since != since:
                if asked:
                    default_store().delete_key(self._key(self._rank))
                pause, since, asked = self.timeout, self._since, False
                if ticking is None or not ticking.is_alive():
                    ticking = threading.Thread(target=self.tick, name="watchdog", daemon=True)
                    ticking.start()
            if time.monotonic() - since >= pause:
                text = self._describe(watched, since)
                _log.warning(text)
                if pause == self.timeout:
                    self.found(text)
                pause *= 2
                if self._world_size > 1 and dist.is_initialized():
                    asked = True
                    self._report_silent_processes(since, ended)
                if self.ends and self._since == since and not ended.is_set():
                    self._end()

    def _describe(self, watched: int, since: float) -> str:
        seconds, who = time.monotonic() - since, f"rank {self._rank} of {self._world_size}"
        who = who if self._world_size > 1 else "the run"
        where = _describe_wait(sys._current_frames()[watched])
        return f"{who} has stood still for {seconds:.0f} s {self._activity}. {where}"

    def _end(self) -> None:
        _log.error(f"rank {self._rank} ends with status 1, as on_hang='end' asks for; its threads are")
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)  # the main thread waits, and would wait in sys.exit, too

    def _report_silent_processes(self, since: float, ended: threading.Event) -> None:
        """Report to other processes that this one waits, and name those that do not report it."""
        silent: list[list[int]] = []
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        grace = min(self.timeout, _GRACE)

        def ask() -> None:  # in a separate thread, since rank 0, which hosts the store, may never answer
            default_store().set(self._key(self._rank), self._activity)
            ended.wait(grace)
            silent.append([rank for rank in others if not default_store().check([self._key(rank)])])

        asking = threading.Thread(target=ask, name="stalls", daemon=True)
        asking.start()
        asking.join(2 * grace)
        if self._since != since or ended.is_set():
            return
        if not silent:
            _log.warning(f"rank {self._rank} waits, and rank 0 does not answer: stopped or gone")
        elif silent[0]:
            names = ", ".join(map(str, silent[0]))
            _log.warning(f"rank {self._rank} waits, and does not hear from rank {names}: stopped, gone, or busy")

    def _key(self, rank: int) -> str:
        return f"watchdog/waits/{rank}"


def _describe_wait(frame: FrameType | None) -> str:
    for each in _frames(frame):
        owner = each.f_locals.get("self")
        if isinstance(owner, LoaderIterator):
            return _describe_loader(owner)
    calls = traceback.extract_stack(frame)[-3:]
    return "It is in " + ", called from ".join(f"{call.name} ({call.filename}:{call.lineno})" for call in calls[::-1])


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe_loader(batches: Any) -> str:
    """Describe the loader and the worker that is waited for, as far as torch exposes them."""
    name, awaited = type(dataset_of(batches)).__name__, awaited_worker(batches)
    if awaited is None:
        return f"It waits for a batch of {name}, which this process loads itself"
    worker, process = awaited
    state = "alive" if process.is_alive() else "dead"
    return (
        f"It waits for a batch of {name} from worker {worker}, process {process.pid}, which is {state}. "
        "DataLoader(timeout=SECONDS) would end such a wait with an error"
    )
