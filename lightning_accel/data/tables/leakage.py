"""Doubts about rows that are copies of training rows, and of columns that tell the target on their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_accel.data.quoting import listed
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")

_FEWEST_COPIES = 5
_SMALLEST_SHARE = 0.05  # of the rows that validate and test
_MOST_NUMBERS = 20  # rows that differ in so few numbers coincide by chance
_FEWEST_ROWS = 20  # in fewer rows, a column agrees with the target by chance
_ROWS_OF_A_VALUE = 20
_LARGEST_CORRELATION = 0.9999
_LEAST_CHANCE = 1e-6


def doubts_of_copies(
    features: pd.DataFrame, target: np.ndarray, train: np.ndarray, held_out: np.ndarray, path: str | Path
) -> Iterator[str]:
    """Yield a warning if 5 % of the rows ``held_out``, and five or more, are copies of training rows.

    A copy equals a training row in all features and the target, and has a number that no other training row has than
    its copies, in a column of more than 20 numbers. Rows of few different values are equal by chance, and not counted.
    """
    table = pd.concat([features, pd.Series(target, index=features.index)], axis=1)
    rows = pd.util.hash_pandas_object(table, index=False).to_numpy()
    fewest = max(_FEWEST_COPIES, _SMALLEST_SHARE * len(held_out))
    is_equal = np.isin(rows[held_out], rows[train])
    if is_equal.sum() < fewest:
        return
    is_rare = np.zeros(len(held_out), dtype=bool)
    for name in features:
        numbers = features[name]
        if numbers.dtype == np.float64 and numbers.iloc[train].nunique() > _MOST_NUMBERS:
            holders = pd.Series(rows[train]).groupby(numbers.to_numpy()[train]).nunique()  # different rows of a number
            is_rare |= numbers.iloc[held_out].map(holders).eq(1).to_numpy()
    count = int((is_equal & is_rare).sum())
    if count >= fewest:
        yield (
            f"{count} of the {len(held_out)} rows of {path} that validate and test ({count / len(held_out):.0%}) are "
            "copies of training rows, equal in all features and the target, so that metrics are in part those of rows "
            "that the model has trained on. Unless they are separate samples, remove repeated rows from the file"
        )


def doubts_of_answers(features: pd.DataFrame, target: np.ndarray, path: str | Path, is_quantity: bool) -> Iterator[str]:
    """Yield a warning of columns that tell the target of the training rows on their own.

    There must be other columns, and more than 20 rows. A column tells a quantity if the absolute value of their
    correlation, or of that of their ranks, exceeds 0.9999. It tells the class if each of its values is in rows of one
    class alone, and there are as many values as classes, as in a copy, or 20 rows for each value; or if it holds texts,
    and classes drawn at random would be as pure less than once in a million. A number that separates the classes at a
    threshold has more values, and is not named.

    Args:
        features: training rows.
        target: their classes, -100 where one is unknown, or quantities.
        path: the file, for messages.
        is_quantity: which of both.
    """
    known = np.flatnonzero(is_quantity | (target != -100))
    features, target = features.iloc[known], target[known]
    if len(target) <= _FEWEST_ROWS or len(features.columns) < 2:
        return
    tells = _tells_quantity if is_quantity else _tells_class
    if answers := [name for name in features if tells(features[name], target)]:
        of_quantity = "a correlation above 0.9999 with it, or of ranks"
        what = of_quantity if is_quantity else "each value in rows of one class alone"
        yield (
            f"columns of {path} that tell the target of the training rows on their own, with {what}: "
            f"{listed(answers, 5)}. If one is made of the target, or not known where the target is to be predicted, "
            "list it under exclude; if its values stand for persons or things of several rows each, name it as group"
        )


def _tells_quantity(column: pd.Series, target: np.ndarray) -> bool:
    if column.dtype != np.float64:
        return False
    present = column.notna().to_numpy()
    numbers, targets = column.to_numpy()[present], target[present]
    if len(numbers) <= _FEWEST_ROWS or np.ptp(numbers) == 0 or np.ptp(targets) == 0:
        return False
    ranks = pd.Series(numbers).rank(), pd.Series(targets).rank()
    return any(abs(np.corrcoef(a, b)[0, 1]) > _LARGEST_CORRELATION for a, b in ((numbers, targets), ranks))


def _tells_class(column: pd.Series, target: np.ndarray) -> bool:
    groups = pd.Series(target).groupby(column.to_numpy(), dropna=False)
    if not (groups.nunique() == 1).all():
        return False
    most_values = max(len(np.unique(target)), len(target) / _ROWS_OF_A_VALUE)
    if column.nunique(dropna=False) <= most_values:
        return True
    shares = np.unique(target, return_counts=True)[1] / len(target)
    by_chance = np.log((shares[:, None] ** groups.size().to_numpy()).sum(0)).sum()
    return column.dtype != np.float64 and bool(by_chance < np.log(_LEAST_CHANCE))
