"""One account of a fit's time for all callbacks that ask for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import lightning as L
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_accel.callbacks.trainer_callbacks import callbacks_of
from lightning_accel.measure.run_parts import RunParts


@dataclass
class _Attached:
    parts: RunParts
    profiler: Profiler  # of the Trainer before
    users: int = 0


_ATTACHED: WeakKeyDictionary[L.Trainer, _Attached] = WeakKeyDictionary()


def attach_run_parts(trainer: Any) -> RunParts:
    """Return the account of the time of ``trainer``, which begins now unless another callback has begun it.

    A profiler of the user keeps getting all actions.
    """
    attached = _ATTACHED.get(trainer)
    if attached is None:
        parts, profiler = RunParts(_idle_hooks(trainer)), trainer.profiler
        if isinstance(profiler, PassThroughProfiler):
            trainer.profiler = parts
        else:
            profiler.start, profiler.stop = _both(parts.start, profiler.start), _both(parts.stop, profiler.stop)
        attached = _ATTACHED[trainer] = _Attached(parts, profiler)
    attached.users += 1
    return attached.parts


def detach_run_parts(trainer: Any) -> None:
    """End one use of the account; after the last, the Trainer has the profiler that it had."""
    attached = _ATTACHED[trainer]
    attached.users -= 1
    if attached.users:
        return
    if trainer.profiler is attached.parts:
        trainer.profiler = attached.profiler
    else:
        vars(attached.profiler).pop("start", None)
        vars(attached.profiler).pop("stop", None)
    del _ATTACHED[trainer]


def _idle_hooks(trainer: L.Trainer) -> set[str]:
    """Return the names of actions that are hooks which a callback does not have."""
    hooks = [name for name in dir(L.Callback) if name.startswith("on_")]
    return {
        f"[Callback]{callback.state_key}.{hook}"
        for callback in callbacks_of(trainer, L.Callback)
        for hook in hooks
        if not is_overridden(hook, callback, L.Callback)
    }


def _both(first: Callable[[str], None], second: Callable[[str], None]) -> Callable[[str], None]:
    def call(action_name: str) -> None:
        first(action_name)
        second(action_name)

    return call
