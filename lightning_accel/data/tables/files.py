"""Readers of CSV and Parquet files that raise an error where a value would be misread."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_accel.data.bounds import allowed_bytes, require_allowed, require_unpackable
from lightning_accel.data.quoting import cut, lacking_column, shown
from lightning_accel.data.tables.column_checks import (
    MOST_TEXTS,
    may_be_digit_codes,
    may_be_versions,
    may_have_thousands,
    warn_of_digit_codes,
    warn_of_thousands,
    warn_of_versions,
)
from lightning_accel.ops.bounds import local_path
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")

pc = import_on_use("pyarrow.compute")

pq = import_on_use("pyarrow.parquet")

_PARQUET_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}  # bytes
_UNPACKED_PARQUET = "write it without compression and dictionaries"
_OTHER_SEPARATORS = ";\t|"


def read_table(
    path: Path,
    separator: str = ",",
    decimal: str = ".",
    missing: Sequence[str] = (),
    text_columns: Sequence[str] = (),
) -> pd.DataFrame:
    """Read a CSV file, gzipped or not, or a Parquet file; ``text_columns`` of a CSV file are not converted to numbers.

    Where the header has no comma, the fields may also be separated by semicolons, tabs or ``|``.

    Raises:
        ValueError: if it is neither, cannot be read, has no rows, has two columns of one name, or is too large
            unpacked, see :mod:`lightning_accel.data.bounds`.
    """
    name = path.name.lower()
    if not name.endswith((".csv", ".csv.gz", ".parquet")):
        raise ValueError(f"need a .csv, .csv.gz or .parquet file; got {path}")
    try:
        if name.endswith(".parquet"):
            _require_bounded(path)
            table = pd.read_parquet(path)
            table = table.mask(table.isin([*missing, *_numbers_among(missing)])) if missing else table
        else:
            if name.endswith(".gz"):
                require_unpackable(path)
            separator, header = _read_header(path, separator)
            _require_distinct_names(header, path)
            with warnings.catch_warnings():
                # If rows are longer than the header, pandas would use their first fields as index, or drop the last
                warnings.simplefilter("error", pd.errors.ParserWarning)
                table = pd.read_csv(
                    path,
                    sep=separator,
                    decimal=decimal,
                    na_values=list(missing),
                    dtype=dict.fromkeys(text_columns, str),  # else "01" beside "A1" is text, and alone the number 1
                    index_col=False,
                    low_memory=False,  # True infers a type per chunk, so that it depends on where a text stands
                )
            if decimal == ",":
                others = table.drop(columns=[*text_columns], errors="ignore")
                names = [*others.select_dtypes(exclude=["integer", "bool"])]
                texts = pd.read_csv(
                    path, sep=separator, usecols=names, dtype=str, na_values=list(missing), index_col=False
                )
                _require_no_points(texts, path)
            if doubtful := [column for column in table if may_have_thousands(table[column])]:
                texts = pd.read_csv(path, sep=separator, usecols=doubtful, dtype=str, index_col=False)
                for column in doubtful:
                    warn_of_thousands(table[column], texts[column], path, decimal)
            for may_be, warn in ((may_be_versions, warn_of_versions), (may_be_digit_codes, warn_of_digit_codes)):
                if doubtful := [column for column in table if may_be(table[column])]:
                    texts = pd.read_csv(
                        path, sep=separator, usecols=doubtful, dtype=str, index_col=False, nrows=MOST_TEXTS
                    )
                    for column in doubtful:
                        warn(texts[column], path)
    except pd.errors.EmptyDataError:
        raise ValueError(f"{path} is empty; a header and rows were needed") from None
    except (
        ValueError,
        pd.errors.ParserWarning,
        OSError,
        EOFError,
    ) as error:  # raised by pandas and pyarrow, mostly ValueErrors
        if str(path) in str(error):
            raise
        remedy = ". Save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        if isinstance(error, pd.errors.ParserError) and "fields" in str(error):
            remedy = ". A value that holds the separator has to stand in quotation marks"
        raise ValueError(f"{path} cannot be read as {path.suffix[1:]}: {cut(error, 200)}{remedy}") from error
    if table.empty:
        raise ValueError(f"{path} has a header but no rows")
    return table.rename(columns=str)


def _require_no_points(texts: pd.DataFrame, path: Path) -> None:
    """Raise a ValueError if numbers have a point, which pandas reads as a decimal mark beside the comma."""
    for name in texts:
        present = texts[name].dropna().str.strip()
        is_pointed = present.str.fullmatch(r"[-+]?(\d+\.\d+|\d{1,3}(\.\d{3})+(,\d+)?)")  # no date
        others = pd.to_numeric(present[~is_pointed].str.replace(",", "."), errors="coerce")
        if is_pointed.any() and others.notna().all():
            raise ValueError(
                f"column {shown(str(name))} of {path} holds {shown(present[is_pointed].iloc[0])}, with a point, where "
                "csv.decimal is ',': remove marks of thousands from the file, or write its decimals with a comma"
            )


def _read_header(path: Path, separator: str) -> tuple[str, pd.DataFrame]:
    """Return the separator, another one where a comma leaves one column alone, and the header."""
    for tried in separator + (_OTHER_SEPARATORS if separator == "," else ""):
        header = pd.read_csv(path, sep=tried, header=None, nrows=1, dtype=str)
        if header.shape[1] > 1:
            return tried, header
    return separator, pd.read_csv(path, sep=separator, header=None, nrows=1, dtype=str)


def _numbers_among(texts: Sequence[str]) -> list[float]:
    return pd.to_numeric(pd.Series(texts, dtype=object), errors="coerce").dropna().tolist()


def _require_distinct_names(header: pd.DataFrame, path: Path) -> None:
    names = header.iloc[0]
    if names.duplicated(keep=False).any() and (twice := names[names.duplicated()].dropna()).any():
        raise ValueError(f"{path} has two columns named {shown(twice.iloc[0])}; rename or remove one")


def existing_file(path: str | Path) -> Path:
    """Return the path of a regular file.

    Raises:
        FileNotFoundError: if there is none; the message names a file of a similar name.
        ValueError: if it is something else, such as a folder.
    """
    path = regular_file(path)
    if path.is_file():
        return path
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = "".join(
        f"; did you mean {path.parent / name}?" for name in difflib.get_close_matches(path.name, beside, n=1)
    )
    raise FileNotFoundError(f"no file {path}{hint}")


def regular_file(path: str | Path) -> Path:
    """Return ``path``, which may not exist but may be nothing but a file; opening a pipe would block forever.

    Raises:
        TypeError: if it is no path.
        ValueError: if it is a folder, a pipe or a device.
    """
    path = local_path(path)
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "a device or socket"
        raise ValueError(f"{path} is {kind}; the path of a file was needed")
    return path


def require_columns(
    table: pd.DataFrame, needed: Sequence[str], path: Path, targets: Sequence[str] = (), option: str = ""
) -> None:
    """Raise a ValueError if a column is lacking that an option names.

    The message names ``predict_path`` if the column is one of the ``targets``.
    """
    columns = list(table.columns)
    for name in needed:
        if name in columns:
            continue
        found = lacking_column(name, columns, is_target=name in targets, option=option)
        if len(columns) == 1 and path.suffix.lower() != ".parquet":
            found += (
                ". There is one column only: separate the fields by commas, semicolons, tabs or |; TabularDataModule "
                "takes any other as csv.separator"
            )
        raise ValueError(f"{path} {found}")


def _require_bounded(path: Path) -> None:
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
                needed += max(unpacked, column.num_values * _PARQUET_WIDTHS.get(column.physical_type, 8))
                if column.physical_type not in _PARQUET_WIDTHS:
                    name = column.path_in_schema
                    texts[name] = texts.get(name, 0) + column.num_values * unpacked
        require_allowed(needed, path, f"{path}, unpacked,", _UNPACKED_PARQUET)
        suspects = [name for name, most in texts.items() if needed + most > allowed_bytes(path)]
    for name in suspects:
        with pq.ParquetFile(path, read_dictionary=[name]) as file:
            for batch in file.iter_batches(batch_size=1 << 16, columns=[name]):
                for values in batch.columns:
                    if hasattr(values, "dictionary"):
                        lengths = pc.take(pc.binary_length(values.dictionary), values.indices)
                        needed += pc.sum(lengths).as_py() or 0
                require_allowed(needed, path, f"{path}, unpacked, up to column {shown(name)}", _UNPACKED_PARQUET)
