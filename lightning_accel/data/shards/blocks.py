"""Blocks of the files of a data set: parts that are read whole. Shapes: K blocks."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_accel.data.digest import digest_of
from lightning_accel.data.quoting import lacking_column, listed, shown
from lightning_accel.data.shards.files import ShardFiles, find_files
from lightning_accel.data.shards.formats import join_schemas, list_blocks, place_name, read_block
from lightning_accel.data.shards.options import CACHE
from lightning_accel.data.whole_files import whole_file
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = import_on_use("pyarrow")

_ARRAYS = "file_of", "places", "rows", "nbytes"
_VERSION = 1  # of what is kept
_OPENED = 16  # files whose descriptions are read at a time


@dataclass(frozen=True, eq=False)
class Blocks:
    """Hold the blocks of files, in the order of the files.

    Args:
        files: the files.
        schema: names and types of the columns, of all files.
        file_of: (K,) int64, file of each block.
        places: (K, 2) int64, where in its file it is.
        rows: (K,) int64, its number of rows.
        nbytes: (K,) int64, its bytes in memory, about.
    """

    files: ShardFiles
    schema: pa.Schema
    file_of: np.ndarray
    places: np.ndarray
    rows: np.ndarray
    nbytes: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_rows(self) -> int:
        return int(self.rows.sum())

    def read(self, block: int, columns: Sequence[str]) -> pa.Table:
        """Read ``columns`` of a block.

        Raises:
            ValueError: if it cannot be read, or has not as many rows as when it was listed.
        """
        first, last = self.places[block].tolist()
        table = read_block(self.files, int(self.file_of[block]), (first, last), self.schema, columns)
        if table.num_rows != self.rows[block]:
            raise ValueError(
                f"{self.name_of(block)} has {table.num_rows} rows, and had {self.rows[block]} when the run began; "
                "files must not change while they are read"
            )
        return table

    def name_of(self, block: int) -> str:
        first, last = self.places[block].tolist()
        file = int(self.file_of[block])
        return f"{self.files.shown_path(file)}, {place_name(self.files.kind, (first, last))}"

    def select(self, chosen: np.ndarray) -> Blocks:
        """Return some of the blocks."""
        parts = {name: getattr(self, name)[chosen] for name in _ARRAYS}
        return replace(self, **parts)

    def require_columns(self, names: Sequence[str], targets: Sequence[str] = (), option: str = "") -> None:
        """Raise a ValueError if a column is lacking that an option names.

        The message names ``predict_path`` if the column is one of the ``targets``.
        """
        for name in names:
            if name not in self.schema.names:
                found = lacking_column(name, self.schema.names, is_target=name in targets, option=option)
                raise ValueError(f"{self.files.shown_path(0)} {found}")

    def digest(self) -> str:
        """Digest the names of the files, and where their blocks are; not what these hold, which no run reads twice."""
        return digest_of(self.files.names, self.file_of, self.places, self.rows)


def find_blocks(location: str | Path, cache: Path = CACHE) -> Blocks:
    """List the blocks of the files of a folder, URL or pattern; a list is kept in ``cache`` until a file changes.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: if files cannot be read, have no rows, or differ in their columns.
    """
    files = find_files(location)
    made_of = repr((_VERSION, files.fs.protocol, files.root, files.names, files.versions))
    kept = cache.expanduser() / f"{hashlib.sha256(made_of.encode()).hexdigest()[:32]}.npz"
    blocks = _read_list(files, kept)
    if blocks is None:
        blocks = _list_all(files)
        described = np.frombuffer(blocks.schema.serialize(), np.uint8)
        with whole_file(kept) as partial:
            np.savez(partial, schema=described, **{name: getattr(blocks, name) for name in _ARRAYS})
    return blocks


def _read_list(files: ShardFiles, kept: Path) -> Blocks | None:
    """Read the list that was kept of the blocks; None if there is none, or it is damaged."""
    try:
        with kept.open("rb") as opened, np.load(opened) as found:
            schema = pa.ipc.read_schema(pa.py_buffer(found["schema"].tobytes()))
            return Blocks(files, schema, *(found[name] for name in _ARRAYS))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, pa.ArrowException):
        return None


def _list_all(files: ShardFiles) -> Blocks:
    with ThreadPoolExecutor(_OPENED) as pool:
        found = [*pool.map(lambda file: list_blocks(files, file), range(len(files.names)))]
    filled = [file for file, one in enumerate(found) if one.rows]
    if not filled:
        raise ValueError(f"{files.root} holds {len(files.names)} {files.kind} files without a row")
    for file in filled:
        names = found[file].schema.names
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(
                f"{files.shown_path(file)} has two columns named {shown(min(twice))}; rename or remove one"
            )
    for file in filled if files.kind not in (".jsonl", ".ndjson") else ():  # a field may be left out of lines
        if lacking := {*found[filled[0]].schema.names} ^ {*found[file].schema.names}:
            raise ValueError(
                f"{files.shown_path(filled[0])} and {files.shown_path(file)} must have the same columns; "
                f"{listed(sorted(lacking))} {'is' if len(lacking) == 1 else 'are'} in one of them alone"
            )
    try:
        schema = join_schemas([found[file].schema for file in filled])
    except ValueError as error:
        raise ValueError(f"files in {files.root} do not fit together: {error}") from error
    return Blocks(
        files,
        schema,
        np.repeat(np.arange(len(found)), [len(one.rows) for one in found]),
        np.array([place for one in found for place in one.places], np.int64).reshape(-1, 2),
        np.array([rows for one in found for rows in one.rows], np.int64),
        np.array([size for one in found for size in one.nbytes], np.int64),
    )
