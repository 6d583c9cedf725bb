"""Short texts of values of any size, for messages."""

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lightning_accel.ops.names import list_some

WITHOUT_TARGET = (
    ". Give the data of training as path, and data without a target as predict_path, on the command line "
    "--data.predict_path FILE"
)
_REPR = reprlib.Repr()
_REPR.maxlevel = 4
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = 12
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 60


def shown(value: Any, most: int = 60) -> str:
    """Return ``repr(value)`` in at most ``most`` characters, without formatting what is omitted.

    >>> shown("z" * 3_000_000, most=12)
    "'zzzzzzzz..."
    """
    text = _REPR.repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def listed(names: Sequence[object], most: int = 20) -> str:
    """Join the first ``most`` names by commas, each shortened to 60 characters, and count the others.

    >>> listed(["a", "b", "c"], most=2), listed(["no, never", "yes"])
    ('a, b and 1 more', "'no, never', yes")
    """
    return list_some([shown(name) if isinstance(name, str) and "," in name else cut(name) for name in names], most)


def told_classes(names: Sequence[str], train: np.ndarray | None = None, val: np.ndarray | None = None) -> str:
    """Join the number and names of classes, and the accuracy of always predicting the most frequent one.

    Args:
        names: the classes.
        train: classes of what trains, negative where one is unknown; None where they are not in memory.
        val: those of what validates, likewise.

    >>> told_classes(["no", "yes"], np.array([0, 0, 1]), np.array([0, 1]))
    '2 classes, no, yes (always no: accuracy 0.5 in validation)'
    """
    told = f"{len(names)} classes, {listed(names, 5)}"
    if train is None or val is None or not (val >= 0).any():
        return told
    most = int(np.bincount(train[train >= 0], minlength=1).argmax())
    share = (val[val >= 0] == most).mean()
    return f"{told} (always {listed([names[most]])}: accuracy {share:.3g} in validation)"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that ends a message about ``name``, with the most similar of the known names, or a full stop.

    >>> did_you_mean("targt", ["target", "x"]), did_you_mean("y", ["target", "x"])
    ("; did you mean 'target'?", '.')
    >>> did_you_mean("CRP", ["age", "crp"])
    "; did you mean 'crp'?"
    """
    in_lower_case = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), in_lower_case, n=1)
    return f"; did you mean {shown(in_lower_case[near[0]])}?" if near else "."


def lacking_column(name: str, columns: Sequence[str], is_target: bool = False, option: str = "") -> str:
    """Return what a message about a file says of a column that it lacks, and that an option names.

    >>> lacking_column("x,y", ["x", "y", "z"])
    "has no column 'x,y'; write several names as a list, '[x, y]'. Its columns: x, y, z"
    """
    hint = did_you_mean(name, columns)
    remedy = WITHOUT_TARGET if is_target and hint == "." else ""
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 1 and any(part in columns for part in parts):
        hint = f"; write several names as a list, '[{', '.join(parts)}]'."
    named = f", which {option} names" if option else ""
    return f"has no column {shown(name)}{named}{hint} Its columns: {listed(columns)}{remedy}"


def cut(name: object, most: int = 60) -> str:
    """Return ``str(name)``, for a text, number or error, in at most ``most`` characters."""
    text = str(name)
    return text if len(text) <= most else f"{text[: most - 3]}..."
