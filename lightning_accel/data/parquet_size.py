"""Limit on the memory that a Parquet file needs, in which a few bytes may encode a value of every row."""

from pathlib import Path

import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from lightning_accel.data.bounds import allowed_bytes, require_allowed
from lightning_accel.data.quoting import shown

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}


def require_bounded(path: Path, max_bytes: int) -> None:
    """Raise a ValueError if the rows of a Parquet file need more memory than :func:`allowed_bytes` permits.

    Columns of text or bytes are decoded only if their longest possible value, repeated in every row, would be too much.
    """
    with pq.ParquetFile(path) as file:
        metadata = file.metadata
        needed, texts = 0, dict[str, int]()
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                column = metadata.row_group(group).column(number)
                unpacked = column.total_uncompressed_size
                needed += max(unpacked, column.num_values * _WIDTHS.get(column.physical_type, 8))
                if column.physical_type not in _WIDTHS:
                    name = column.path_in_schema
                    texts[name] = texts.get(name, 0) + column.num_values * unpacked
        require_allowed(needed, path, max_bytes, f"{path}, unpacked,")
        suspects = [name for name, most in texts.items() if needed + most > allowed_bytes(path, max_bytes)]
    for name in suspects:
        with pq.ParquetFile(path, read_dictionary=[name]) as file:
            for batch in file.iter_batches(batch_size=1 << 16, columns=[name]):
                for values in batch.columns:
                    if hasattr(values, "dictionary"):
                        lengths = pc.take(pc.binary_length(values.dictionary), values.indices)
                        needed += pc.sum(lengths).as_py() or 0
                require_allowed(needed, path, max_bytes, f"{path}, unpacked, up to column {shown(name)}")
