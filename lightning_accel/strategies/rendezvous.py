"""Warnings about the processes that a run waits for before it begins."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment

_log = logging.getLogger(__name__)
_FIRST_AFTER = 30.0  # seconds


@contextmanager
def waiting_for_processes(environment: ClusterEnvironment | None, timeout: timedelta | None) -> Iterator[None]:
    """Warn while processes wait for each other, first after 30 s or ``timeout`` / 4, then at growing intervals.

    Args:
        environment: cluster environment with the main address and port; None for no warnings.
        timeout: time after which torch stops waiting.
    """
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
