"""Folders for the files of a run, and locks that let only one run at a time use them."""

import contextlib
import errno
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import lightning as L
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_accel._private.lightning import given_version, set_version
from lightning_accel.cli.errors import UsageError
from lightning_accel.ops.names import list_some
from lightning_accel.strategies.checkpoints.io import checkpoint_io_of

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


_FILES_WITHOUT_RUN = "config_", "events.out.tfevents.", "hparams.yaml"
_LONGEST_NAME = 200  # bytes; file systems allow 255, and suffixes are added


class ConfigSaver(SaveConfigCallback):
    """Save the config as ``config_fit.yaml``, ``config_test.yaml`` ... in the run folder, overwriting nothing.

    Loggers with separate folders get one copy each. A run without a logger has no folder, and saves no config.

    Attributes:
        path: of the first copy, None before it is saved.
    """

    path: Path | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.already_saved or not trainer.loggers:
            return
        self.already_saved = True
        log_dir = trainer.log_dir  # asked on every process, since it is broadcast
        if not trainer.is_global_zero:
            return
        assert trainer.state.fn is not None
        text = self.parser.dump(self.config, skip_none=False)
        name = "export" if getattr(trainer, "is_exporting", False) else trainer.state.fn.value
        others = [logger for logger in trainer.loggers[1:] if isinstance(logger, CSVLogger | TensorBoardLogger)]
        of_others = [Path(logger.log_dir) for logger in others if "://" not in logger.root_dir]
        for folder in dict.fromkeys([Path(log_dir or trainer.default_root_dir), *of_others]):
            saved = _save_under_free_name(folder, f"config_{name}", text)
            self.path = self.path or saved


def _save_under_free_name(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    number = 1
    while path.exists() and path.read_text() != text:
        number += 1
        path = folder / f"{name}_{number}.yaml"
    path.write_text(text)
    return path


def warn_of_other_folders(trainer: L.Trainer, default_root_dir: str | os.PathLike[str] | None) -> None:
    """Warn where an option that names a folder leaves loggers in another, as in a config with two of them."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger | TensorBoardLogger)]
    roots = list(dict.fromkeys(os.path.normpath(logger.save_dir) for logger in loggers))
    mend = "To write elsewhere, give one logger: --trainer.logger CSVLogger --trainer.logger.save_dir FOLDER"
    if len(roots) > 1 and len({logger.name for logger in loggers}) == 1:
        rank_zero_warn(
            f"the loggers of this run write below different folders, {list_some(roots)}: an option such as "
            f"--trainer.logger.save_dir changes the last of a config's loggers alone. {mend}"
        )
    if default_root_dir is not None and roots and os.path.normpath(trainer.default_root_dir) not in roots:
        rank_zero_warn(
            f"--trainer.default_root_dir {default_root_dir} changes no folder of this run: its loggers write below "
            f"{list_some(roots)}. {mend}"
        )


def reserve_run_folder(trainer: L.Trainer, locks: RunLocks) -> list[Path]:
    """Give loggers with the same ``save_dir`` and ``name`` one numbered folder, which no other run uses.

    A logger picks the next free number when it is first asked. Here the folder is created at once: of runs that start
    together, the one that creates a folder gets its number, and the others try the next.

    Returns:
        the folders that were created, outermost first.

    Raises:
        UsageError: if the config names a folder that another run is using, or resumes in one.
    """
    loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger | TensorBoardLogger)]
    made: list[Path] = []
    for root in dict.fromkeys(logger.root_dir for logger in loggers):
        sharing = [logger for logger in loggers if logger.root_dir == root]
        numbered = [logger for logger in sharing if given_version(logger) is None]  # reading the property would set it
        for logger in sharing:
            _ = logger.version
        if trainer.is_global_zero and "://" not in root:  # the other processes get its folder and share its locks
            made += _make_folder(Path(root))
            made += [_make_next_folder(numbered, locks)] if numbered else []
            for logger in sharing:
                if logger not in numbered:
                    lock_run_folder(logger, locks)
    return made


def _make_next_folder(loggers: list[CSVLogger | TensorBoardLogger], locks: RunLocks) -> Path:
    while True:
        folder = Path(loggers[0].root_dir, f"version_{loggers[0].version}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            if locks.take(_lock_file(folder)):
                return folder
        number = int(folder.name.removeprefix("version_")) + 1
        for logger in loggers:
            set_version(logger, number)


def lock_run_folder(logger: CSVLogger | TensorBoardLogger, locks: RunLocks) -> None:
    """Lock the folder of a logger for this run.

    Raises:
        UsageError: if another run uses it, which the message names.
    """
    folder = run_folder_of(logger)
    _make_folder(Path(logger.root_dir))
    locks.require(_lock_file(folder), folder)


def run_folder_of(logger: CSVLogger | TensorBoardLogger) -> Path:
    """Return the folder of a logger's run, which holds the checkpoints; ``log_dir`` may be a folder within it."""
    return Path(logger.root_dir, logger.version if isinstance(logger.version, str) else f"version_{logger.version}")


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")  # beside it, since loggers warn of folders that are not empty


def remove_empty(folders: list[Path]) -> None:
    """Remove those of the ``folders``, given outermost first, that are empty."""
    for path in reversed(folders):
        with contextlib.suppress(OSError):  # not empty
            path.rmdir()


def remove_without_run(folders: list[Path]) -> None:
    """Remove those of the ``folders`` of a run that failed before its first step, if nothing but logs is there."""
    for folder in reversed(folders):
        files = list(folder.iterdir()) if folder.name.startswith("version_") else []
        if all(file.is_file() and file.name.startswith(_FILES_WITHOUT_RUN) for file in files):
            for file in files:
                file.unlink()
    remove_empty(folders)


def require_names(trainer: L.Trainer) -> None:
    """Reject names of checkpoints and runs that are no valid file names, or lead out of their folder.

    Raises:
        UsageError: naming the option.
    """
    names = [
        (f"{type(keeper).__name__}.{option}", getattr(keeper, option, None), "dirpath")
        for keeper in trainer.checkpoint_callbacks
        for option in ("filename", "CHECKPOINT_NAME_LAST")
    ]
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger | TensorBoardLogger):
            names.append((f"{type(logger).__name__}.name", logger.name, "save_dir"))
    for option, name, folder in names:
        path = Path(name or "")
        if path.is_absolute() or ".." in path.parts or "\0" in str(path):
            raise UsageError(f"{option} is a name in its {folder}; got {name!r}. Give the folder as {folder}")
        if longest := [part for part in path.parts if len(part.encode()) > _LONGEST_NAME]:
            raise UsageError(
                f"{option} has at most {_LONGEST_NAME} bytes between slashes, so that files can be named by it; got "
                f"{len(longest[0].encode())}, {longest[0][:40]!r}..."
            )


def require_writable(trainer: L.Trainer) -> None:
    """Reject folders for logs or checkpoints that cannot be created or written.

    Raises:
        UsageError: naming the folder.
    """
    if not trainer.is_global_zero:
        return
    folders = {getattr(logger, "root_dir", None) or logger.save_dir for logger in trainer.loggers}
    for keeper in trainer.checkpoint_callbacks:
        folders.add(getattr(keeper, "dirpath", None) or (None if trainer.loggers else trainer.default_root_dir))
    if (copies := checkpoint_io_of(trainer.strategy).copies) is not None:
        folders.add(copies.folder)
    for folder in folders:
        if folder is None or "://" in str(folder):
            continue
        made = _make_folder(Path(folder))
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise _unwritable(folder, error) from error
        finally:
            remove_empty(made)


def _make_folder(folder: Path) -> list[Path]:
    """Create a folder; return the folders that were missing, outermost first."""
    missing = [path for path in (*reversed(folder.parents), folder) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return missing


def _unwritable(folder: Path | str, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write to the log folder {folder}: {error.strerror or error}. Give another: "
        "--trainer.default_root_dir, the logger's save_dir, the checkpoint's dirpath, or the plug-in's local_folder"
    )
