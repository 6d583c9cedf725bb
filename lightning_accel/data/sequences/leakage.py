"""Doubts about sequences that are copies of training ones, and of values that tell the target on their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_accel.data.digest import digest_of
from lightning_accel.data.sequences.files import FileSequences
from lightning_accel.data.tables.leakage import doubts_of_answers, doubts_of_equal
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = import_on_use("pandas")

_DIFFERENT = "\0"  # name of a column of texts that tell which sequences are no copies
_MOST = 100_000  # sequences that are looked at
_FEWEST_TOKENS = 8  # sequences of fewer are equal by chance


def doubts_of_sequences(
    read: FileSequences, target: np.ndarray | None, train: np.ndarray, held_out: np.ndarray, path: Path
) -> Iterator[str]:
    """Yield warnings of copies, and of values that tell the target on their own.

    Copies are told as :func:`~lightning_accel.data.tables.leakage.doubts_of_equal` has it; values that all steps of a
    sequence share, and those of the first and last step if targets are classes, as
    :func:`~lightning_accel.data.tables.leakage.doubts_of_answers` does.

    Args:
        read: the sequences.
        target: the class or quantity of each, if it has one.
        train: sequences that train.
        held_out: those that validate and test.
        path: the file, for messages.
    """
    if len(read.lengths) > _MOST:
        return
    ends = read.lengths.cumsum()
    spans = [*zip(ends - read.lengths, ends, strict=True)]
    targets = np.zeros(len(spans)) if target is None else target
    fewest = _FEWEST_TOKENS if read.steps.ndim == 1 else 1
    digests = np.array(
        [
            digest_of(read.steps[a:b], np.array(y)) if b - a >= fewest else str(row)
            for row, ((a, b), y) in enumerate(zip(spans, targets, strict=True))
        ]
    )
    parts = "all steps" + (" and target" if target is not None else "")
    yield from doubts_of_equal(digests, train, held_out, "sequences", path, parts)
    if target is None or target.ndim > 1 or read.steps.ndim == 1:  # tokens
        return
    rows = [row for row in train if read.lengths[row]]
    is_quantity, remedy = target.dtype.kind == "f", "leave it out of the file"
    sides = {} if is_quantity else {"first": 0, "last": -1}  # the last value may well be near the next one
    of_row = [
        np.concatenate([_shared(steps), *(steps[place] for place in sides.values())])
        for steps in (read.steps[slice(*spans[row])].astype(np.float64) for row in rows)
    ]
    names = [*read.names, *(f"{name} of the {which} step" for which in sides for name in read.names)]
    table = pd.DataFrame(np.array(of_row).reshape(len(rows), -1), columns=pd.Index(names))
    all_steps = [name for name in read.names if not table[name].isna().any()]
    table = table.drop(columns=[f"{name} of the {which} step" for which in sides for name in all_steps])
    table[_DIFFERENT] = digests[rows]
    yield from doubts_of_answers(table, target[rows], path, is_quantity, remedy, missing_tells=False)


def _shared(steps: np.ndarray) -> np.ndarray:
    """Return the values (F,) that all steps share, NaN where they differ."""
    shared: np.ndarray = np.where((steps == steps[0]).all(0), steps[0], np.nan)
    return shared
