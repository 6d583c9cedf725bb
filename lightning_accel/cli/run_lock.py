"""One run at a time in one folder."""

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

_HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
_FAR = 1 << 30  # Windows locks bytes against reading, so one that stands behind the text


class RunLocks:
    """Locked files that say who uses a folder.

    A lock ends with its process, however that ends; processes that it started, such as workers of a DataLoader, do not
    hold it on. NFS locks for all machines since Linux 2.6.12; the lock of one that died lasts until its lease ends, a
    minute or two.
    """

    def __init__(self) -> None:
        self._files: dict[Path, IO[str]] = {}

    def __reduce__(self) -> tuple[type["RunLocks"], tuple[()]]:
        return RunLocks, ()  # optimizers of a config hold the command line, and are copied with their module

    def take(self, path: Path) -> bool:
        """Lock the file ``path``, which is made; False where another process has it."""
        path = path.resolve()
        while path not in self._files:
            file = open(path, "a+")  # noqa: SIM115  # open as long as it is locked
            try:
                _lock(file)
            except OSError as error:
                if error.errno in _HELD:
                    file.close()
                    return False
                rank_zero_warn(f"two runs in one folder go unnoticed: {path} cannot be locked ({error.strerror})")
            if not _is_at(file, path):  # its holder has ended since, and removed it
                file.close()
                continue
            if not self._files and hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self._leave)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%d %H:%M:%S')}")
            file.flush()
            self._files[path] = file
        return True

    def require(self, path: Path, folder: Path) -> None:
        """Lock the file ``path``, which stands for the use of ``folder``.

        Raises:
            UsageError: naming the process that uses it.
        """
        if self.take(path):
            return
        holder = ""
        with contextlib.suppress(OSError):  # it may have ended since
            holder = path.read_text()
        raise UsageError(
            f"another run is using {folder}: {holder or 'a process that has just started'}. Wait for its end, or give "
            "this run a folder of its own: --trainer.default_root_dir, the logger's save_dir, name or version, the "
            f"ModelCheckpoint's dirpath. Where that process is gone with its machine, remove {path}"
        )

    def _leave(self) -> None:
        """Close the files of the process that this one was forked from, which would hold the locks on."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def release(self) -> None:
        """Unlock and remove the files."""
        for path, file in self._files.items():
            with contextlib.suppress(OSError):  # Windows removes no open file
                path.unlink()
            file.close()
            with contextlib.suppress(OSError):
                if os.name == "nt":
                    path.unlink()
        self._files = {}


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(file: IO[str]) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(_FAR)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not lockf, which ends once anybody here reads the file
