"""Doubts about rows that are copies of training rows, and of columns that tell the target on their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_accel.data.quoting import listed
from lightning_accel.data.tables.statistics import MISSING
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
_FEWEST_GROUPS = 10
_LARGEST_CORRELATION = 0.9999
_LEAST_CHANCE = 1e-6
_EXCLUDE = "list it under exclude; if its values stand for persons or things of several rows each, name it as group"


def doubts_of_copies(
    features: pd.DataFrame, target: np.ndarray, train: np.ndarray, held_out: np.ndarray, path: str | Path
) -> Iterator[str]:
    """Yield a warning if 5 % of the rows ``held_out``, and five or more, are copies of training rows.

    A copy equals a training row in all features and the target, and has a number that no other training row has than
    its copies, in a column of more than 20 numbers. Rows of few different values are equal by chance, and not counted.
    Columns of texts or whole numbers that no two rows share are keys, and not compared.
    """
    features = features[[name for name in features if not _is_key(features[name])]]
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


def doubts_of_answers(
    features: pd.DataFrame,
    target: np.ndarray,
    path: str | Path,
    is_quantity: bool,
    remedy: str = _EXCLUDE,
    missing_tells: bool = True,
) -> Iterator[str]:
    """Yield a warning of columns that tell the target of the training rows on their own.

    There must be other columns, and more than 20 rows. A column tells a quantity if the absolute value of their
    correlation, or of that of their ranks, exceeds 0.9999. It tells the class if each of its values is in rows of one
    class alone, and there are as many values as classes, as in a copy, or 20 rows for each value, or, missing values
    aside, classes drawn at random would be as pure less than once in a million; if rows with a value, or those without
    one, are of one class where chance is as small; or if it is a number that as many thresholds as classes separate
    these by.

    Args:
        features: training rows.
        target: their classes, -100 where one is unknown, or quantities.
        path: the file, for messages.
        is_quantity: which of both.
        remedy: what to do if it does.
        missing_tells: whether which values are missing may tell the class, as where they are written for one class.
    """
    known = np.flatnonzero(_different(features, target) & (is_quantity | (target != -100)))
    features, target = features.iloc[known], target[known]
    if len(target) <= _FEWEST_ROWS or len(features.columns) < 2:
        return
    tells = _tells_quantity if is_quantity else partial(_tells_class, missing_tells=missing_tells)
    if answers := [name for name in features if tells(features[name], target)]:
        of_quantity = "a correlation above 0.9999 with it, or of ranks"
        what = of_quantity if is_quantity else "each value in rows of one class alone"
        yield (
            f"columns of {path} that tell the target of the training rows on their own, with {what}: "
            f"{listed(answers, 5)}. If one is made of the target, or not known where the target is to be predicted, "
            f"{remedy}"
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


def _tells_class(column: pd.Series, target: np.ndarray, missing_tells: bool = False) -> bool:
    counts = np.unique(target, return_counts=True)[1]
    is_number = column.dtype == np.float64
    known = column.notna().to_numpy()
    if is_number and _are_apart(column.to_numpy()[known], target[known]):
        return True
    groups = pd.Series(target).groupby(column.to_numpy(), dropna=False)
    if (groups.nunique() == 1).all() and column.nunique(dropna=False) <= max(
        len(counts), len(target) / _ROWS_OF_A_VALUE
    ):
        return True
    present = (column.notna() & (column != MISSING)).to_numpy()
    if (
        missing_tells
        and not present.all()
        and any(_are_of_one_class(target[mask], target) for mask in (present, ~present))
    ):
        return True
    is_name = not is_number or bool((column[present] % 1 == 0).all())
    return is_name and _are_pure(column[present], target[present])


def _are_of_one_class(some: np.ndarray, target: np.ndarray) -> bool:
    """Return whether some rows are of one class, and as many drawn at random hardly would be."""
    share = (target == some[:1]).mean() if len(some) else 1.0
    return bool((some == some[:1]).all() and len(some) * np.log(share) < np.log(_LEAST_CHANCE))


def _are_pure(names: pd.Series, target: np.ndarray) -> bool:
    """Return whether rows of a name are of one class, and rows of classes drawn at random hardly would be."""
    groups = pd.Series(target).groupby(names.to_numpy())
    if not len(target) or not (groups.nunique() == 1).all():
        return False
    shares = np.unique(target, return_counts=True)[1] / len(target)
    by_chance = np.log((shares[:, None] ** groups.size().to_numpy()).sum(0)).sum()
    return bool(by_chance < np.log(_LEAST_CHANCE))


def _are_apart(numbers: np.ndarray, target: np.ndarray) -> bool:
    """Return whether as many thresholds on a number as classes separate these, and numbers in any order hardly would.

    One class may thus have the numbers below and above the others, as an interval has it.
    """
    counts = np.unique(target, return_counts=True)[1]
    in_order = np.lexsort([target, numbers])
    ends = np.flatnonzero(np.diff(target[in_order]))
    if not 0 < len(ends) <= len(counts) or (numbers[in_order[ends]] == numbers[in_order[ends + 1]]).any():
        return False
    # a bound: which class each stretch is of, and where those end that the numbers of rows do not fix
    free = len(ends) + 1 - len(counts)
    stretches = math.log(len(counts)) + len(ends) * math.log(len(counts) - 1) + free * math.log(len(target))
    by_chance = stretches + sum(map(math.lgamma, counts + 1)) - math.lgamma(len(target) + 1)
    return by_chance < math.log(_LEAST_CHANCE)


def doubts_of_groups(
    columns: pd.DataFrame, features: pd.DataFrame, target: np.ndarray, path: str | Path
) -> Iterator[str]:
    """Yield a warning of columns that are no features, of which rows of equal values have one class, as of a person.

    Args:
        columns: these columns, of all rows.
        features: the others, of all rows.
        target: their classes, -100 where one is unknown.
        path: the file, for messages.
    """
    known = _different(features, target) & (target != -100)
    columns, target = columns[known], target[known]
    if found := [name for name in columns if _repeats(columns[name]) and _tells_class(columns[name], target)]:
        yield (
            f"columns of {path} that are no features, of which rows of equal values are of one class: "
            f"{listed(found, 5)}. If these rows are of one person or thing, name the column as group: else the "
            "model is tested on persons or things that it has trained on"
        )


def doubts_of_equal(
    digests: np.ndarray, train: np.ndarray, held_out: np.ndarray, kind: str, path: str | Path, parts: str
) -> Iterator[str]:
    """Yield a warning if 5 % of the samples ``held_out``, and five or more, have digests of training samples.

    Where half of the training samples are equal to others, samples are equal by design, and nothing is told.

    Args:
        digests: of all samples.
        train: samples that train.
        held_out: those that validate and test.
        kind: what they are, such as ``graphs``, for the message.
        path: the file.
        parts: what equal ones are equal in.
    """
    trained = digests[train]
    count = int(np.isin(digests[held_out], trained).sum())
    if count < max(_FEWEST_COPIES, _SMALLEST_SHARE * len(held_out)) or 2 * len(np.unique(trained)) < len(trained):
        return
    yield (
        f"{count} of the {len(held_out)} {kind} of {path} that validate and test ({count / len(held_out):.0%}) are "
        f"copies of training {kind}, equal in {parts}, so that metrics are in part those of {kind} that the model has "
        f"trained on. Unless they are separate samples, remove repeated {kind} from the file"
    )


def _is_key(column: pd.Series) -> bool:
    """Return whether no two rows share a value, and these are texts or whole numbers."""
    if not column.is_unique:
        return False
    return column.dtype != np.float64 or bool((column.dropna() % 1 == 0).all())


def _different(features: pd.DataFrame, target: np.ndarray) -> np.ndarray:
    """Return which rows are no copies of one before, which agree in all columns for no other reason."""
    return ~features.assign(**{"": target}).duplicated().to_numpy()


def _repeats(column: pd.Series) -> bool:
    """Return whether there are many values, of several rows each, as those of persons and machines."""
    return len(column) > _FEWEST_ROWS and _FEWEST_GROUPS < column.nunique() < 0.75 * len(column)
