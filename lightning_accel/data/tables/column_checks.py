"""Warnings of columns that are read as they stand, and mean something else to their author."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_accel.data.quoting import listed, shown

if TYPE_CHECKING:
    import pandas as pd

_FEWEST_ROWS = 20  # in fewer rows, such patterns are chance
_FEWEST_REPEATS = 0.01  # share of the rows


def warn_of_columns(features: pd.DataFrame, train: np.ndarray, path: Path) -> None:
    """Warn of columns that carry nothing in the rows that ``train``, count the rows, or hold a code for missing values.

    Args:
        features: numbers as float64, NaN where they are missing, and texts.
        train: rows that train.
        path: the file, for messages.
    """
    trains = features.iloc[train]
    if constant := [name for name in features if trains[name].nunique(dropna=False) == 1]:
        rank_zero_warn(
            f"columns of {path} that are empty or hold one value in all training rows: {listed(constant, 5)}. Models "
            "learn nothing from them; list them under exclude"
        )
    for name in features.columns.difference(constant, sort=False):
        numbers = features[name].to_numpy()
        if numbers.dtype != np.float64 or len(numbers) <= _FEWEST_ROWS:
            continue
        if _counts_rows(numbers) and len(features.columns) > 1 + len(constant):
            rank_zero_warn(
                f"column {shown(name)} of {path} holds the numbers {numbers.min():g} to {numbers.max():g}, each in one "
                "row. If they number the rows, list the column under exclude: a model could only learn them by heart"
            )
        elif (code := _far_value(numbers[~np.isnan(numbers)])) is not None:
            rank_zero_warn(
                f"column {shown(name)} of {path} holds {code:g} in {int((numbers == code).sum())} of {len(numbers)} "
                "rows, far from all its other numbers. If it stands for a missing value, set csv.missing, as by "
                f"--data.csv.missing={code:g}"
            )


def _counts_rows(numbers: np.ndarray) -> bool:
    """Return whether the numbers are consecutive whole numbers, each once, in any order."""
    if np.isnan(numbers).any() or numbers.max() - numbers.min() != len(numbers) - 1:
        return False
    return bool((np.sort(numbers) == numbers.min() + np.arange(len(numbers))).all())


def _far_value(numbers: np.ndarray) -> float | None:
    """Return a least or largest number that repeats, 10 interquartile ranges of the others away from all of them.

    >>> _far_value(np.array([-999.0, *range(20, 60), -999]))
    -999.0
    >>> _far_value(np.array([-999.0, *range(20, 60)]))  # an outlier
    """
    for extreme in (numbers.min(initial=np.inf), numbers.max(initial=-np.inf)):
        is_extreme = numbers == extreme
        if is_extreme.sum() < max(2, _FEWEST_REPEATS * len(numbers)) or is_extreme.all():
            continue
        others = numbers[~is_extreme]
        low, high = np.quantile(others, [0.25, 0.75])
        if high > low and np.abs(others - extreme).min() > 10 * (high - low):
            return float(extreme)
    return None
