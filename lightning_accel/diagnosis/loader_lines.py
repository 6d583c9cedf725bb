"""Lines of the user's code that loading a batch spends its time in."""

import copy
import linecache
import os
import sys
import time
from collections import Counter
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, NamedTuple

from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from lightning_accel._private.torch import tree_leaves
from lightning_accel.data.batched_fetch import random_state
from lightning_accel.diagnosis.call_tree import is_users_file, short_path
from lightning_accel.diagnosis.loader_times import set_workers

_NAMED = 2
_NOTABLE = 0.1  # share of loading from which a line is named
_WIDTH = 50  # characters of a line


class LoaderLine(NamedTuple):
    """Hold a line of the user's, its text, and its share of the time of loading, its calls of libraries included."""

    place: str
    text: str
    share: float


class LoaderTrace(NamedTuple):
    """Hold the most expensive lines of loading, and whether it draws random numbers."""

    lines: list[LoaderLine]
    draws: bool


class _LineClock:
    """Trace the user's functions alone, and add up the time from each line to the next one.

    Calls of libraries count as the line that calls them, those of the user's functions as the lines of these.
    """

    def __init__(self) -> None:
        self.ns: Counter[tuple[str, int] | None] = Counter()
        self._lines: list[tuple[str, int] | None] = [None]  # where each function on the way is; None for libraries
        self._are_users: dict[CodeType, bool] = {}
        self._since = 0

    def start(self) -> None:
        self._before = sys.gettrace()
        self._since = time.perf_counter_ns()
        sys.settrace(self._on_call)

    def stop(self) -> None:
        sys.settrace(self._before)
        self._add()

    def _add(self) -> None:
        self.ns[self._lines[-1]] += time.perf_counter_ns() - self._since

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code not in self._are_users:
            file = code.co_filename
            self._are_users[code] = is_users_file(file if file.startswith("<") else os.path.realpath(file))
        if not self._are_users[code]:
            return None
        self._add()
        self._lines.append((code.co_filename, frame.f_lineno))
        self._since = time.perf_counter_ns()
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._add()
        if event == "line":
            self._lines[-1] = (frame.f_code.co_filename, frame.f_lineno)
        elif event == "return":
            self._lines.pop()
        self._since = time.perf_counter_ns()
        return self._on_line


def trace_loading(loaders: Any, seconds: float, max_batches: int) -> LoaderTrace:
    """Load batches of all training loaders of torch in this process, from the second batch on, and trace them."""
    clock, draws = _LineClock(), False
    for loader in tree_leaves(loaders):
        if isinstance(loader, DataLoader):
            # a dataset may work in worker processes alone, such as one that worker_init_fn prepares
            with isolate_rng(include_cuda=False), suppress(Exception):
                draws |= _trace(loader, clock, seconds, max_batches)
    total = sum(clock.ns.values())
    lines = [
        LoaderLine(f"{short_path(os.path.realpath(line[0]))}:{line[1]}", _cut(text), ns / total)
        for line, ns in clock.ns.most_common()
        if line is not None and ns >= _NOTABLE * total and (text := linecache.getline(*line).strip())
    ]
    return LoaderTrace(lines[:_NAMED], draws)


def _trace(loader: DataLoader[Any], clock: _LineClock, seconds: float, max_batches: int) -> bool:
    """Load batches under a clock, and return whether that draws random numbers."""
    alone = copy.copy(loader)  # the workers of the other one stay
    set_workers(alone, 0)
    alone.timeout = 0
    batches = iter(alone)
    next(batches, None)
    before = random_state()
    begin = time.perf_counter()
    clock.start()
    try:
        for _ in range(max_batches):
            if time.perf_counter() - begin > seconds or next(batches, None) is None:
                break
    finally:
        clock.stop()
    return random_state() != before


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
