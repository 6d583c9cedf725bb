"""Files of a data set that is spread over several, on disk or behind a URL."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_accel.data.quoting import cut, listed

SUFFIXES = (".parquet", ".arrow", ".feather", ".jsonl", ".ndjson")
_PACKED = (".gz", ".zst", ".bz2", ".xz")
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}
_NUMBERED = re.compile(r"[-_.]?\d+(-of-\d+)?$")


@dataclass(frozen=True)
class ShardFiles:
    """Hold the files of a data set, sorted by name.

    Args:
        fs: their file system.
        root: the folder, in the names of ``fs``.
        names: paths of the files below ``root``.
        versions: for each file a text that changes with its content: its size and its time of change or ETag.
        kind: suffix of all of them.
    """

    fs: fsspec.AbstractFileSystem
    root: str
    names: list[str]
    versions: list[str]
    kind: str

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    def path_of(self, file: int) -> str:
        return f"{self.root}/{self.names[file]}"

    def shown_path(self, file: int) -> str:
        """Return the path for a message, with the protocol if it is not local."""
        return self.path_of(file) if self.is_local else self.fs.unstrip_protocol(self.path_of(file))

    def split_of(self, file: int) -> str | None:
        """Return ``train``, ``val`` or ``test`` if the first folder, or the name before a number, says so."""
        first, *others = self.names[file].split("/")
        stem = first if others else _NUMBERED.sub("", first.rpartition(".")[0])
        return _SPLITS.get(stem.lower())


def is_sharded(path: str | Path) -> bool:
    """Return whether ``path`` is a folder, a URL or a pattern, rather than a single local file."""
    text = str(path)
    return "://" in text or "*" in text or Path(text).is_dir()


def find_files(location: str | Path) -> ShardFiles:
    """Find the files of a folder, including subfolders, of a URL of one, or of a pattern such as ``data/part-*.jsonl``.

    Files and folders whose names begin with a dot or an underscore are left out, as Spark and Hive do.

    Raises:
        FileNotFoundError: if there is no such folder.
        ImportError: if the file system of a URL needs a package that is not installed.
        ValueError: if there is no file, or they are of several kinds, packed, or their folders hold values of columns
            (``year=2026/``).
    """
    text = str(location)
    try:
        fs, path = fsspec.core.url_to_fs(text if "://" in text else str(Path(text).expanduser().absolute()))
    except (ImportError, ValueError) as error:
        raise type(error)(f"{text} cannot be opened: {error}") from error
    path = path.rstrip("/")
    found: dict[str, dict[str, Any]] = fs.glob(path, detail=True) if "*" in path else fs.find(path, detail=True)
    root = path.partition("*")[0].rpartition("/")[0] if "*" in path else path
    if [*found] == [path]:
        root = path.rpartition("/")[0]
    infos = {
        name.removeprefix(root).lstrip("/"): info
        for name, info in sorted(found.items())
        if info.get("type") == "file" and not re.search(r"/[._]", f"/{name.removeprefix(root).lstrip('/')}")
    }
    kinds = {suffix: [name for name in infos if name.lower().endswith(suffix)] for suffix in SUFFIXES}
    kinds = {suffix: names for suffix, names in kinds.items() if names}
    if packed := [name for name in infos if name.lower().endswith(_PACKED)]:
        raise ValueError(
            f"{text} holds {listed(packed, 1)}: a packed file can be read from its start alone. Unpack it, or write "
            "Parquet files, which are packed block by block"
        )
    if len(kinds) > 1:
        several = ", ".join(f"{len(names)} {suffix}" for suffix, names in kinds.items())
        raise ValueError(f"{text} holds files of several kinds ({several}); name one, such as {text}/*{max(kinds)}")
    if not kinds and infos:
        raise ValueError(f"no {', '.join(SUFFIXES)} file in {text}; it holds {listed([*infos], 3)}")
    if not kinds and fs.exists(path):
        raise ValueError(f"{text} is a folder without a file; {', '.join(SUFFIXES)} files were needed")
    if not kinds:
        raise FileNotFoundError(f"no folder, and no file, {text}")
    [(kind, names)] = kinds.items()
    if partitioned := [name for name in names if "=" in name.rpartition("/")[0]]:
        raise ValueError(
            f"{text} holds {cut(partitioned[0], 100)}, whose folder stands for a value that is not in the file; write "
            "the column into the files"
        )
    versions = [_version(infos[name]) for name in names]
    return ShardFiles(fs, root, names, versions, kind)


def _version(info: dict[str, Any]) -> str:
    return repr([info.get(key) for key in ("size", "mtime", "ETag", "etag", "LastModified", "updated", "generation")])
