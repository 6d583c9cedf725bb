"""Checkpoints in object stores, each of which has a copy on a disk of the machine that wrote or read it."""

import hashlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from datetime import timezone
from pathlib import Path
from typing import Any

import fsspec
from filelock import FileLock

from lightning_accel.strategies.checkpoints.agreement import Agreement
from lightning_accel.strategies.checkpoints.atomic import (
    NotWrittenError,
    explain_disk_errors,
    remove_atomically,
    write_atomically,
)
from lightning_accel.strategies.checkpoints.reading import require_undamaged
from lightning_accel.strategies.sharding.metadata import METADATA, REST


def is_remote(path: str | Path) -> bool:
    """Return whether ``path`` is a URL, such as ``s3://bucket/run``."""
    return "://" in str(path)


def join_location(folder: str | Path, name: str) -> str | Path:
    """Return the file ``name`` of a folder or URL; a ``Path`` would take one slash of a URL away."""
    return f"{str(folder).rstrip('/')}/{name}" if is_remote(folder) else Path(folder, name)


def open_store(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a URL, which has forgotten what it listed before, and the path in it.

    Raises:
        ImportError: if the file system needs a package that is not installed.
        ValueError: if there is no file system for the protocol.
    """
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise type(error)(f"{url} cannot be opened: {error}") from error
    fs.invalidate_cache()
    return fs, path.rstrip("/")


def complete_checkpoints(url: str) -> Iterator[tuple[float, str]]:
    """Yield the complete checkpoints below a URL with the time at which they were written, in seconds since 1970.

    Stores show no file before it is complete, and the part that is written last makes a folder complete.
    """
    fs, root = open_store(url)
    for path in fs.find(root):
        whole = path.removesuffix(f"/{REST}")
        folder, _, name = whole.rpartition("/")
        if shown := re.fullmatch(r"\.(.+\.ckpt)\.partial", name) if whole != path else None:
            name = shown[1]  # see LocalCopies.upload_folder
        if name.endswith(".ckpt") and ".ckpt/" not in f"{folder}/":
            yield _written_at(fs, path), f"{url.rstrip('/')}{folder.removeprefix(root)}/{name}"


class LocalCopies:
    """Keep copies of checkpoints of an object store on a local disk.

    A checkpoint is written to the disk first, and uploaded from there. Reading one takes that copy, unless the store
    has another version by now, and otherwise downloads it to a place of its own, once for all processes of the machine.

    Args:
        folder: a folder on a disk of this machine. Machines may also share one disk.
        keep: number of copies that stay of those written, of those not uploaded, and of those read, the newest.

    Raises:
        TypeError: if ``folder`` is no path.
        ValueError: if it is empty or a URL.
    """

    def __init__(self, folder: str | Path, keep: int) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f"local_folder must be the path of a folder; got {folder!r}")
        if not str(folder).strip() or is_remote(folder):
            raise ValueError(f"local_folder must be a folder on a disk of the machine; got {str(folder)!r}")
        self.folder = Path(folder).expanduser().absolute()
        self.keep = keep

    def path_of(self, url: str) -> Path:
        """Return the place of the copy, which belongs to this machine alone."""
        parent, _, name = url.rstrip("/").rpartition("/")
        return self.folder / hashlib.sha256(f"{socket.gethostname()} {parent}".encode()).hexdigest()[:16] / name

    def begin(self, url: str) -> Path:
        """Return the place to write a new version to, which is not the store's from now on."""
        copy = self.path_of(url)
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            _version_file(copy).unlink(missing_ok=True)
        except OSError as error:
            raise NotWrittenError(
                f"the local_folder {self.folder} cannot be written ({error.strerror}), by which checkpoints go to {url}"
            ) from error
        return copy

    def upload_file(self, url: str) -> None:
        """Copy a file to the store, which shows it once all of it is there."""
        fs, path = open_store(url)
        copy = self.path_of(url)
        _put(fs, copy, path)
        _note_version(copy, fs, path)
        self._remove_old(copy.parent)

    def upload_folder(self, url: str, rank: int, local_rank: int, agreement: Agreement) -> None:
        """Copy a sharded checkpoint to the store, each process the files that it has written.

        What the store holds under that name stays readable until the new version is complete: a store cannot rename
        folders, so the new version is uploaded under a hidden name, and copied within the store.
        """
        fs, path = open_store(url)
        copy, hidden = self.path_of(url), _hidden(path)
        with agreement.part():
            if rank == 0:  # what a process that was killed has left
                if _is_complete(fs, hidden) and not _is_complete(fs, path):
                    _replace_folder(fs, path, hidden)
                _remove_folder(fs, hidden)
        with agreement.part():
            fs.invalidate_cache()
            target = hidden if fs.exists(path) else path
        with agreement.part():
            for file in copy.glob(f"__{rank}_*"):  # torch's names of what a process writes
                _put(fs, file, f"{target}/{file.name}")
        with agreement.part():
            if rank == 0:
                for name in (METADATA, REST):
                    _put(fs, copy / name, f"{target}/{name}")
                if target == hidden:
                    _replace_folder(fs, path, hidden)
        with agreement.part():
            if local_rank == 0:
                _note_version(copy, fs, path)
                self._remove_old(copy.parent)

    def fetch(self, url: str) -> Path:
        """Return a local copy of a checkpoint of the store, downloading what is missing.

        Raises:
            FileNotFoundError: if the store does not have all of it.
            DamagedCheckpointError: if what was downloaded is damaged.
        """
        fs, path = open_store(url)
        place = next((one for one in (path, _hidden(path)) if _is_complete(fs, one)), None)
        if place is None:
            raise FileNotFoundError(f"no checkpoint {url}, or only a part of one")
        infos = fs.find(place, detail=True).values() if fs.isdir(place) else ()
        sizes = {info["name"].rpartition("/")[2]: info["size"] for info in infos}
        version, copy = _version(fs, place), self.path_of(url)
        if _is_version(copy, version) and _missing(copy, sizes) == []:
            return copy
        stored = copy.parent / "stored" / copy.name  # apart, since a run may be writing the other one
        with explain_disk_errors(stored):
            stored.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(stored.parent / ".lock"):
            if not (_is_version(stored, version) and _missing(stored, sizes) == []):
                _version_file(stored).unlink(missing_ok=True)
                with write_atomically(stored) as new:
                    if sizes:
                        new.mkdir()
                        missing = _missing(copy, sizes) if _is_version(copy, version) else [*sizes]
                        for name in sizes.keys() - set(missing):  # other machines have written the missing ones
                            shutil.copyfile(copy / name, new / name)
                        fs.get([f"{place}/{name}" for name in missing], [str(new / name) for name in missing])
                    else:
                        fs.get_file(place, str(new))
                require_undamaged(stored)
                _note_version(stored, fs, place)
            os.utime(stored)
            self._remove_old(stored.parent)
        return stored

    def remove(self, url: str) -> None:
        """Remove a checkpoint from the store, and its copy."""
        fs, path = open_store(url)
        if fs.isfile(path):
            fs.rm_file(path)
        else:
            for each in (path, _hidden(path)):
                _remove_folder(fs, each)
        _remove_copy(self.path_of(url))

    def not_uploaded(self, url: str) -> Iterator[Path]:
        """Yield the copies of checkpoints directly below a URL whose upload was cut off."""
        for copy in self.path_of(f"{url.rstrip('/')}/_").parent.glob("*.ckpt"):
            if not _version_file(copy).exists():
                yield copy

    def _remove_old(self, folder: Path) -> None:
        copies = sorted(folder.glob("*.ckpt"), key=lambda each: each.stat().st_mtime)
        for has_version in (True, False):
            alike = [copy for copy in copies if _version_file(copy).exists() is has_version]
            for old in alike[: -self.keep]:
                _remove_copy(old)


def _note_version(copy: Path, fs: fsspec.AbstractFileSystem, path: str) -> None:
    fs.invalidate_cache()
    with write_atomically(_version_file(copy)) as file:
        file.write_text(_version(fs, path))


def _is_version(copy: Path, version: str) -> bool:
    noted = _version_file(copy)
    return copy.exists() and noted.exists() and noted.read_text() == version


def _missing(folder: Path, sizes: dict[str, int]) -> list[str]:
    """Return the names of the parts of a sharded checkpoint that are not in a folder."""
    files = {name: folder / name for name in sizes}
    return [name for name, file in files.items() if not file.is_file() or file.stat().st_size != sizes[name]]


def _version_file(copy: Path) -> Path:
    return copy.with_name(f".{copy.name}.version")


def _remove_copy(copy: Path) -> None:
    remove_atomically(copy)
    _version_file(copy).unlink(missing_ok=True)


def _hidden(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{folder}/.{name}.partial"


def _put(fs: fsspec.AbstractFileSystem, file: Path, path: str) -> None:
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.put_file(str(file), path)
    fs.invalidate_cache(path.rpartition("/")[0])
    if (stored := fs.size(path)) != (size := os.path.getsize(file)):
        raise NotWrittenError(f"{fs.unstrip_protocol(path)} has {stored} bytes after {size} of {file} were uploaded")


def _is_complete(fs: fsspec.AbstractFileSystem, path: str) -> bool:
    return bool(fs.isfile(path) or fs.isfile(f"{path}/{REST}"))


def _replace_folder(fs: fsspec.AbstractFileSystem, path: str, new: str) -> None:
    _remove_folder(fs, path)
    fs.makedirs(path, exist_ok=True)
    names = [name.rpartition("/")[2] for name in fs.find(new)]
    for name in sorted(names, key=lambda name: name == REST):  # which makes it complete
        fs.cp_file(f"{new}/{name}", f"{path}/{name}")
    _remove_folder(fs, new)


def _remove_folder(fs: fsspec.AbstractFileSystem, path: str) -> None:
    fs.invalidate_cache()
    if fs.isfile(f"{path}/{REST}"):
        fs.rm_file(f"{path}/{REST}")  # first, so that no part of it looks complete
    if fs.exists(path):
        fs.rm(path, recursive=True)


def _version(fs: fsspec.AbstractFileSystem, path: str) -> str:
    file = path if fs.isfile(path) else f"{path}/{REST}"
    return f"{fs.size(file)} {_written_at(fs, file)}"


def _written_at(fs: fsspec.AbstractFileSystem, path: str) -> float:
    found: Any = fs.modified(path)
    return float((found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp())
