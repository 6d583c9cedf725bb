"""Columns of Arrow tables as arrays. Shapes: n rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_accel.data.quoting import shown
from lightning_accel.data.tables.files import LARGEST
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
else:
    pa = import_on_use("pyarrow")
    pc = import_on_use("pyarrow.compute")


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
            f"{numbers[wrong.argmax()]} in its row {int(wrong.argmax()) + 1}. Mend the value, or write null instead"
        )
    return numbers


def texts_of_column(column: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """Return for each row the index of its text, -1 where it is missing, and the texts, each once or more."""
    coded = column.combine_chunks().dictionary_encode()
    if isinstance(coded, pa.ChunkedArray):
        coded = coded.combine_chunks()
    codes = pc.fill_null(coded.indices, -1).to_numpy(zero_copy_only=False)
    return codes, [*map(_text_of, coded.dictionary.to_pylist())]


def _text_of(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # whole numbers are floats where some rows lack them
    return str(value)
