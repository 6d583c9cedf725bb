"""Short texts of values of any size, for messages."""

import reprlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

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

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(cut(name) for name in islice(names, most)) + rest


def cut(name: object, most: int = 60) -> str:
    """Return ``str(name)``, for a text, number or error, in at most ``most`` characters."""
    text = str(name)
    return text if len(text) <= most else f"{text[: most - 3]}..."
