"""Targets of tables: classes or quantities, and errors where one is taken for the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_accel.data.quoting import cut, listed, shown
from lightning_accel.data.tables.values import as_numbers, as_text, numbers_first, require_present
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")

TargetKind: TypeAlias = Literal["classification", "regression"]
A_QUANTITY = (  # ends the message of too many classes
    "TabularDataModule takes numbers for classes by default. To predict a quantity, set target_kind='regression' and "
    "take MoERegressor: --data.target_kind regression --model MoERegressor. For classes, name another column as "
    "target, or divide the quantity into classes, as pandas.cut does"
)
SET_REGRESSION = (
    "for a target that is a quantity, set layout.target_kind to regression, on the command line "
    "--data.layout.target_kind regression"
)
_MOST_NUMBERS = 20  # different numbers that may be classes whatever they are


def read_classes(
    column: pd.Series, path: Path, quantity: str = A_QUANTITY, num_unknown: int = 0
) -> tuple[np.ndarray, list[str]]:
    """Return the class of each row, (rows,) int64, and the sorted class names.

    ``quantity`` ends a message about numbers that are no classes, and ``num_unknown`` counts rows without a class.
    """
    require_present(column, path, "Remove those rows, or predict them with predict_path")
    where = f"the target column {shown(column.name)} of {path}"
    text = as_text(column, path)
    _require_one_kind(column, text, where)
    classes = sorted(text.unique(), key=numbers_first)
    labels = pd.Categorical(text, categories=classes).codes
    if len(classes) < 2:
        raise ValueError(f"{where} holds one class only, {shown(classes[0])}; two or more are needed")
    counts = np.bincount(labels)
    require_no_quantity(classes, bool(counts.min() < 3), where, quantity)
    warn_of_similar_classes(classes, where)
    if counts.min() < 3:
        rarest = classes[int(counts.argmin())]
        uncounted = f"; {num_unknown} rows without a class do not count" if num_unknown else ""
        otherwise = f"; {quantity}" if _numbers_of(classes).notna().all() else ""
        raise ValueError(
            f"{where} holds {len(classes)} classes, of which {shown(rarest)} has {counts.min()} of the rows; each "
            f"needs 3, one for each split. Merge rare classes, or leave their rows out{uncounted}{otherwise}"
        )
    return labels.astype(np.int64), classes


def warn_of_similar_classes(classes: Sequence[str], where: str) -> None:
    """Warn of classes that differ in upper and lower case or in spaces at their ends alone."""
    alike = Counter(name.strip().casefold() for name in classes)
    if similar := [shown(name) for name in classes if alike[name.strip().casefold()] > 1]:
        rank_zero_warn(
            f"{where} holds classes that differ in upper and lower case or in spaces at their ends alone, and count as "
            f"different: {listed(similar, 10)}. Write them in one way"
        )


def read_quantity(column: pd.Series, path: Path) -> np.ndarray:
    """Return the target of each row, a number, (rows,) float64.

    Raises:
        ValueError: if one is missing, or no number, or all are equal.
    """
    require_present(column, path, "Remove those rows, or predict them with predict_path")
    has_digits = column.astype(str).str.contains(r"\d").any()
    remedy = "Name a column of numbers as target, or leave target_kind='regression' out, which is for quantities"
    numbers = as_numbers(column, path, None if has_digits else remedy).to_numpy()
    if (numbers == numbers[0]).all():
        raise ValueError(
            f"the target column {shown(column.name)} of {path} holds one number only, {numbers[0]:g}; two or more are "
            "needed"
        )
    return numbers


def require_no_quantity(classes: Sequence[str], are_rare: bool, where: str, quantity: str) -> None:
    """Raise a ValueError, which ends in ``quantity``, if the classes are numbers that look like quantities.

    Numbers with fractions do if there are more than 20 of them or they ``are_rare``, whole numbers if both is true.
    """
    numbers = _numbers_of(classes)
    signs = len(classes) > _MOST_NUMBERS, are_rare, bool((numbers % 1 != 0).any())
    if numbers.notna().all() and sum(signs) > 1:
        raise ValueError(f"{where} holds {len(classes):,} different numbers, {listed(classes, 3)}; {quantity}")


def _numbers_of(classes: Sequence[str]) -> pd.Series:
    return pd.to_numeric(pd.Series(list(classes), dtype=object), errors="coerce")


def read_known_classes(column: pd.Series, path: Path, quantity: str) -> tuple[np.ndarray, list[str]]:
    """Return the class of each row, -100 where it is missing, and the class names, as :func:`read_classes` does."""
    known = column.notna().to_numpy()
    if not known.any():
        raise ValueError(f"the target {column.name!r} of {path} holds no label")
    numbers, classes = read_classes(column[known], path, quantity, int((~known).sum()))
    labels = np.full(len(column), -100, dtype=np.int64)  # ignored by torch.nn.functional.cross_entropy
    labels[known] = numbers
    return labels, classes


def _require_one_kind(column: pd.Series, text: pd.Series, where: str) -> None:
    """Raise a ValueError if a number and a text look alike, as 1 and "1" do in JSON."""
    if column.dtype != object:
        return
    as_text = {name for name, value in zip(text, column, strict=True) if isinstance(value, str)}
    as_other = {name for name, value in zip(text, column, strict=True) if not isinstance(value, str)}
    if both := sorted(as_text & as_other):
        raise ValueError(f"{where} holds {cut(both[0])} as a number and as a text; write it in one way")
