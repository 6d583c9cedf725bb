"""Warnings of columns that are read as they stand, and mean something else to their author."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_accel.data.quoting import cut, listed, shown
from lightning_accel.data.shards.files import is_sharded
from lightning_accel.ops.names import list_some

if TYPE_CHECKING:
    import pandas as pd

_FEWEST_ROWS = 20  # in fewer rows, such patterns are chance
_FEWEST_OF_CLASS = 10
_FEWEST_REPEATS = 0.01  # share of the rows
_CODES = -99.0, -999.0, -9999.0, -99999.0  # as people write missing values
_FEWEST_MARKED = 5  # values with a mark that may be one of thousands
MOST_TEXTS = 10_000  # rows that are looked at
_FEWEST_DATES = 20  # different ones, each a feature
_DAY, _MONTH, _TIME = r"(0?[1-9]|[12]\d|3[01])", r"(0?[1-9]|1[0-2])", r"([T ]+\d\d?:\d\d.*)?"
_DAY_OR_MONTH_FIRST = rf"({_DAY}[-/.]{_MONTH}|{_MONTH}[-/.]{_DAY})[-/.]\d{{4}}"
NO_DATES = "list it under dates, to be read as days since 1970-01-01, or under exclude"
_DATE = rf"(\d{{4}}([-/.]){_MONTH}\2{_DAY}|{_DAY_OR_MONTH_FIRST}|\d{{4}}-{_MONTH}){_TIME}"
_OFFSET = r" ?(Z|[-+]\d\d(:?\d\d)?)"
ISO_DATE = rf"\d{{4}}(-\d\d?-|/\d\d?/)\d\d?([T ]\d\d?:\d\d(:\d\d(\.\d+)?)?({_OFFSET})?)?"  # as ``dates`` takes it
_FEWEST_OUTSIDE = 5  # new values that are all outside the range of the training rows, however near


def doubts_of_columns(
    features: pd.DataFrame, train: np.ndarray, path: str | Path, quantity: pd.Series | None = None
) -> Iterator[str]:
    """Yield warnings of columns that carry nothing in training rows, count rows, or hold a code for missing values.

    Args:
        features: numbers as float64, NaN where they are missing, and texts.
        train: rows that train.
        path: the file, for messages.
        quantity: the target, if it is a quantity.
    """
    if quantity is not None:
        yield from doubts_of_code(quantity, path, "remove those rows, or predict them with predict_path")
    trains = features.iloc[train]
    if constant := [name for name in features if trains[name].nunique(dropna=False) == 1]:
        yield (
            f"columns of {path} that are empty or hold one value in all training rows: {listed(constant, 5)}. Models "
            "learn nothing from them; list them under exclude"
        )
    for name in features.columns.difference(constant, sort=False):
        numbers = features[name].to_numpy()
        if numbers.dtype != np.float64 or len(numbers) <= _FEWEST_ROWS:
            continue
        if _counts_rows(numbers) and len(features.columns) > 1 + len(constant):
            yield (
                f"column {shown(name)} of {path} holds the numbers {numbers.min():g} to {numbers.max():g}, each in one "
                "row. If they number the rows, list the column under exclude: a model could only learn them by heart"
            )
        else:
            in_one_file = "set csv.missing, as by --data.csv.missing={code:g}"
            remedy = "write null in the files" if is_sharded(path) else in_one_file
            yield from doubts_of_code(features[name], path, remedy)


def doubts_of_classes(labels: np.ndarray, names: Sequence[str], path: str | Path) -> Iterator[str]:
    """Yield a warning of classes of few rows, on which metrics of a test say little."""
    counts = np.bincount(labels[labels >= 0], minlength=len(names))
    rows_of = dict(zip(names, counts.tolist(), strict=True))
    if rare := [f"{cut(name)} ({rows})" for name, rows in rows_of.items() if rows < _FEWEST_OF_CLASS]:
        yield (
            f"classes of fewer than {_FEWEST_OF_CLASS} rows of {path}: {list_some(rare, 5)}. The test has few of "
            "each, so that its metrics say little about them; merge them, or gather more rows"
        )


def doubts_of_dates(texts: pd.DataFrame, path: str | Path) -> Iterator[str]:
    """Yield warnings of columns of texts that are dates, of which each becomes a feature."""
    for name in texts:
        values = texts[name].drop_duplicates()
        if len(values) >= _FEWEST_DATES and are_dates(values):
            dates = values[values.str.fullmatch(_DATE)]  # all but a text for a missing one
            yield (
                f"column {shown(name)} of {path} holds {len(dates)} texts that are dates, such as "
                f"{shown(dates.iloc[0])}, of which each becomes a feature, and dates that no training row has become "
                f"none; {remedy_of_dates(dates.iloc[0])}"
            )


def remedy_of_dates(first: str) -> str:
    """Return what to do with a column of texts that are dates, as the ``first`` is."""
    return NO_DATES if re.fullmatch(ISO_DATE, first) else f"write them as 2024-06-07, and {NO_DATES}"


def are_dates(texts: pd.Series) -> bool:
    """Return whether at least 9 of 10 texts are dates, with or without a time.

    >>> import pandas as pd
    >>> are_dates(pd.Series(["2024-03-01 12:30", "3/1/2024"])), are_dates(pd.Series(["12-34-5678", "1.2.3"]))
    (True, False)
    """
    return bool(texts.str.fullmatch(_DATE).mean() >= 0.9)


def warn_of_thousands(numbers: pd.Series, texts: pd.Series, path: Path, decimal: str) -> None:
    """Warn of a column whose decimal marks, as ``texts`` has them, may be marks of thousands.

    They may be if each has three digits behind it and one to three before it, which do not begin with 0, and if other
    numbers, from 1 to 999, have no mark. Where all numbers have three decimals, as ``%.3f`` writes them, none lacks it.
    """
    present = texts[numbers.notna() & texts.notna()].str.strip()
    marked = present[present.str.contains(decimal, regex=False)]
    mark = re.escape(decimal)
    if (
        len(marked) >= _FEWEST_MARKED
        and present.str.fullmatch(rf"[-+]?([1-9]\d{{0,2}}{mark}\d{{3}}|\d{{1,3}})").all()
        and present.str.fullmatch(r"\+?0*[1-9]\d*").any()  # 0 and -1 may be codes among numbers with three decimals
    ):
        first = marked.iloc[0]
        rank_zero_warn(
            f"column {shown(numbers.name)} of {path} holds {shown(first)} and the like, always with three digits "
            f"behind the mark, read as {numbers[marked.index[0]]:g}, beside numbers below 1000 without a mark. These "
            f"may be marks of thousands: if {first.replace(decimal, '')} is meant, remove the marks from the file"
        )


def may_have_thousands(numbers: pd.Series) -> bool:
    """Return whether a column has fractions of three digits at most, whole numbers, and numbers below 1000 alone."""
    if numbers.dtype != np.float64:
        return False
    present = numbers.dropna().to_numpy()
    if (np.abs(present) >= 1000).any():  # infinities, too, which have no remainder
        return False
    is_whole = present % 1 == 0
    if is_whole.all() or not (is_whole & (present > 0)).any():
        return False
    thousandths = present * 1000
    return np.allclose(thousandths, thousandths.round(), rtol=0, atol=1e-6)


def warn_of_versions(texts: pd.Series, path: Path) -> None:
    """Warn of a column of numbers such as 3.8, 3.9 and 3.10, of which the last is read as 3.1."""
    present = texts.dropna().str.strip()
    decimals = present.str.extract(r"^\d+\.(\d+)$")[0]
    zeros = decimals.str.fullmatch(r"\d+0")
    if decimals.notna().all() and zeros.any() and (decimals.str.len() == 1).any():
        first = present[zeros].iloc[0]
        rank_zero_warn(
            f"column {shown(texts.name)} of {path} holds {shown(first)}, read as {float(first):g}, beside numbers with "
            "one decimal. If they are versions, list the column under categorical"
        )


def may_be_versions(numbers: pd.Series) -> bool:
    """Return whether a column has fractions, of at most two digits."""
    if numbers.dtype != np.float64:
        return False
    hundredths = 100 * numbers.dropna().to_numpy()[:MOST_TEXTS]
    if not np.isfinite(hundredths).all():
        return False
    whole = hundredths.round()
    return bool(np.allclose(hundredths, whole, rtol=0, atol=1e-6) and (whole % 100 != 0).any())


def warn_of_digit_codes(texts: pd.Series, path: Path) -> None:
    """Warn of a column of whole numbers of which some begin with 0, as postal codes do, or are written as 1E5."""
    present = texts.dropna().str.strip()
    changed = present[present.str.fullmatch(r"0\d{2,}|\d+[eE]\d+")]
    if len(changed) and present.str.fullmatch(r"\d+([eE]\d+)?").all():
        first = changed.iloc[0]
        rank_zero_warn(
            f"column {shown(texts.name)} of {path} holds {shown(first)}, read as {float(first):.16g}. If these are "
            "codes, as postal ones are, list the column under categorical"
        )


def may_be_digit_codes(numbers: pd.Series) -> bool:
    """Return whether a column has whole numbers from 0 on alone, some of three digits."""
    if numbers.dtype.kind not in "iuf":
        return False
    present = numbers.dropna()
    return bool(len(present) and (present % 1 == 0).all() and present.min() >= 0 and present.max() >= 100)


def warn_of_new_numbers(features: pd.DataFrame, train: pd.DataFrame, path: Path) -> None:
    """Warn of columns of numbers that are missing, or in a range, where those of the training rows are not."""
    for name in train.columns:
        known, new = train[name].dropna(), features[name].dropna()
        if train[name].dtype != np.float64 or known.empty:
            continue
        if new.empty or (len(new) < len(features) and len(known) == len(train)):
            lacking = "is empty" if new.empty else f"lacks {len(features) - len(new)} of {len(features)} values"
            rank_zero_warn(
                f"column {shown(name)} of {path} {lacking}, and {len(known)} of {len(train)} training rows have one: "
                f"the median of the training rows, {known.median():g}, is put there"
            )
        if not new.empty:
            warn_of_new_range(new, known.min(), known.max(), path)


def warn_of_new_range(new: pd.Series, low: float, high: float, path: Path) -> None:
    """Warn of a column of numbers, none missing, that are all outside the range ``low`` to ``high`` of the training."""
    distance = max(new.min() - high, low - new.max())
    if distance > 0 and (len(new) >= _FEWEST_OUTSIDE or distance > high - low):
        rank_zero_warn(
            f"column {shown(new.name)} of {path} holds numbers from {new.min():g} to {new.max():g}, all outside those "
            f"of the training rows, {low:g} to {high:g}. Write them in the same unit, with the same decimal mark"
        )


def warn_of_code(column: pd.Series, path: Path, remedy: str) -> None:
    """Warn of a number that may stand for missing values; ``remedy`` may have a field ``code``."""
    for doubt in doubts_of_code(column, path, remedy):
        rank_zero_warn(doubt)


def doubts_of_code(column: pd.Series, path: str | Path, remedy: str) -> Iterator[str]:
    numbers = column.to_numpy()
    if len(numbers) > _FEWEST_ROWS and (code := _far_value(numbers[~np.isnan(numbers)])) is not None:
        yield (
            f"column {shown(column.name)} of {path} holds {code:g} in {int((numbers == code).sum())} of {len(numbers)} "
            f"rows, far from all its other numbers. If it stands for a missing value, {remedy.format(code=code)}"
        )


def _counts_rows(numbers: np.ndarray) -> bool:
    """Return whether the numbers are whole and equally far apart, each once, in any order."""
    if np.isnan(numbers).any() or (numbers % 1).any():
        return False
    steps = np.diff(np.sort(numbers))
    return bool(steps[0] > 0 and (steps == steps[0]).all())


def _far_value(numbers: np.ndarray) -> float | None:
    """Return a least or largest whole number that repeats, far from all others.

    A number is far at 10 interquartile ranges of the others. There, and at any distance below others that are not
    negative, two of -99 suffice, and one of -999, -9999 and -99999, which need not repeat.

    >>> _far_value(np.array([-999.0, *range(20, 60), -999]))
    -999.0
    >>> _far_value(np.array([-999.0, *range(-20, 20)]))
    -999.0
    >>> _far_value(np.array([-998.0, *range(20, 60)]))  # an outlier
    >>> _far_value(np.array([-99.0, -99, *range(0, 9000, 10)]))
    -99.0
    """
    for extreme in (numbers.min(initial=np.inf), numbers.max(initial=-np.inf)):
        is_extreme = numbers == extreme
        others = numbers[~is_extreme]
        if not len(others) or extreme % 1:
            continue
        is_known = extreme in _CODES and is_extreme.sum() >= (2 if extreme == _CODES[0] else 1)
        if is_known and others.min() >= 0:
            return float(extreme)
        if not is_known and is_extreme.sum() < max(2, _FEWEST_REPEATS * len(numbers)):
            continue
        low, high = np.quantile(others, [0.25, 0.75])
        if high > low and np.abs(others - extreme).min() > 10 * (high - low):
            return float(extreme)
    return None
