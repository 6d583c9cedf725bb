"""Names that a user gives: one, or several."""

from collections.abc import Iterable
from typing import TypeVar

Name = TypeVar("Name")


def list_of_names(names: Iterable[Name]) -> list[Name]:
    """Return a list of names or classes, of which a text or a class alone is one, not something to iterate.

    >>> list_of_names("head"), list_of_names(("head", "gate"))
    (['head'], ['head', 'gate'])
    """
    if isinstance(names, str | type):
        return [names]  # type: ignore[list-item]  # a text is an iterable of texts, too
    return list(names)
