"""Statistics of tables that are read block by block, in one pass. Shapes: n rows of a block, K columns."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_accel.data.quoting import shown
from lightning_accel.data.shards.moments import Moments
from lightning_accel.data.tables.column_checks import NO_DATES
from lightning_accel.data.tables.columns import DatedBlocks, numbers_of_column, require_classes, texts_of_column
from lightning_accel.data.tables.targets import A_QUANTITY
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
else:
    pa = import_on_use("pyarrow")
    pc = import_on_use("pyarrow.compute")

MISSING = "<missing>"

_MOST_TEXTS = 1000  # different texts of a column, each of which is a feature
_MOST_CATEGORIES = 1 << 16  # the same, of a column that is named as categorical
_SAMPLE = 1 << 24  # values of all columns of which medians are taken
_SAMPLE_OF_ROWS = 1 << 20  # values of the rows that are looked at as those of one file are


@dataclass
class NumberStatistics:
    """Hold the moments and a sample of the numbers of a column, and how many are missing."""

    moments: Moments = field(default_factory=Moments)
    missing: int = 0
    sample: list[np.ndarray] = field(default_factory=list)

    def add(self, other: NumberStatistics) -> None:
        self.moments.add(other.moments)
        self.missing += other.missing
        self.sample += other.sample

    @property
    def missing_share(self) -> float:
        return self.missing / (self.missing + self.moments.count)

    @property
    def median(self) -> float:
        sample = np.concatenate([*self.sample, np.empty(0)])
        return float(np.median(sample)) if len(sample) else 0.0

    def filled(self, value: float) -> tuple[float, float]:
        """Return mean and standard deviation with ``value`` for what is missing; the latter 1 if all are equal."""
        whole = Moments(self.missing, np.array([value]))
        whole.add(self.moments)
        return float(whole.mean[0]), float(whole.std[0])


class Target(NamedTuple):
    """Name the column of the target, and say whether it holds a quantity, else classes."""

    name: str
    is_quantity: bool


@dataclass
class TableStatistics:
    """Hold what encodes the rows of a table: statistics of its columns over the rows that train.

    Args:
        numbers: statistics of each numeric column.
        texts: categories of each other column, sorted.
        classes: names of the classes, sorted; None for a quantity.
        target_moments: mean and standard deviation of a quantity; None for classes.
        sample: evenly spaced rows of all blocks, with the target and columns beside; all rows where they are few.
        trains: which of these train.
    """

    numbers: dict[str, NumberStatistics]
    texts: dict[str, list[str]]
    classes: list[str] | None
    target_moments: tuple[float, float] | None
    sample: pa.Table
    trains: np.ndarray

    def encoding(self) -> dict[str, Any]:
        """Return the arguments of the :class:`~lightning_accel.data.preprocessing.RawColumns` that encodes rows."""
        columns: list[dict[str, Any]] = [{"name": name, "categories": None} for name in self.numbers]
        columns += [{"name": name, "categories": found} for name, found in self.texts.items()]
        medians = [one.median for one in self.numbers.values()]
        filled = [one.filled(median) for one, median in zip(self.numbers.values(), medians, strict=True)]
        shares = [one.missing_share for one in self.numbers.values() if one.missing]
        return {
            "columns": columns,
            "median": medians,
            "indicated": [place for place, one in enumerate(self.numbers.values()) if one.missing],
            "mean": [mean for mean, _ in filled] + shares,
            "scale": [scale for _, scale in filled] + [math.sqrt(share * (1 - share)) or 1.0 for share in shares],
        }


def table_statistics(
    blocks: DatedBlocks,
    train: np.ndarray,
    features: Sequence[str],
    categorical: Sequence[str],
    target: Target,
    beside: Sequence[str] = (),
) -> TableStatistics:
    """Read all blocks once, with threads, and return the statistics of those that ``train``.

    Medians are those of up to 2 ** 24 values of all columns together, from evenly spaced rows of each block. The
    sample alone is kept of columns ``beside`` the features.

    Raises:
        ValueError: if a column holds something else than numbers, texts and booleans, numbers that are infinite or
            above 1e30, numbers that are written as texts, or too many different texts; or the target is missing, has
            one class, or one that is in no row that trains, or is a quantity that is no number or always the same.
    """
    is_number = {name: holds_numbers_in(blocks, name) and name not in categorical for name in features}
    where = f"the target column {shown(target.name)} of {blocks.files.root}"
    as_target = "write classes as texts, or a quantity as numbers, such as days since 1970-01-01"
    if not holds_numbers_in(blocks, target.name, as_target) and target.is_quantity:
        raise ValueError(
            f"{where} holds texts; target_kind='regression' needs numbers. Write amounts as numbers, without currency "
            "signs and marks of thousands, or leave target_kind out for classes"
        )
    total = int(blocks.rows[train].sum())
    share = min(1.0, _SAMPLE / max(1, sum(is_number.values())) / total)
    share_of_rows = min(1.0, _SAMPLE_OF_ROWS / (1 + len(features)) / int(blocks.rows.sum()))
    read = partial(_block_statistics, blocks, is_number, beside, target, share, share_of_rows)
    numbers = {name: NumberStatistics() for name, number in is_number.items() if number}
    texts: dict[str, set[str]] = {name: set() for name, number in is_number.items() if not number}
    trains = np.isin(np.arange(len(blocks)), train)
    classes: tuple[set[str], set[str]] = set(), set()
    moments = Moments()
    samples = list[pa.Table]()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for of_training, found in zip(trains.tolist(), pool.map(read, range(len(blocks))), strict=True):
            classes[of_training].update(found.classes)
            samples.append(found.rows)
            if of_training:
                moments.add(found.quantities)
            for name, one in found.numbers.items() if of_training else ():
                numbers[name].add(one)
            for name, names in found.texts.items() if of_training else ():
                texts[name].update(names)
                _require_few(texts[name], name, blocks, name in categorical)
    found_classes = None if target.is_quantity else require_classes(*classes, where, A_QUANTITY)
    if target.is_quantity and moments.deviation[0] <= moments.count * (1e-12 * moments.mean[0]) ** 2:
        raise ValueError(f"{where} holds one number only, {moments.mean[0]:g}; two or more are needed")
    for name in texts.keys() - {*categorical}:
        present = texts[name] - {MISSING}
        if present and all(map(_is_number, present)):
            raise ValueError(
                f"column {shown(name)} of {blocks.files.root} holds {shown(min(present))} and the like, numbers that "
                "are written as texts; write them as numbers, or list the column under categorical, as versions need, "
                "whose 3.10 is no 3.1"
            )
    of_target = (float(moments.mean[0]), float(moments.std[0])) if target.is_quantity else None
    categories = {name: sorted(found) for name, found in texts.items()}
    sample, lengths = pa.concat_tables(samples), [len(rows) for rows in samples]
    return TableStatistics(numbers, categories, found_classes, of_target, sample, np.repeat(trains, lengths))


def holds_numbers_in(blocks: DatedBlocks, name: str, no_dates: str = NO_DATES) -> bool:
    """Return whether a column is read as numbers or booleans, rather than texts.

    ``no_dates`` ends a message about dates.

    Raises:
        ValueError: if it holds something else.
    """
    if name in blocks.dates:
        return True
    kind = blocks.schema.field(name).type
    where = f"column {shown(name)} of {blocks.files.root}"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        raise ValueError(f"{where} holds dates; {no_dates}")
    if pa.types.is_temporal(kind):
        raise ValueError(f"{where} holds times ({kind}); write them as numbers, or list it under exclude")
    if not (pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind) or _is_text(kind)):
        raise ValueError(f"{where} holds lists or bytes ({kind}); spread them over columns, or list it under exclude")
    return not _is_text(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_number(text: str) -> bool:
    try:
        return bool(text) and np.isfinite(float(text))
    except ValueError:
        return False


class _Found(NamedTuple):
    """Hold statistics of the numbers, the different texts, the classes or quantities, and some rows of a block."""

    numbers: dict[str, NumberStatistics]
    texts: dict[str, list[str]]
    classes: list[str]
    quantities: Moments
    rows: pa.Table


def _block_statistics(
    blocks: DatedBlocks,
    is_number: dict[str, bool],
    beside: Sequence[str],
    target: Target,
    share: float,
    share_of_rows: float,
    block: int,
) -> _Found:
    table = blocks.read(block, [*is_number, *beside, target.name])
    codes, classes = texts_of_column(table[target.name])
    if (codes < 0).any():
        raise ValueError(
            f"column {shown(target.name)} of {blocks.name_of(block)} lacks {int((codes < 0).sum())} of {len(codes)} "
            f"values, the first in its row {int((codes < 0).argmax())} (from 0). Remove those rows, or predict them "
            "with predict_path"
        )
    quantities = Moments()
    if target.is_quantity:
        column = numbers_of_column(table[target.name], target.name, partial(blocks.name_of, block))
        classes, quantities = [], Moments.of(column[:, None])
    numbers, texts = dict[str, NumberStatistics](), dict[str, list[str]]()
    rows = _evenly_spaced(len(codes), share)
    for name, number in is_number.items():
        if number:
            found = numbers_of_column(table[name], name, partial(blocks.name_of, block))
            there = ~np.isnan(found)
            moments = Moments.of(found[there][:, None])
            numbers[name] = NumberStatistics(moments, int((~there).sum()), [found[rows][there[rows]]])
        else:
            codes, names = texts_of_column(table[name])
            texts[name] = [*names, *([MISSING] if (codes < 0).any() else [])]
    return _Found(numbers, texts, classes, quantities, table.take(_evenly_spaced(len(codes), share_of_rows)))


def _evenly_spaced(length: int, share: float) -> np.ndarray:
    return np.unique(np.linspace(0, length - 1, max(1, round(share * length))).astype(np.int64))


def _require_few(texts: set[str], name: str, blocks: DatedBlocks, is_named: bool) -> None:
    if len(texts) > (most := _MOST_CATEGORIES if is_named else _MOST_TEXTS):
        remedy = "" if is_named else ", or list it under categorical to make each text a feature"
        raise ValueError(
            f"column {shown(name)} of {blocks.files.root} holds more than {most} different texts; list it under "
            f"exclude if it is a key{remedy}"
        )
