"""Rows of files by their numbers. Shapes: N rows."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from lightning_accel.data.shards.blocks import find_blocks
from lightning_accel.data.shards.options import CACHE
from lightning_accel.ops.bounds import local_path
from lightning_accel.ops.extras import import_on_use
from lightning_accel.ops.names import list_of_names

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = import_on_use("pyarrow")

_KEPT = 16  # blocks that stay in memory


class ShardDataset(Dataset[dict[str, Any]]):
    """Read any row of files that are larger than memory, by its number in the order of the files.

    It takes the place of any data set with a length: in a DataLoader with a sampler or ``shuffle=True``, in ``Subset``,
    in :func:`lightning_accel.data.length_batch_loader`. Rows are dicts of numbers, texts and lists.

    Uncompressed Arrow files (``.arrow``, ``.feather``, and those of the package datasets) are memory-mapped, so that a
    row costs tens of microseconds. For a row of a Parquet or JSON lines file its block is read, of which the last 16
    are kept: read these in order, or by :func:`lightning_accel.data.shard_loader`. Files are converted in one line::

        pyarrow.dataset.write_dataset(pyarrow.dataset.dataset("rows"), "rows_arrow", format="arrow")

    Args:
        location: folder, pattern or URL.
        columns: columns to read; by default all but those that pandas wrote as an index.
        cache_dir: folder where the list of the blocks is kept, so that it is made once.

    Raises:
        FileNotFoundError: if there is no such folder.
        IndexError: if a number is not in [-N, N).
        ValueError: if files cannot be read, are of several kinds, or lack a column.

    Example:
        >>> dataset = ShardDataset("flowers/*.arrow", columns=["length", "width"])  # doctest: +SKIP
        >>> dataset[-1]  # doctest: +SKIP
        {'length': 5.1, 'width': 1.8}
    """

    def __init__(
        self, location: str | Path, columns: Sequence[str] | None = None, *, cache_dir: str | Path = CACHE
    ) -> None:
        self.blocks = find_blocks(location, local_path(cache_dir, "cache_dir"))
        self.columns = self.blocks.schema.names if columns is None else list_of_names(columns)
        self.blocks.require_columns(self.columns)
        self._ends = self.blocks.rows.cumsum()
        self._kept: OrderedDict[int, pa.Table] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_kept": OrderedDict()}

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of these numbers; the DataLoader's fetcher prefers it to ``__getitem__``."""
        rows: list[dict[str, Any]] = self.take(indices).to_pylist()
        return rows

    def take(self, indices: Sequence[int] | np.ndarray) -> pa.Table:
        """Return the table of the rows of these numbers, in their order."""
        rows = np.asarray(indices, np.int64)
        if wrong := rows[(rows < -len(self)) | (rows >= len(self))].tolist():
            raise IndexError(f"there are {len(self)} rows; got the number {wrong[0]}")
        if not len(rows):
            return self.blocks.schema.empty_table().select(self.columns)
        rows = rows % len(self)
        order = np.argsort(rows, kind="stable")
        blocks = np.searchsorted(self._ends, rows[order], side="right")
        within = rows[order] - (self._ends - self.blocks.rows)[blocks]
        parts = [self._block(block).take(pa.array(within[blocks == block])) for block in np.unique(blocks).tolist()]
        found = pa.concat_tables(parts).combine_chunks()
        return found.take(pa.array(np.argsort(order)))

    def _block(self, block: int) -> pa.Table:
        if block not in self._kept:
            while len(self._kept) >= _KEPT:
                self._kept.popitem(last=False)
            self._kept[block] = self.blocks.read(block, self.columns)
        self._kept.move_to_end(block)
        return self._kept[block]
