"""Reading of checkpoints that detects damage and runs no code from them.

Files of ``torch.save`` are archives whose parts have CRC-32 checksums, which ``torch.load`` does not compare. A sharded
folder contains such files, too: each saved tensor is one, and so is ``meta.pt``.
"""

import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lightning_accel.ops.bounds import local_path
from lightning_accel.strategies.sharding.metadata import (
    METADATA,
    REST,
    UntrustedCheckpointError,
    items_by_file,
    read_metadata,
    require_no_code,
)


class DamagedCheckpointError(ValueError):
    """Report a file or folder that differs from what was written, or is no checkpoint at all."""


def find_damage(path: str | os.PathLike[str]) -> str:
    """Describe the damage to a file of ``torch.save`` or a sharded folder; return an empty string if there is none.

    Everything is read once in a process (500 MB in 0.2 s from the cache of the system), and again if it has changed.
    For files written without checksums (``torch.serialization.set_crc32_options(False)``) only the length is checked.
    """
    path = Path(path)
    return _cached_damage(path, _file_stats(path))


def require_undamaged(path: str | os.PathLike[str]) -> None:
    """Raise an error if :func:`find_damage` finds damage.

    Raises:
        DamagedCheckpointError: naming the file or folder, and what is wrong.
    """
    if damage := find_damage(path):
        raise DamagedCheckpointError(
            f"the checkpoint {path} is damaged: {damage}. Take another checkpoint of the run, or copy it again"
        )


def require_loadable(path: str | Path, weights_only: bool | None) -> None:
    """Reject a file or sharded folder that is damaged, and a folder that would run code unless that is allowed.

    Raises:
        DamagedCheckpointError: naming what is wrong.
        UntrustedCheckpointError: naming the objects that could run code.
    """
    path = Path(path)
    if path.is_dir():
        require_undamaged(path)  # also where it has no table: torch would take another in its place
        if weights_only is not False:
            require_no_code(path)
    elif is_archive(path):
        require_undamaged(path)


@contextmanager
def verified_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Compare the checksums of a file of ``torch.save`` before the body reads it, and explain errors of the body.

    Raises:
        DamagedCheckpointError: if the file is damaged, or was not written by ``torch.save``.
        pickle.UnpicklingError: if it holds objects other than tensors and plain values, which the body rejects.
    """
    of_archive = is_archive(path)
    if of_archive:
        require_undamaged(path)
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, PermissionError, MemoryError):
        raise
    except Exception as error:  # torch.load raises many types of errors for files that are not its own
        if of_archive and isinstance(error, pickle.UnpicklingError) and "Unsupported operand" not in str(error):
            raise
        raise DamagedCheckpointError(
            f"{path} is not a whole checkpoint ({os.path.getsize(path):,} bytes): it was cut short when it was written "
            "or copied, or is another kind of file. Use another checkpoint of the run, or copy it again"
        ) from error


def read_checkpoint(path: str | os.PathLike[str], weights_only: bool | None = True, mmap: bool = False) -> Any:
    """Read a file of ``torch.save`` to the CPU after comparing its checksums.

    Args:
        path: a local file.
        weights_only: False lets the file run code.
        mmap: leave tensors on the disk until they are used.
    """
    path = local_path(path, "checkpoint")
    with verified_file(path):
        mmap = mmap and is_archive(path)
        return torch.load(path, map_location="cpu", weights_only=weights_only is not False, mmap=mmap)


def is_archive(file: str | os.PathLike[str] | io.BytesIO) -> bool:
    """Return whether a file is a zip archive, or was one before its end was damaged."""
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:  # it has the mark of an archive's end, and nonsense beside it
        return True


def _file_stats(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return name, size and times of change of a file, or of each file in a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, info.st_size, info.st_mtime_ns, info.st_ctime_ns) for name, info in found)


@lru_cache(maxsize=256)
def _cached_damage(path: Path, fingerprint: tuple[tuple[str, int, int, int], ...]) -> str:
    if not fingerprint:
        return "there is nothing in it" if path.is_dir() else "it is not there"
    return _damage_of_folder(path) if path.is_dir() else _damage_of_archive(path)


def _damage_of_archive(file: Path | io.BytesIO) -> str:
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:  # a small file may unpack to any size
                    return f"its part {entry.filename} is compressed, which torch.save does not do"
            if not any(entry.CRC for entry in archive.infolist()):
                return ""  # written without checksums
            wrong = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return f"its part {wrong} has another checksum than when it was written" if wrong else ""


def _damage_of_folder(folder: Path) -> str:
    """Describe the damage to a sharded folder, whose shards are written first, then their table, then the rest."""
    for name in (METADATA, REST):
        if not (folder / name).is_file():
            return f"it has no {name}"
    if damage := _damage_of_archive(folder / REST):
        return f"{REST}: {damage}"
    try:
        parts = items_by_file(folder, read_metadata(folder))
    except UntrustedCheckpointError:
        return ""  # not damage: loading it is rejected with the reason
    except ValueError as error:
        return str(error)
    for name, slices in parts.items():
        with open(folder / name, "rb") as file:
            for item, start, length in slices:
                file.seek(start)
                content = io.BytesIO(file.read(length))
                if is_archive(content) and (damage := _damage_of_archive(content)):
                    return f"{item} in {name}: {damage}"
    return ""
