"""Arguments that are one name or several."""

from collections.abc import Iterable
from typing import TypeVar

Name = TypeVar("Name")


def list_of_names(names: Iterable[Name]) -> list[Name]:
    """Return a list of names or classes; a single string or class becomes a list of one.

    >>> list_of_names("head"), list_of_names(("head", "gate"))
    (['head'], ['head', 'gate'])
    """
    if isinstance(names, str | type):
        return [names]  # type: ignore[list-item]  # a string is an iterable of strings, too
    return list(names)
