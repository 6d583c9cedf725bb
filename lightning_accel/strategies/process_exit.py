"""Leaving the process group in order when a program ends."""

import atexit
import contextlib
import sys
from datetime import timedelta

import torch.distributed as dist

_WAIT = timedelta(seconds=5)  # for processes that are a little slower; those that are gone are not waited for


def leave_group_at_exit() -> None:
    """Have a gloo group destroyed when the interpreter ends, in this process.

    A process that ends with a gloo group still open is aborted now and then, after all its work is done: "terminate
    called without an active exception", exit status 134, for which a launcher then restarts or fails the whole run.
    Lightning destroys NCCL's groups alone.
    """
    atexit.unregister(_leave_group)  # once, however often it is asked for
    atexit.register(_leave_group)


def _leave_group() -> None:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() != "gloo":
        return
    with contextlib.suppress(Exception):  # nothing that happens here may change the status of the program
        if not hasattr(sys, "last_value"):  # one that ends with an error has the others learn of it at once
            dist.monitored_barrier(timeout=_WAIT)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
