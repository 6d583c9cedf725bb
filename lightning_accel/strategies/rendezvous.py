"""Start and end of the process group of a run."""

import atexit
import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

_log = logging.getLogger(__name__)
_FIRST_AFTER = 30.0  # seconds
_WAIT = timedelta(seconds=5)  # for processes that are slightly slower, without hanging on those that are gone


@contextlib.contextmanager
def joining_process_group(environment: ClusterEnvironment | None, timeout: timedelta | None) -> Iterator[None]:
    """Warn while processes wait for each other, and let this one leave their group in order when it ends.

    The first warning comes after 30 s or ``timeout`` / 4, the others at growing intervals. The group outlives the run,
    since runs that follow, and modules that stay sharded, use it.

    Args:
        environment: cluster environment with the main address and port; None for no warnings.
        timeout: time after which torch stops waiting.
    """
    leave_group_at_exit()
    if environment is None:
        yield
        return
    met, began = threading.Event(), time.monotonic()
    pause = _FIRST_AFTER if timeout is None else min(_FIRST_AFTER, timeout.total_seconds() / 4)

    def watch(pause: float) -> None:
        while not met.wait(pause):
            pause *= 2
            _log.warning(_state(environment, time.monotonic() - began, timeout))

    thread = threading.Thread(target=watch, args=(pause,), name="rendezvous", daemon=True)
    thread.start()
    try:
        yield
    finally:
        met.set()
        thread.join()


def _state(environment: Any, seconds: float, timeout: timedelta | None) -> str:
    address, port, rank = environment.main_address, environment.main_port, environment.global_rank()
    try:
        if rank:
            socket.create_connection((address, port), timeout=2).close()
        missing = "Rank 0 is there" if rank == 0 else "Something listens there, so rank 0 seems to have come"
        missing += "; another process is missing"
    except socket.gaierror:
        missing = f"No host of that name is known here: set MASTER_ADDR to the machine of rank 0, not to {address!r}"
    except OSError as error:
        missing = f"Nobody answers there ({error}): start rank 0, or set MASTER_ADDR and MASTER_PORT to where it is"
    end = "" if timeout is None else f". The run fails after {timeout}, the timeout of its strategy"
    return (
        f"rank {rank} of {environment.world_size()} has waited {seconds:.0f} s for the other processes at "
        f"{address}:{port}. {missing}{end}"
    )


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
