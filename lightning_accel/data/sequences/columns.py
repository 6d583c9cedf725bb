"""Sequences in columns of lists. Shapes: R sequences, N steps of all, F features, K values of a target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lightning_accel.data.quoting import listed, shown
from lightning_accel.data.sequences.files import SEQUENCE_FIELDS, TOKEN_FIELDS, SequenceLayout
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
else:
    pa = import_on_use("pyarrow")
    pc = import_on_use("pyarrow.compute")


def find_sequence_column(schema: pa.Schema, layout: SequenceLayout, where: str) -> str:
    """Return the column that holds the sequences.

    Raises:
        ValueError: if there is none, or ``layout.values`` names several.
    """
    if len(layout.values) > 1:
        raise ValueError(
            f"layout.values must name one column of {where}, whose rows are sequences; got {list(layout.values)}"
        )
    for name in layout.values or SEQUENCE_FIELDS:
        if name in schema.names:
            return name
    raise ValueError(
        f"{where} has no column {', '.join(layout.values or SEQUENCE_FIELDS)}, whose rows are sequences; name it in "
        f"layout.values. Its columns: {listed(schema.names)}"
    )


def steps_of_column(column: pa.ChunkedArray, name: str, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps of the sequences in a column, and their lengths (R,) int64.

    Steps are (N, F) float64 for lists of numbers or of lists of F numbers, (N,) int64 for tokens, or (N,) uint8 for
    texts.

    Raises:
        ValueError: if a row is missing, holds something else, or lists of several lengths.
    """
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        if name in TOKEN_FIELDS:
            raise ValueError(f"column {shown(name)} of {where} must hold lists of whole numbers; got texts")
        return _bytes_of(_whole(column, name, where).cast(pa.large_binary()))
    array, lengths = lists_of_column(column, name, where)
    inner = array.flatten()
    if not _is_list(inner.type):
        return _steps(inner, name, where), lengths
    widths = pc.list_value_length(inner).to_numpy(zero_copy_only=False)
    if len(widths) and widths.min() != widths.max():
        raise ValueError(
            f"all steps in column {shown(name)} of {where} must have equally many values; some have {widths.min()}, "
            f"others {widths.max()}"
        )
    return _steps(inner.flatten(), name, where).reshape(len(widths), widths[0] if len(widths) else 0), lengths


def lists_of_column(column: pa.ChunkedArray, name: str, where: str) -> tuple[pa.Array, np.ndarray]:
    """Return a column of lists as one array, and their lengths (R,) int64.

    Raises:
        ValueError: if a row is missing, or no list.
    """
    array = _whole(column, name, where)
    if not _is_list(array.type):
        raise ValueError(f"column {shown(name)} of {where} must hold lists; got {array.type}")
    return array, pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)


def _whole(column: pa.ChunkedArray, name: str, where: str) -> pa.Array:
    if column.null_count:
        raise ValueError(f"column {shown(name)} of {where} lacks {column.null_count} of {len(column)} rows")
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _bytes_of(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    lengths = pc.binary_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
    offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset :]
    data = array.buffers()[2]
    steps = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return steps[offsets[0] : offsets[len(array)]], lengths


def _steps(values: pa.Array, name: str, where: str) -> np.ndarray:
    kind = values.type
    if values.null_count or not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        got = f"{values.null_count} missing values" if values.null_count else kind
        raise ValueError(f"column {shown(name)} of {where} must hold lists of numbers; got {got}")
    if name not in TOKEN_FIELDS:
        steps: np.ndarray = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
        return steps.reshape(-1, 1)
    tokens = values.to_numpy(zero_copy_only=False)
    if len(tokens) and (tokens.dtype.kind not in "iu" or tokens.min() < 0):
        raise ValueError(f"column {shown(name)} of {where} must hold lists of whole numbers from 0")
    return tokens.astype(np.int64)
