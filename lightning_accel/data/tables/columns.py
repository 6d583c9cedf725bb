"""Columns of Arrow tables as arrays. Shapes: n rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_accel.data.quoting import listed, shown
from lightning_accel.data.shards.blocks import Blocks
from lightning_accel.data.tables.targets import require_no_quantity, warn_of_similar_classes
from lightning_accel.data.tables.values import LARGEST, days_of_dates, numbers_first
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
else:
    pa = import_on_use("pyarrow")
    pc = import_on_use("pyarrow.compute")


@dataclass(frozen=True, eq=False)
class DatedBlocks(Blocks):
    """Hold blocks whose columns of dates are read as numbers of days.

    Args:
        dates: these columns.
    """

    dates: Sequence[str]

    def read(self, block: int, columns: Sequence[str]) -> pa.Table:
        """Read ``columns`` of a block.

        Raises:
            ValueError: if it cannot be read, or holds something else in a column of dates.
        """
        table = super().read(block, columns)
        for place, name in enumerate(columns):
            if name in self.dates:
                written = table[name].to_pandas(date_as_object=False).rename(name)
                days = days_of_dates(written, self.name_of(block))
                table = table.set_column(place, name, pa.array(days.to_numpy()))
        return table


def numbers_of_column(column: pa.ChunkedArray, name: str, where: Callable[[], str]) -> np.ndarray:
    """Return a column as float64, NaN where it is missing.

    Raises:
        ValueError: if a number is infinite or too large.
    """
    plain = pc.cast(column, pa.uint8()) if pa.types.is_boolean(column.type) else column
    numbers: np.ndarray = pc.cast(plain, pa.float64(), safe=False).to_numpy()
    if (wrong := np.abs(numbers) > LARGEST).any():
        raise ValueError(
            f"column {shown(name)} of {where()} must hold numbers of at most {LARGEST:g}; got "
            f"{numbers[wrong.argmax()]} in its row {int(wrong.argmax())} (from 0). Mend the value, or write null "
            "instead"
        )
    return numbers


def texts_of_column(column: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """Return for each row the index of its text, -1 where it is missing, and the texts, each once or more."""
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)  # as pandas has it
    coded = column.combine_chunks().dictionary_encode()
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    codes = pc.fill_null(coded.indices, -1).to_numpy(zero_copy_only=False)
    return codes, [*map(_text_of, coded.dictionary.to_pylist())]


def _text_of(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # whole numbers are floats where some rows lack them
    return str(value)


def codes_of_column(
    column: pa.ChunkedArray, numbers: dict[str, int], *, unknown: int = -1, missing: int = -1
) -> np.ndarray:
    """Return the number of each row's text (n,) int64, ``unknown`` if the text has none, ``missing`` without a text."""
    codes, names = texts_of_column(column)
    return np.array([*(numbers.get(name, unknown) for name in names), missing], np.int64)[codes]


def quantities_of_column(column: pa.ChunkedArray, name: str, where: str) -> np.ndarray:
    """Return numbers, or lists of K numbers, as (n, K) float64.

    Raises:
        ValueError: if one is missing, infinite or too large, or lists differ in their length.
    """
    array = column.combine_chunks()
    array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
    width = 1
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        widths = np.unique(pc.list_value_length(array).to_numpy(zero_copy_only=False))
        if len(widths) > 1 or array.null_count:
            raise ValueError(f"all lists in column {shown(name)} of {where} must be equally long")
        width, array = int(widths[0]) if len(widths) else 1, array.flatten()
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type) or pa.types.is_boolean(array.type)):
        raise ValueError(f"column {shown(name)} of {where} must hold numbers, or lists of them; got {array.type}")
    numbers = numbers_of_column(pa.chunked_array([array]), name, lambda: where).reshape(-1, width)
    if np.isnan(numbers).any():
        raise ValueError(f"column {shown(name)} of {where} lacks {np.isnan(numbers).sum()} numbers. Remove those rows")
    return numbers


def require_classes(others: set[str], train: set[str], where: str, quantity: str) -> list[str]:
    """Return the names of the classes that ``train``, sorted; ``quantity`` ends a message about numbers.

    Raises:
        ValueError: if there is one only, others are in rows that do not train, or they are quantities.
    """
    unknown = sorted(others - train)
    require_no_quantity(sorted(train, key=numbers_first), bool(unknown), where, quantity)
    if unknown:
        raise ValueError(
            f"{where} holds {listed(unknown, 3)} in rows that validate or test alone; each class must be in rows that "
            "train. Shuffle the rows over the files, or put other files in folders train, val and test"
        )
    if len(train) < 2:
        raise ValueError(f"{where} holds one class only, {listed(sorted(train))}; two or more are needed")
    classes = sorted(train, key=numbers_first)
    warn_of_similar_classes(classes, where)
    return classes
