"""Atomic writing and removal of files and folders: they are complete or absent, even if the process is killed."""

import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path


class NotWrittenError(OSError):
    """Report that a disk could not take a file."""


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Raise errors of a full or read-only disk as one that names ``path``, what was found and what to do.

    Raises:
        NotWrittenError: if the disk is full, or may not be written.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, NotWrittenError) or (reason := _disk_info(error, path)) is None:
            raise
        cause = str(error).strip().splitlines()[0]
        raise NotWrittenError(
            f"{path} could not be written: {reason}; what was saved before stays ({cause})"
        ) from error


@contextmanager
def write_atomically(
    path: str | os.PathLike[str], owner: bool = True, barrier: Callable[[], object] | None = None
) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` to write a file or a folder to, then move it to ``path``.

    What stood at ``path`` stays until the new file or folder is complete and flushed to the disk. If the body raises,
    it stays for good, and what was written is removed. If several processes write one folder, each enters with the same
    ``path``, one of them as ``owner``, and with a ``barrier``:

    >>> with write_atomically(path, owner=rank == 0, barrier=dist.barrier) as folder:  # doctest: +SKIP
    ...     torch.distributed.checkpoint.save(state, checkpoint_id=folder)

    Args:
        path: a local file or folder, which may exist.
        owner: whether this process creates parent folders, renames and removes.
        barrier: waits for all processes. Called before the body, after it, and once the new version is in place.

    Raises:
        NotWrittenError: if the disk is full, or may not be written; the message names it.
    """
    with write_in_parts(path, owner, functools.partial(_then, barrier)) as partial:
        yield partial


@contextmanager
def write_in_parts(
    path: str | os.PathLike[str], owner: bool, part: Callable[[], AbstractContextManager[None]]
) -> Iterator[Path]:
    """Write as :func:`write_atomically` does, each part of the work in a context of ``part``.

    Raises:
        NotWrittenError: if the disk is full, or may not be written; the message names it.
    """
    path = Path(path)
    partial = partial_path(path)
    with part():
        if owner:
            with explain_disk_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                _remove(partial)  # left behind by a process that was killed
    with _remove_on_failure(partial, path, owner), part():
        yield partial
    with _remove_on_failure(partial, path, owner), part():
        if owner:
            replace_atomically(partial, path)


@contextmanager
def _then(barrier: Callable[[], object] | None) -> Iterator[None]:
    yield
    if barrier is not None:
        barrier()


@contextmanager
def _remove_on_failure(partial: Path, path: Path, owner: bool) -> Iterator[None]:
    try:
        with explain_disk_errors(path):
            yield
    except BaseException:
        if owner:
            with suppress(OSError):  # report the first error, not one raised while cleaning up
                _remove(partial)
        raise


def is_disk_full(error: BaseException) -> bool:
    """Return whether ``error`` means a full disk, a quota or a size limit; torch 2.13 reports it as a byte count."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    return isinstance(error, NotWrittenError) or "unexpected pos" in str(error) or "No space left" in str(error)


def _disk_info(error: BaseException, path: Path) -> str | None:
    """Return what is wrong with the disk of ``path``, and what to do; None if ``error`` has another reason."""
    folder = next(one for one in path.absolute().parents if one.is_dir())
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{folder} is read-only for this user. Choose another folder, or have this one made writable"
    if not is_disk_full(error):
        return None
    return (
        f"the disk of {folder} is full, or a quota or the limit of a file's size is reached "
        f"({shutil.disk_usage(folder).free:,} bytes are free). Make room and start again"
    )


def partial_path(path: str | os.PathLike[str]) -> Path:
    """Return the path that :func:`write_atomically` uses for ``path``; no pattern such as ``*.ckpt`` finds it.

    >>> partial_path("run/last.ckpt").name
    '.last.ckpt.partial'
    """
    return _hidden_sibling(Path(path), "partial")


def replace_atomically(partial: Path, path: str | os.PathLike[str]) -> None:
    """Flush the file or folder ``partial`` to the disk and rename it to ``path``, replacing what is there.

    A file replaces a file in one step. POSIX has no such step for folders, so the old folder is renamed first: if the
    process is killed in between, :func:`find_written` finds it under that name.
    """
    path = Path(path)
    old = _hidden_sibling(path, "replaced")
    _flush(partial)
    if path.is_dir() or (partial.is_dir() and os.path.lexists(path)):
        _remove(old)
        os.rename(path, old)
    os.replace(partial, path)
    _flush_entry(path.parent)
    _remove(old)


def remove_atomically(path: str | os.PathLike[str]) -> None:
    """Remove the file or folder ``path``, if it exists; if the process is killed, no part of it remains at ``path``."""
    _remove(Path(path))
    _remove(_hidden_sibling(Path(path), "replaced"))


def find_written(path: str | os.PathLike[str]) -> Path:
    """Return the last complete file or folder written to ``path``: at ``path``, or where its replacement moved it.

    Raises:
        FileNotFoundError: if nothing was written completely.
    """
    for candidate in (Path(path), _hidden_sibling(Path(path), "replaced")):
        if candidate.exists():
            return candidate
    raise FileNotFoundError(f"nothing was written to {path}, or not to its end")


def _hidden_sibling(path: Path, state: str) -> Path:
    return path.with_name(f".{path.name}.{state}")


def _remove(path: Path) -> None:
    removed = _hidden_sibling(path, "removed")  # a half-removed folder must not have the name of a complete one
    if removed.exists():
        shutil.rmtree(removed)
    if path.is_dir() and not path.is_symlink():
        os.rename(path, removed)
        shutil.rmtree(removed)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Flush ``path`` and everything in it to the disk, since a rename may reach the disk before the bytes do."""
    for folder, _, files in os.walk(path):
        for name in files:
            _flush_entry(Path(folder, name))
        _flush_entry(Path(folder))
    if path.is_file():
        _flush_entry(path)


def _flush_entry(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
