"""Files and folders that are whole or not there, whenever the process that writes them is killed."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class NotWrittenError(OSError):
    """A file that a disk did not take."""


@contextmanager
def write_atomically(
    path: str | os.PathLike[str], owner: bool = True, barrier: Callable[[], object] | None = None
) -> Iterator[Path]:
    """Yield a path beside ``path`` to write a file or a folder to; then put it in the place of ``path``.

    What stood at ``path`` stays until the new one is whole and on the disk. After an exception it stays for good, and
    what was written is removed. Where several processes write one folder, each enters with the same ``path``, one of
    them as ``owner``, and with a ``barrier``:

    >>> with write_atomically(path, owner=rank == 0, barrier=dist.barrier) as folder:  # doctest: +SKIP
    ...     torch.distributed.checkpoint.save(state, checkpoint_id=folder)

    Args:
        path: a local file or folder, which may exist.
        owner: whether this process makes room, renames and removes.
        barrier: waits for all processes. Called before the body, after it, and once the new one is in place.

    Raises:
        NotWrittenError: where the disk is full, naming it.
    """
    path = Path(path)
    partial = partial_path(path)
    if owner:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)  # of a process that was killed
    if barrier is not None:
        barrier()
    with _removed_on_failure(partial, path, owner):
        yield partial
    if barrier is not None:
        barrier()
    if owner:
        with _removed_on_failure(partial, path, owner):
            put_in_place(partial, path)
    if barrier is not None:
        barrier()


@contextmanager
def _removed_on_failure(partial: Path, path: Path, owner: bool) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if owner:
            with suppress(OSError):  # the first error is the one to tell
                _remove(partial)
        if not _is_of_the_disk(error):
            raise
        raise NotWrittenError(
            f"{path} could not be written: {_room(path.parent)}. Make room and start again; what was saved before "
            f"stays ({str(error).strip().splitlines()[0]})"
        ) from error


def _is_of_the_disk(error: BaseException) -> bool:
    """Whether a disk is full, or a quota or limit reached; torch tells it by a count of bytes (torch 2.13)."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "unexpected pos" in str(error) or "No space left" in str(error)


def _room(folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    return (
        f"the disk of {folder} is full, or a quota or the limit of a file's size is reached ({free:,} bytes are free)"
    )


def partial_path(path: str | os.PathLike[str]) -> Path:
    """Where :func:`write_atomically` has ``path`` written; no pattern such as ``*.ckpt`` finds it.

    >>> partial_path("run/last.ckpt").name
    '.last.ckpt.partial'
    """
    return _beside(Path(path), "partial")


def put_in_place(partial: Path, path: str | os.PathLike[str]) -> None:
    """Flush the file or folder ``partial`` to the disk and rename it to ``path``, in place of what is there.

    A file replaces a file in one step. No step of POSIX replaces a folder, so the old one is renamed first: a process
    that is killed in between leaves it under a name that :func:`find_written` knows.
    """
    path = Path(path)
    old = _beside(path, "replaced")
    _flush(partial)
    if path.is_dir() or (partial.is_dir() and os.path.lexists(path)):
        _remove(old)
        os.rename(path, old)
    os.replace(partial, path)
    _flush_entry(path.parent)
    _remove(old)


def remove_atomically(path: str | os.PathLike[str]) -> None:
    """Remove the file or folder ``path``, if it is there; a process that is killed leaves no part of it there."""
    _remove(Path(path))
    _remove(_beside(Path(path), "replaced"))


def find_written(path: str | os.PathLike[str]) -> Path:
    """Where the last whole thing that was written to ``path`` stands: there, or under the name it was replaced under.

    Raises:
        FileNotFoundError: if nothing was.
    """
    for candidate in (Path(path), _beside(Path(path), "replaced")):
        if candidate.exists():
            return candidate
    raise FileNotFoundError(f"nothing was written to {path}, or not to its end")


def _beside(path: Path, state: str) -> Path:
    return path.with_name(f".{path.name}.{state}")


def _remove(path: Path) -> None:
    removed = _beside(path, "removed")  # so that what is half removed has another name than what is whole
    if removed.exists():
        shutil.rmtree(removed)
    if path.is_dir() and not path.is_symlink():
        os.rename(path, removed)
        shutil.rmtree(removed)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Wait until ``path``, and all that is in it, is on the disk: a rename may get there before the bytes do."""
    for folder, _, files in os.walk(path):
        for name in files:
            _flush_entry(Path(folder, name))
        _flush_entry(Path(folder))
    if path.is_file():
        _flush_entry(path)


def _flush_entry(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
