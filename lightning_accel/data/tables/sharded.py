"""Tables that are larger than memory. Shapes: B rows of a batch, K columns, D features."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_accel.data.preprocessing import RawColumns
from lightning_accel.data.quoting import listed, shown
from lightning_accel.data.shards.blocks import Blocks, find_blocks
from lightning_accel.data.shards.options import ShardOptions
from lightning_accel.data.shards.reader import ReadOptions
from lightning_accel.data.shards.splits import Split, split_blocks
from lightning_accel.data.tables.column_checks import doubts_of_classes, doubts_of_columns, doubts_of_dates
from lightning_accel.data.tables.columns import (
    DatedBlocks,
    codes_of_column,
    numbers_of_column,
    quantities_of_column,
    texts_of_column,
)
from lightning_accel.data.tables.leakage import doubts_of_answers, doubts_of_copies, doubts_of_groups
from lightning_accel.data.tables.statistics import (
    MISSING,
    TableStatistics,
    Target,
    holds_numbers_in,
    table_statistics,
)
from lightning_accel.data.tables.values import as_text, which_hold_numbers
from lightning_accel.data.whole_files import kept_json
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
else:
    pd = import_on_use("pandas")
    pa = import_on_use("pyarrow")


_AS_TRAINED = "write numbers, as the training rows have them"


class ShardedTable:
    """Hold a table that is spread over files, its splits, and the statistics by which its rows are encoded.

    Args:
        location: folder, pattern or URL.
        target: column of the classes, or of a quantity.
        categorical: columns of numbers to read as categories.
        exclude: columns that are no features.
        shares: shares of the blocks that validate and test, see :func:`split_blocks`.
        seed: seed of the split.
        options: how the files are read.
        group: column of equal values that must be in one split alone.
        dates: columns of dates to read as numbers of days.

    Raises:
        FileNotFoundError: if there are no files.
        ValueError: if files or columns are not as needed.
    """

    def __init__(
        self,
        location: str | Path,
        target: Target,
        categorical: Sequence[str],
        exclude: Sequence[str],
        shares: tuple[float, float],
        seed: int,
        options: ShardOptions,
        group: str | None = None,
        dates: Sequence[str] = (),
    ) -> None:
        self.location = location
        self.target = target
        self.exclude = exclude
        self.dates = dates
        blocks = self._find_blocks(location, options)
        blocks.require_columns([target.name], [target.name])
        blocks.require_columns(categorical, option="categorical")
        blocks.require_columns(exclude, option="exclude or group")
        blocks.require_columns(dates, option="dates")
        features = [name for name in blocks.schema.names if name != target.name and name not in exclude]
        if not features:
            raise ValueError(
                f"{location} has no column left for features beside {shown(target.name)} and those excluded"
            )
        splits = split_blocks(blocks, shares, seed, location)
        of_rows = blocks.digest(), blocks.files.versions, features, [*categorical], [*target], splits["train"].tolist()
        made_of = (*of_rows, *([] if group is None else ["group", group]), *(["dates", *dates] if dates else []))

        def collect() -> list[Any]:
            if group is not None:
                _require_split(blocks, splits, group, location)
            kinds = {name: blocks.schema.field(name).type for name in exclude}
            beside = [name for name, kind in kinds.items() if pa.types.is_string(kind) or pa.types.is_integer(kind)]
            found = table_statistics(blocks, splits["train"], features, categorical, target, beside)
            doubts = list(_doubts(found, blocks, features, categorical, exclude, target, location))
            return [found.classes, found.target_moments, found.encoding(), doubts]

        kept = kept_json(
            options.cache_dir, (*made_of, "doubts of groups"), collect
        )  # files of older versions have none
        self.class_names, self.target_moments, encoding, self.doubts = kept
        self.encoder = RawColumns(**encoding)
        self.splits: dict[Split, Blocks] = {split: blocks.select(chosen) for split, chosen in splits.items()}
        self.feature_names = self.encoder.feature_names
        if twice := [name for name, count in Counter(self.feature_names).items() if count > 1]:
            raise ValueError(
                f"{location} gives two features the name {shown(twice[0])}: a column and what is made of another, or "
                "two categories; rename a column, or list it under exclude"
            )
        self.digest = blocks.digest()

    def _find_blocks(self, location: str | Path, options: ShardOptions) -> DatedBlocks:
        return DatedBlocks(**vars(find_blocks(location, Path(options.cache_dir))), dates=self.dates)

    def reading(self, with_target: bool = True) -> ReadOptions:
        """Return what is read of blocks, and how batches are made of it."""
        encoder = TableEncoder(self.encoder, self.target if with_target else None, self.class_names, self.location)
        columns = [column["name"] for column in self.encoder.columns] + ([self.target.name] if with_target else [])
        return ReadOptions(columns, encoder.collate, encoder, row_bytes=8 * len(columns))

    def to_predict(self, location: str | Path, options: ShardOptions) -> Blocks:
        """Return the blocks of other files with the same feature columns.

        Raises:
            FileNotFoundError: if there are no files.
            ValueError: if they lack a column.
        """
        blocks = self._find_blocks(location, options)
        blocks.require_columns([column["name"] for column in self.encoder.columns])
        for column in self.encoder.columns:
            if column["categories"] is None and not holds_numbers_in(blocks, column["name"], _AS_TRAINED):
                raise ValueError(
                    f"column {shown(column['name'])} of {location} holds texts; the training rows have numbers there"
                )
        return blocks

    def beside(self, blocks: Blocks) -> pd.DataFrame:
        """Return the target and the columns that are no features of rows of blocks, as far as these have them."""
        names = [name for name in (self.target.name, *self.exclude) if name in blocks.schema.names]
        if not names:
            return pd.DataFrame(index=range(blocks.num_rows))
        read = pa.concat_tables(blocks.read(block, names) for block in range(len(blocks)))
        return read.to_pandas(integer_object_nulls=True)


def _require_split(blocks: Blocks, splits: dict[Split, np.ndarray], group: str, location: str | Path) -> None:
    """Raise a ValueError if files do not say what they are for, or a group is in two splits."""
    said = blocks.files.splits()
    if not {"train", "val", "test"} <= {*said}:
        raise ValueError(
            f"{location} is a folder or URL of files, which are not split by group={group!r}. Write the rows that "
            "train, validate and test to folders train, val and test in it, which are checked; or read one file in "
            "place of the folder, which is split"
        )
    found = {
        split: {value for block in chosen.tolist() for value in blocks.read(block, [group])[group].unique().to_pylist()}
        for split, chosen in splits.items()
    }
    if lacking := [
        split for split, values in found.items() if any(value is None or value != value for value in values)
    ]:
        raise ValueError(
            f"column {shown(group)} of {location} lacks values for {lacking[0]}: name the group of each row"
        )
    for one, other in itertools.combinations(found, 2):
        if shared := sorted(map(str, found[one] & found[other])):
            raise ValueError(
                f"files of {location} for {one} and {other} share values of group={group!r}: {listed(shared, 5)}. Put "
                "all rows of a value in one of them"
            )


def _doubts(
    statistics: TableStatistics,
    blocks: Blocks,
    features: Sequence[str],
    categorical: Sequence[str],
    exclude: Sequence[str],
    target: Target,
    location: str | Path,
) -> Iterator[str]:
    """Yield warnings as of tables in one file, on the sample of rows; copies are looked for if these are all rows.

    Raises:
        ValueError: if a column of texts holds numbers that are not parsed as they are written, or hardly repeats.
    """
    sample, trains = statistics.sample, statistics.trains
    columns = dict[str, Any]()
    for name in features:
        if name in statistics.numbers:
            columns[name] = numbers_of_column(sample[name], name, lambda: str(location))
            continue
        columns[name] = as_text(sample[name].to_pandas(), location)
    undecided = [name for name in statistics.texts if name not in categorical]
    which_hold_numbers(sample.select(undecided).to_pandas(), location, exclude)
    table = pd.DataFrame(columns)
    if target.is_quantity:
        answers = numbers_of_column(sample[target.name], target.name, lambda: str(location))
    else:
        answers, classes = texts_of_column(sample[target.name])
        if len(sample) == blocks.num_rows:
            yield from doubts_of_classes(answers, classes, location)
    train, held_out = np.flatnonzero(trains), np.flatnonzero(~trains)
    yield from doubts_of_columns(
        table, train, location, pd.Series(answers, name=target.name) if target.is_quantity else None
    )
    yield from doubts_of_dates(table[undecided], location)
    if len(sample) == blocks.num_rows:
        yield from doubts_of_copies(table, answers, train, held_out, location)
    yield from doubts_of_answers(table.iloc[train], answers[train], location, target.is_quantity)
    beside = [name for name in exclude if name in sample.column_names]
    if not target.is_quantity and not any(blocks.files.splits()):  # which somebody has split
        yield from doubts_of_groups(sample.select(beside).to_pandas(), table, answers, location)


class TableEncoder:
    """Make tensors of tables: rows (B, K) float64, as :class:`RawColumns` takes them, and targets (B,)."""

    def __init__(
        self, encoder: RawColumns, target: Target | None, classes: Sequence[str] | None, location: str | Path
    ) -> None:
        self.encoder = encoder
        self.location = location
        self.target = target
        self._numbers_of = {
            column["name"]: {name: place for place, name in enumerate(column["categories"])}
            for column in encoder.columns
            if column["categories"] is not None
        }
        self._classes = {name: number for number, name in enumerate(classes or ())}
        self._warned: set[str] = set()

    def __call__(self, table: pa.Table) -> tuple[Tensor, ...]:
        columns = []
        for column in self.encoder.columns:
            name = column["name"]
            if column["categories"] is None:
                columns.append(numbers_of_column(table[name], name, lambda: str(self.location)))
            else:
                columns.append(self._categories(table[name], name))
        rows = torch.from_numpy(np.stack(columns, axis=1))
        if self.target is None:
            return (rows,)
        column = table[self.target.name]
        if self.target.is_quantity:
            quantities = quantities_of_column(column, self.target.name, str(self.location))[:, 0]
            return rows, torch.from_numpy(quantities.astype(np.float32))
        return rows, torch.from_numpy(codes_of_column(column, self._classes))

    def collate(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.encoder(rows[0]), *rows[1:]

    def _categories(self, column: pa.ChunkedArray, name: str) -> np.ndarray:
        """Return the index of each row's category (B,) float64, -1 for one that the training rows lack."""
        numbers = self._numbers_of[name]
        codes = codes_of_column(column, numbers, missing=numbers.get(MISSING, -1))
        if name not in self._warned and (new := codes < 0).any():
            self._warned.add(name)
            text, found = texts_of_column(column.filter(pa.array(new)))
            found += [MISSING] if (text < 0).any() else []
            rank_zero_warn(new_category_message(name, f"rows beside the training rows of {self.location}", found))
        return codes.astype(np.float64)


def new_category_message(name: str, where: str, found: Sequence[str]) -> str:
    return (
        f"column {shown(name)} of {where} holds {listed(found, 3)}, which no training row has: the features of the "
        "column are 0 there"
    )
