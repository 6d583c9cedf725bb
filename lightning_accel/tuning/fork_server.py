"""Processes of trials, forked from one that has imported torch and Lightning, which takes most of a short trial."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import connection
from pathlib import Path

import numpy as np
import torch

_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # with it, looking for GPUs does not start CUDA, which survives no fork


def can_fork() -> bool:
    """Return whether forked processes are as good as new ones, as they are on Linux."""
    return sys.platform == "linux"


class ForkedProcess:
    """Wait for a process that a server has forked, as for a ``subprocess.Popen``."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Return its status if it has ended; the negative number of the signal that ended it."""
        if self.returncode is None:
            self.returncode = self._server.status_of(self.pid, wait=False)
        return self.returncode

    def wait(self) -> int:
        """Wait for its end and return its status."""
        while self.returncode is None:
            self.returncode = self._server.status_of(self.pid, wait=True)
        return self.returncode


class ForkServer:
    """Hold a process that imports what trials need once, runs nothing itself, and forks a process for each trial.

    It is started by the first trial, in a session of its own, and ends with the process that started it.

    Args:
        command: a program that calls :func:`serve`.
        environment: of all trials.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._known: set[int] = set()
        self._forked: list[int] = []
        self._statuses: dict[int, int] = {}
        self.has_ended = self.has_forked = False

    def fork(self, specification: Path, output: Path) -> ForkedProcess | None:
        """Return a new process, the leader of a session, that runs a trial; None if the server has ended.

        Args:
            specification: the trial's file.
            output: file of its standard output and error.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**self._environment, _BY_NVML: "1"},
                start_new_session=True,
            )
        assert self._process.stdin is not None
        request = json.dumps([str(specification.resolve()), str(output.resolve())])
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.has_ended = True
        while not self._forked and not self.has_ended:
            self._read(wait=True)
        return ForkedProcess(self, self._forked.pop()) if self._forked else None

    def status_of(self, pid: int, wait: bool) -> int | None:
        """Return the status of a process that has ended, None for others; SIGKILL's if the server has ended."""
        if pid not in self._statuses:
            self._read(wait)
        return self._statuses.pop(pid, -signal.SIGKILL if self.has_ended else None)

    def stop(self) -> None:
        """End the server, and the processes that it has forked."""
        if self._process is not None:
            self._process.terminate()  # one that still imports; others end with their input
            self._process.communicate()

    def _read(self, wait: bool) -> None:
        """Read what the server has written: the number of each new process, or that of an old one and its status."""
        assert self._process is not None
        assert self._process.stdout is not None
        place = self._process.stdout.fileno()
        while not self.has_ended and connection.wait([place], None if wait else 0):
            found = os.read(place, 4096)
            self.has_ended = not found
            *lines, self._rest = (self._rest + found).split(b"\n")
            for line in lines:
                pid, *status = json.loads(line)
                self.has_forked = True
                if pid not in self._known:
                    self._forked.append(pid)  # with a status if it has ended before it could report
                if status:
                    (self._statuses[pid],) = status
                    self._known.discard(pid)
                else:
                    self._known.add(pid)
            wait = False


def serve() -> Path | None:
    """Fork a process for each line of the standard input; return in each process its file.

    When the input ends, so do the processes and their groups, even one whose caller was killed before it knew of it;
    then None is returned.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    replies = os.dup(1)
    os.dup2(2, 1)
    ended, wakeup = os.pipe()
    for place in (ended, wakeup):
        os.set_blocking(place, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # which the wait would sleep through by default
    rest = b""
    forked: set[int] = set()
    while True:
        ready = connection.wait([0, ended])
        if ended in ready:
            os.read(ended, 4096)
            forked -= _report_ended(replies)
        if 0 in ready:
            found = os.read(0, 4096)
            if not found:
                _kill(forked)
                return None
            *lines, rest = (rest + found).split(b"\n")
            for line in lines:
                if pid := os.fork():
                    forked.add(pid)
                else:
                    signal.set_wakeup_fd(-1)
                    for number in (signal.SIGCHLD, signal.SIGTERM):
                        signal.signal(number, signal.SIG_DFL)
                    os.close(ended)
                    os.close(wakeup)
                    specification, output = json.loads(line)
                    _begin_trial(output, replies)
                    _require_cuda(specification)
                    return Path(specification)


def _report_ended(replies: int) -> set[int]:
    """Report which processes have ended, and return them."""
    ended: set[int] = set()
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.add(pid)
        with contextlib.suppress(BrokenPipeError):  # the caller was killed
            os.write(replies, json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode() + b"\n")


def _kill(forked: set[int]) -> None:
    for pid in forked:
        for kill in (os.kill, os.killpg):  # its group does not exist until it leaves that of the server
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)


def _begin_trial(output: str, replies: int) -> None:
    """Leave the server's session and files, and report that signals to the new group reach it from now on."""
    os.setsid()
    for path, flags, places in ((os.devnull, os.O_RDONLY, [0]), (output, os.O_WRONLY | os.O_CREAT, [1, 2])):
        opened = os.open(path, flags, 0o644)
        for place in places:
            os.dup2(opened, place)
        os.close(opened)
    np.random.seed()  # noqa: NPY002  # new processes begin with random numbers of their own
    os.write(replies, json.dumps([os.getpid()]).encode() + b"\n")
    os.close(replies)


def _require_cuda(specification: str) -> None:
    """Begin as a new process where there are GPUs and an import of the server has started CUDA."""
    os.environ.pop(_BY_NVML, None)
    if torch.cuda.device_count():
        try:
            torch.cuda.init()
        except RuntimeError:
            os.execv(sys.executable, [*sys.orig_argv, specification])
