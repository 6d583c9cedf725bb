"""Orderly shutdown of the process group when a program ends."""

import atexit
import contextlib
import sys
from datetime import timedelta

import torch.distributed as dist

_WAIT = timedelta(seconds=5)  # for processes that are slightly slower, without hanging on those that are gone


def leave_group_at_exit() -> None:
    """Destroy the gloo process group of this process when the interpreter ends.

    A process that ends with an open gloo group is sometimes aborted after all its work is done: "terminate called
    without an active exception", exit status 134, for which a launcher then restarts or fails the whole run. Lightning
    destroys only NCCL's groups.
    """
    atexit.unregister(_leave_group)  # register it once only
    atexit.register(_leave_group)


def _leave_group() -> None:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() != "gloo":
        return
    with contextlib.suppress(Exception):  # nothing here may change the exit status of the program
        if not hasattr(sys, "last_value"):  # after an error, the others must notice at once
            dist.monitored_barrier(timeout=_WAIT)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
