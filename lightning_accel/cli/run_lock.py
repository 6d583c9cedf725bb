"""Locks that let only one run at a time use a folder."""

import contextlib
import errno
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO

from lightning.pytorch.utilities import rank_zero_warn

from lightning_accel.cli.errors import UsageError

_LOCKED_ERRORS = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
_LOCK_OFFSET = 1 << 30  # Windows locks bytes against reading, so lock one behind the text


class RunLocks:
    """Hold locked files that mark folders as in use.

    A lock ends with its process, however that ends; child processes, such as workers of a DataLoader, do not prolong
    it. NFS supports these locks between machines since Linux 2.6.12; the lock of a dead machine lasts until its lease
    ends, a minute or two.
    """

    def __init__(self) -> None:
        self._files: dict[Path, IO[str]] = {}

    def __reduce__(self) -> tuple[type["RunLocks"], tuple[()]]:
        return RunLocks, ()  # optimizers from a config refer to the command line, and are copied with their module

    def take(self, path: Path) -> bool:
        """Create and lock the file ``path``; return False if another process holds the lock."""
        path = path.resolve()
        while path not in self._files:
            file = open(path, "a+")  # noqa: SIM115  # stays open while it is locked
            try:
                _lock(file)
            except OSError as error:
                if error.errno in _LOCKED_ERRORS:
                    file.close()
                    return False
                rank_zero_warn(f"two runs in one folder go unnoticed: {path} cannot be locked ({error.strerror})")
            if not _is_same_file(file, path):  # another process has removed it meanwhile
                file.close()
                continue
            if not self._files and hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self._close_in_child)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%d %H:%M:%S')}")
            file.flush()
            self._files[path] = file
        return True

    def require(self, path: Path, folder: Path) -> None:
        """Lock the file ``path``, which marks ``folder`` as in use.

        Raises:
            UsageError: if another process uses it, which the message names.
        """
        if self.take(path):
            return
        holder = ""
        with contextlib.suppress(OSError):  # it may have been removed meanwhile
            holder = path.read_text()
        raise UsageError(
            f"another run is using {folder}: {holder or 'a process that has just started'}. Wait for its end, or give "
            "this run a folder of its own: --trainer.default_root_dir, the logger's save_dir, name or version, the "
            f"ModelCheckpoint's dirpath. Where that process is gone with its machine, remove {path}"
        )

    def _close_in_child(self) -> None:
        """Close the files inherited in a forked process, which would otherwise keep the locks."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def release(self) -> None:
        """Unlock and remove the files."""
        for path, file in self._files.items():
            with contextlib.suppress(OSError):  # Windows cannot remove an open file
                path.unlink()
            file.close()
            with contextlib.suppress(OSError):
                if os.name == "nt":
                    path.unlink()
        self._files = {}


def _is_same_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(file: IO[str]) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(_LOCK_OFFSET)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # lockf would unlock when this process reads the file
