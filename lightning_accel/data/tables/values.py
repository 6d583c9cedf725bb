"""Values of columns: which are numbers, and errors where one would be misread."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_accel.data.quoting import cut, shown
from lightning_accel.data.shards.files import is_sharded
from lightning_accel.data.tables.column_checks import ISO_DATE, NO_DATES, are_dates, remedy_of_dates
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")

LARGEST = 1e30  # the standardization squares it
# a number as people write it, and no version or address such as 10.0.1.1
_FIGURE = r"(?!.*\.(\d{1,2}|\d{4,})\.)[$€£]? ?[-+]?[\d.,' ]*\d[\d.,' ]*[%$€£]?"
_WITH_COMMA = r"[-+]?\d+(,\d+)+"
_REMOVE_SIGNS = "Remove currency signs and marks of thousands"
_SET_DECIMAL = "set csv.decimal, as by --data.csv.decimal ',', if the comma is the decimal mark"


def require_present(column: pd.Series, path: Path, remedy: str) -> pd.Series:
    """Return ``column``; raise a ValueError that ends in ``remedy`` if it lacks a value."""
    if (missing := column.isna()).any():
        raise ValueError(
            f"column {shown(column.name)} of {path} lacks {missing.sum()} of {len(column)} values, the first in "
            f"{_first_row(missing)}. {remedy}"
        )
    return column


def numbers_first(name: str) -> tuple[float, str]:
    """Return a sort key that puts 2 before 10, and numbers before words."""
    try:
        return float(name), name
    except ValueError:
        return np.inf, name


def holds_numbers(column: pd.Series, path: str | Path, has_options: bool = True) -> bool:
    """Return whether every value of a column is a number; False if none is.

    Args:
        column: the column.
        path: the file that it is from.
        has_options: whether messages may name ``exclude``, ``categorical`` and options of CSV files.

    Raises:
        ValueError: if only some are numbers, naming the first that is not; if the column holds dates, lists, bytes,
            numbers that are not parsed as they are written, or texts that hardly repeat.
    """
    where = f"column {shown(column.name)} of {path}"
    leave_out = "list it under exclude" if has_options else "remove it"
    no_dates = NO_DATES if has_options else "remove it, or write year, month and day as columns of numbers"
    if pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
        return True
    if pd.api.types.is_datetime64_any_dtype(column):
        raise ValueError(f"{where} holds dates; {no_dates}")
    if pd.api.types.is_timedelta64_dtype(column):
        raise ValueError(f"{where} holds durations; write them as numbers, or {leave_out}")
    present = column.dropna()
    if present.map(lambda value: isinstance(value, list | dict | np.ndarray | bytes)).any():
        raise ValueError(f"{where} holds lists or bytes; spread them over columns, or {leave_out}")
    is_text = pd.to_numeric(present.astype(object), errors="coerce").isna()
    if is_text.any() and not is_text.all():
        wrong = is_text.reindex(column.index, fill_value=False)
        first = str(column[wrong].iloc[0])
        written = "write null" if is_sharded(path) else "list it under csv.missing"
        mend = f"Mend the value, {written}" if has_options else "Mend the value"
        remedy = _REMOVE_SIGNS if _is_figure(first) else mend
        otherwise = ", or list the column under categorical" if has_options else ""
        raise ValueError(
            f"{where} holds {shown(first)} in {_first_row(wrong)}{_and_others(wrong)} among numbers. "
            f"{remedy}{otherwise}"
        )
    texts = present.astype(str)
    are_figures = is_text.any() and texts.str.fullmatch(_FIGURE).all()
    are_many = is_text.any() and len(present) > 20 and present.nunique() > len(present) / 2
    if (are_figures or are_many) and are_dates(texts):
        remedy = remedy_of_dates(texts.iloc[0]) if has_options else no_dates
        raise ValueError(f"{where} holds dates, such as {shown(texts.iloc[0])}; {remedy}")
    each = ", or under categorical to make each text a feature" if has_options else ""
    if are_figures:
        has_comma = has_options and _is_csv(path) and texts.str.fullmatch(_WITH_COMMA).any()
        decimal = f"{_SET_DECIMAL}, " if has_comma else ""
        raise ValueError(
            f"{where} holds {shown(str(present.iloc[0]))} and the like, which are no numbers as they are written. If "
            f"they are amounts, {decimal}rewrite them without currency signs and marks of thousands; otherwise "
            f"{leave_out}{each}"
        )
    if are_many:
        raise ValueError(
            f"{where} holds {present.nunique()} different texts in {len(present)} rows; {leave_out} if it is a "
            f"key{each}"
        )
    return not is_text.any()


def which_hold_numbers(table: pd.DataFrame, path: str | Path, exclude: Sequence[str]) -> dict[str, bool]:
    """Return which columns of a table hold numbers.

    Raises:
        ValueError: as :func:`holds_numbers` does, of all columns of which it does, with the option that leaves them out
            beside those of ``exclude``.
    """
    found, wrong = dict[str, bool](), dict[str, ValueError]()
    for name in map(str, table):
        try:
            found[name] = holds_numbers(table[name], path)
        except ValueError as error:
            wrong[name] = error
    if len(wrong) > 1:
        names = [*exclude, *wrong]
        listing = shlex.quote(json.dumps([cut(name) for name in names[:20]], ensure_ascii=False))
        messages = "\n".join(map(str, [*wrong.values()][:5]))
        raise ValueError(f"{messages}\nTo leave out all {len(names)}: --data.exclude {listing}")
    if wrong:
        raise next(iter(wrong.values()))
    return found


def as_numbers(column: pd.Series, path: str | Path, remedy: str | None = None) -> pd.Series:
    is_plain = isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf"
    numbers = column if is_plain else pd.to_numeric(column.astype(object), errors="coerce")
    numbers = numbers.astype(np.float64)
    wrong = (numbers.isna() & column.notna()) | (numbers.abs() > LARGEST)
    if wrong.any():
        first = str(column[wrong].iloc[0])
        most = f" of at most {LARGEST:g}" if numbers[wrong].notna().any() else ""
        if remedy is None and _is_csv(path) and re.fullmatch(_WITH_COMMA, first):
            remedy = _SET_DECIMAL[0].upper() + _SET_DECIMAL[1:]
            if column[wrong].astype(str).str.fullmatch(r"[-+]?\d{1,3}(,\d{3})+").all():
                remedy = f"{_REMOVE_SIGNS} if {first.replace(',', '')} is meant; {_SET_DECIMAL}"
        remedy = remedy or (_REMOVE_SIGNS if _is_figure(first) else "Mend the value, or list it under csv.missing")
        raise ValueError(
            f"column {shown(column.name)} of {path} must hold numbers{most}; got {shown(first)} in "
            f"{_first_row(wrong)}{_and_others(wrong)}. {remedy}"
        )
    return numbers


def days_of_dates(column: pd.Series, path: str | Path) -> pd.Series:
    """Return dates as float64 days since 1970-01-01 in UTC, with a fraction for the time, NaN where one is missing.

    Raises:
        ValueError: if a value is neither a date nor a text of one in ISO 8601, year first.
    """
    dates = column
    if not pd.api.types.is_datetime64_any_dtype(column):
        texts = column.astype("string").str.strip()
        dates = texts.where(texts.str.fullmatch(ISO_DATE, na=False))
    moments = pd.to_datetime(dates, errors="coerce", format="ISO8601", utc=True).dt.tz_convert(None)
    if (wrong := moments.isna() & column.notna()).any():
        first = str(column[wrong].iloc[0])
        missing = "list it under csv.missing" if _is_csv(path) else "write null"
        remedy = f"Mend the value, or {missing} if there is no date"
        if re.fullmatch(r"\s*\d\d?[-/.]\d\d?[-/.]\d.*", first):
            remedy = "Its day or its month may be first: write ISO dates, the year first"
        elif pd.notna(pd.to_numeric(first, errors="coerce")):
            remedy = "Leave a column of numbers out of dates, or write ISO dates there"
        raise ValueError(
            f"column {shown(column.name)} of {path} must hold dates such as 2024-06-07 or 2024-06-07T12:30; got "
            f"{shown(first)} in {_first_row(wrong)}{_and_others(wrong)}. {remedy}"
        )
    days = (moments.to_numpy() - np.datetime64(0, "D")) / np.timedelta64(1, "D")
    return pd.Series(days, index=column.index, name=column.name)


def _is_csv(path: str | Path) -> bool:
    return str(path).lower().endswith((".csv", ".csv.gz"))


def _is_figure(text: str) -> bool:
    """Return whether a text is a number as people write it, which is none as files have it."""
    return bool(re.fullmatch(_FIGURE, text)) and pd.isna(pd.to_numeric(text, errors="coerce"))


def _and_others(wrong: pd.Series) -> str:
    """Return how many values are wrong beside the first."""
    return f" and {wrong.sum() - 1} more of {len(wrong)} values" if wrong.sum() > 1 else ""


def as_text(column: pd.Series, path: str | Path) -> pd.Series:
    """Convert the values to texts, missing ones to ``<missing>``.

    Raises:
        ValueError: if they are bytes.
    """
    if column.dtype == object and column.map(lambda value: isinstance(value, bytes)).any():
        raise ValueError(
            f"column {shown(column.name)} of {path} holds bytes; text or numbers were needed. Decode them, or leave "
            "the column out if it is no feature"
        )
    # convert_dtypes first: whole numbers with missing values are float, and would become "1.0" in place of "1"
    return column.convert_dtypes().astype("string").fillna("<missing>").astype(object)


def _first_row(mask: pd.Series) -> str:
    """Name the first row where ``mask`` is True: by its line, if the index has lines, or as in files of predictions."""
    first = int(mask.to_numpy().argmax())
    return f"line {mask.index[first]}" if mask.index.name == "line" else f"row {first} (from 0)"
