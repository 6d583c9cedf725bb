"""Splits of rows into those that train, validate and test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_accel.ops.extras import import_on_use

model_selection = import_on_use("sklearn.model_selection")


def split_rows(
    rows: np.ndarray, classes: np.ndarray | None, share: float, seed: int, path: Path, kind: str = "rows"
) -> tuple[np.ndarray, np.ndarray]:
    """Split ``rows`` in two, the second with ``share`` of them, stratified by the ``classes`` of all rows.

    Errors call them ``kind``.
    """
    try:
        kept, held_out = model_selection.train_test_split(
            rows, test_size=share, random_state=seed, stratify=None if classes is None else classes[rows]
        )
    except ValueError as error:
        raise ValueError(f"{path} has too few {kind} to split as asked: {error}") from error
    return kept, held_out


def split_groups(
    groups: np.ndarray, shares: tuple[float, float], seed: int, path: Path
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split rows into training, validation and test, so that rows of equal ``groups`` are in one of them.

    ``shares`` are those of the latter two among all groups.
    """
    rest, held_out = np.arange(len(groups)), []
    for share in (shares[1], shares[0] / (1 - shares[1])):
        splitter = model_selection.GroupShuffleSplit(1, test_size=share, random_state=seed)
        try:
            [(kept, taken)] = splitter.split(rest, groups=groups[rest])
        except ValueError as error:
            raise ValueError(f"{path} has too few groups to split as asked: {error}") from error
        held_out.append(rest[taken])
        rest = rest[kept]
    test, val = held_out
    return rest, val, test


def split_in_three(
    classes: np.ndarray | None, num_rows: int, shares: tuple[float, float], seed: int, path: Path, kind: str = "rows"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split rows into training, validation and test; ``shares`` are those of the latter two among all rows.

    Errors call them ``kind``.
    """
    val_share, test_share = shares
    rest, test = split_rows(np.arange(num_rows), classes, test_share, seed, path, kind)
    train, val = split_rows(rest, classes, val_share / (1 - test_share), seed, path, kind)
    return train, val, test
