"""Files of a data set that is spread over several, on disk or behind a URL."""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_accel.data.quoting import cut, listed
from lightning_accel.ops.bounds import local_path

SUFFIXES = (".parquet", ".arrow", ".feather", ".jsonl", ".ndjson")
_PACKED = (".gz", ".zst", ".bz2", ".xz")
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_PATTERN = re.compile(r"[*?\[]")


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

    def splits(self) -> list[str | None]:
        """Return ``train``, ``val`` or ``test`` for each file whose path has this word, else None.

        Words end where something else than letters stands, so that ``data/train-00000-of-00008`` and ``my_train.jsonl``
        have the word, and ``latest`` has not. Nothing is said if no file is for training.

        Raises:
            ValueError: if some files say it and others do not, or a path has the words of two.
        """
        said: list[str | None] = []
        for name in self.names:
            words = {
                _SPLITS[word] for word in re.findall(r"[a-z]+", name.rpartition(".")[0].lower()) if word in _SPLITS
            }
            if len(words) > 1:
                raise ValueError(
                    f"the path {cut(name, 100)} in {self.root} has words for {' and '.join(sorted(words))}, and would "
                    "be for one of them; rename the file or its folder"
                )
            said.append(min(words, default=None))
        if any(said) and "train" not in said:
            named = listed([name for name, split in zip(self.names, said, strict=True) if split], 3)
            warnings.warn(
                f"the names of {named} in {self.root} are not taken to say what they are for, as no file has the word "
                "train: all of them are split by shares",
                stacklevel=2,
            )
        if "train" not in said:
            return [None] * len(said)
        if silent := [name for name, split in zip(self.names, said, strict=True) if split is None]:
            raise ValueError(
                f"{self.root} has files for training, validation or test by their names, and {listed(silent, 3)} "
                "without; move these, or name the folder or pattern of those that are meant"
            )
        return said


def is_sharded(path: str | Path) -> bool:
    """Return whether ``path`` is a folder, a URL or a pattern, rather than a single local file."""
    local = local_path(path)
    return local.is_dir() or (not local.exists() and ("://" in str(path) or bool(_PATTERN.search(str(path)))))


def find_files(location: str | Path) -> ShardFiles:
    """Find the files of a folder, including subfolders, of a URL of one, or of a pattern such as ``data/part-*.jsonl``.

    Files and folders whose names begin with a dot or an underscore are left out, as Spark and Hive do.

    Raises:
        FileNotFoundError: if there is no such folder.
        ImportError: if the file system of a URL needs a package that is not installed.
        ValueError: if there is no file, or they are of several kinds, packed, or their folders hold values of columns
            (``year=2026/``), or are links.
    """
    text = str(location)
    if not text.strip() or (isinstance(location, Path) and re.match(r"\w{2,}:/", text)):
        raise ValueError(f"a folder, a pattern, or a URL as a str was needed; got {location!r}")
    if "://" in text and not Path(text).exists():
        try:
            fs, path = fsspec.core.url_to_fs(text)
        except (ImportError, ValueError) as error:
            raise type(error)(f"{text} cannot be opened: {error}") from error
    else:
        fs, path = LocalFileSystem(), str(Path(text).expanduser().absolute())
    path = path.rstrip("/")
    root, found = _list(fs, path)
    infos = {
        name.removeprefix(root).lstrip("/"): info
        for name, info in sorted(found.items())
        if not re.search(r"/[._]", f"/{name.removeprefix(root).lstrip('/')}")
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
        convert = ". Convert CSV files, as by pandas.read_csv(name).to_parquet(other)"
        remedy = convert if any(name.lower().endswith(".csv") for name in infos) else ""
        raise ValueError(f"no {', '.join(SUFFIXES)} file in {text}; it holds {listed([*infos], 3)}{remedy}")
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


def _list(fs: fsspec.AbstractFileSystem, path: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the folder that all files of a path are in, and the description of each file."""
    if fs.exists(path) or not _PATTERN.search(path):
        found = _files_below(fs, path)
        return path.rpartition("/")[0] if [*found] == [path] else path, found
    found = {}
    for name in fs.glob(path):
        found |= _files_below(fs, name)
    return _PATTERN.split(path, maxsplit=1)[0].rpartition("/")[0], found


def _files_below(fs: fsspec.AbstractFileSystem, path: str) -> dict[str, dict[str, Any]]:
    """Return the files below a folder, or a file itself, with what a link leads to in its place."""
    found: dict[str, dict[str, Any]] = fs.find(path, detail=True)
    if isinstance(fs, LocalFileSystem):
        for name, info in found.items():
            if info.get("islink"):
                if Path(name).is_dir():
                    raise ValueError(f"{name} is a link to a folder, whose files would be left out; name that folder")
                info |= {"type": "file", "mtime": Path(name).stat().st_mtime, "size": Path(name).stat().st_size}
    return {name: info for name, info in found.items() if info.get("type") == "file"}


def _version(info: dict[str, Any]) -> str:
    return repr(
        [info.get(key) for key in ("size", "mtime", "ETag", "etag", "LastModified", "updated", "generation", "blob_id")]
    )
