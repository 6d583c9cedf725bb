"""Reports of what a run waits for when it makes no progress."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import lightning as L
import torch.distributed as dist

from lightning_accel._private.torch import LoaderIterator, awaited_worker, dataset_of, default_store
from lightning_accel.ops.renames import renamed_arguments

_log = logging.getLogger(__name__)
_GRACE = 5.0  # seconds for other processes to report that they wait, too


class StallMonitor(L.Callback):
    """Warn when a run makes no progress, with its current activity and the processes that do not answer.

    The command line adds it. If DataLoader workers fetch batches, it names the loader and the worker that the run waits
    for. With several processes, each one that waits reports it, and names those that do not: they are stopped, gone or
    busy. It warns again after twice as long, and ends nothing: a collective operation ends by the ``timeout`` of the
    strategy, a loader by its own (``DataLoader(timeout=SECONDS)``).

    Warnings go to the logger of this module, which is shown on the terminal unless logging is set up otherwise.

    Args:
        timeout: seconds without any batch, validation, checkpoint or other hook before the first warning.

    Raises:
        ValueError: if ``timeout`` is not above 0.
    """

    @renamed_arguments(after_s="timeout")
    def __init__(self, timeout: float = 120.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds; got {timeout}")
        self.timeout = timeout
        self._activity = ""
        self._since = 0.0
        self._rank, self._world_size = 0, 1
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()
        self._rank, self._world_size = trainer.global_rank, trainer.world_size
        self._set_activity("while setting up")
        self._ended = threading.Event()
        watched = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, args=(watched, self._ended), name="stalls", daemon=True)
        self._thread.start()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_thread": None, "_ended": None}  # threads cannot be copied or sent

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ended=threading.Event())

    def _set_activity(self, doing: str) -> None:
        self._activity, self._since = doing, time.monotonic()

    # ---- watching thread

    def _stop(self) -> None:
        self._ended.set()
        self._thread = None  # not joined, since it may be waiting for processes that do not answer

    def _watch(self, watched: int, ended: threading.Event) -> None:
        pause, since, asked = self.timeout, self._since, False
        while not ended.wait(min(self.timeout / 4, _GRACE)):
            if self._since != since:
                if asked:
                    self._store().delete_key(self._key(self._rank))
                pause, since, asked = self.timeout, self._since, False
            if time.monotonic() - since >= pause:
                pause *= 2
                self._warn(watched, since)
                if self._world_size > 1 and dist.is_initialized():
                    asked = True
                    self._report_silent_processes(since, ended)

    def _warn(self, watched: int, since: float) -> None:
        seconds, who = time.monotonic() - since, f"rank {self._rank} of {self._world_size}"
        who = who if self._world_size > 1 else "the run"
        where = _describe_wait(sys._current_frames()[watched])
        _log.warning(f"{who} has stood still for {seconds:.0f} s {self._activity}. {where}")

    def _report_silent_processes(self, since: float, ended: threading.Event) -> None:
        """Report to other processes that this one waits, and name those that do not report it."""
        silent: list[list[int]] = []
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        grace = min(self.timeout, _GRACE)

        def ask() -> None:  # in a separate thread, since rank 0, which hosts the store, may never answer
            self._store().set(self._key(self._rank), self._activity)
            ended.wait(grace)
            silent.append([rank for rank in others if not self._store().check([self._key(rank)])])

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
        return f"stall_monitor/{rank}"

    def _store(self) -> Any:
        return default_store()  # a collective would have to wait


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


def _hook(activity: str) -> Callable[..., None]:
    """Return a hook that sets the activity; the number of a batch is the third argument after the module at an end."""

    def set_activity(self: StallMonitor, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        number = args[2 if activity.startswith("after") else 1] if "{number}" in activity else None
        self._set_activity(activity.format(number=number, epoch=trainer.current_epoch, step=trainer.global_step))

    return set_activity


for _name, _activity in {
    "on_train_start": "fetching the first training batch",
    "on_train_batch_start": "in the forward pass of training batch {number} of epoch {epoch}",
    "on_before_backward": "in the backward pass after step {step}",
    "on_before_optimizer_step": "in the optimizer step after step {step}",
    "on_train_batch_end": "after training batch {number} of epoch {epoch}, before the next",
    "on_train_epoch_end": "at the end of epoch {epoch}",
    "on_validation_start": "fetching the first validation batch",
    "on_validation_batch_start": "in validation batch {number}",
    "on_validation_batch_end": "after validation batch {number}, before the next",
    "on_test_batch_start": "in test batch {number}",
    "on_test_batch_end": "after test batch {number}, before the next",
    "on_predict_batch_start": "in predict batch {number}",
    "on_predict_batch_end": "after predict batch {number}, before the next",
    "on_save_checkpoint": "saving a checkpoint",
    "on_train_end": "at the end of the fit",
}.items():
    setattr(StallMonitor, _name, _hook(_activity))
