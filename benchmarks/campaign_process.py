"""Processes of the campaign: command lines in folders of their own, forked from a server that has imported it all."""

import faulthandler
import multiprocessing as mp
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L

PRELOADED = [
    "lightning_accel.cli.command", "lightning_accel.callbacks", "lightning_accel.compress", "campaign_process",
    "malformed_data",
]  # fmt: skip
_LOG = "log.txt"


class Ended(NamedTuple):
    """How a process came to its end."""

    status: int | None  # None: it was still running when its time was over; negative: the signal that ended it
    output: str
    seconds: float

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output


class Started(L.Callback):
    """Leave a file where training begins, which the campaign waits for before it kills."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            Path("started").touch()


def server() -> Any:
    """Start the process that others are forked from."""
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _run(folder: str, variables: Mapping[str, str], function: Callable[..., Any], arguments: Any) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.update(variables)
    log = os.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    sys.exit(function(*arguments))


def bound_memory(more_bytes: int) -> None:
    """Let this process have no more than ``more_bytes`` beyond what it has now."""
    limit = more_bytes + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def command_line(arguments: Sequence[str]) -> int:
    from lightning_accel.__main__ import main

    return main(list(arguments))


def start(
    context: Any, folder: Path, function: Callable[..., Any], *arguments: Any, variables: Mapping[str, str] = {}
) -> Any:
    process = context.Process(target=_run, args=(str(folder), dict(variables), function, arguments))
    process.start()
    return process


def start_ranks(context: Any, folder: Path, arguments: Sequence[str], world_size: int) -> list[Any]:
    """Start a command line as torchrun does, on ``world_size`` processes."""
    if world_size == 1:
        return [start(context, folder, command_line, arguments)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "campaign", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    return [
        start(
            context, folder, command_line, arguments, variables={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(world_size)
    ]


def end(processes: Sequence[Any], signal_number: int = signal.SIGKILL) -> None:
    """Signal processes and all that they started."""
    for process in processes:
        if process.is_alive():
            try:
                os.killpg(process.pid, signal_number)
            except ProcessLookupError:  # not yet the leader of a group of its own
                os.kill(process.pid, signal_number)


def wait(processes: Sequence[Any], seconds: float) -> bool:
    """Wait for all to end, and tell whether they have."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return not any(process.is_alive() for process in processes)


def run(context: Any, folder: Path, function: Callable[..., Any], *arguments: Any, seconds: float) -> Ended:
    """Run ``function`` in a process and wait for its end, ``seconds`` at most."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    process = start(context, folder, function, *arguments)
    is_over = wait([process], seconds)
    end([process])
    process.join()
    return Ended(process.exitcode if is_over else None, output(folder), time.monotonic() - began)


def output(folder: Path) -> str:
    path = folder / _LOG
    return path.read_text(errors="replace") if path.exists() else ""
