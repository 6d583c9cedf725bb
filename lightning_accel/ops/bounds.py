"""Kinds and bounds of options that are numbers, truth values or paths."""

import os
from numbers import Integral, Real
from pathlib import Path
from typing import Any

_LONGEST_PART = 255  # bytes that file systems allow for a name
_LONGEST_NAME = 240  # of a file to write; suffixes and temporary names take some


def if_set(**options: Any) -> dict[str, Any]:
    """Return the options that are not None, for those that may be.

    >>> if_set(threads=None, num_workers=2)
    {'num_workers': 2}
    """
    return {name: value for name, value in options.items() if value is not None}


def require_integers(least: int, **options: int) -> None:
    """Raise unless each option is a whole number from ``least`` on.

    Raises:
        TypeError: if one is no whole number.
        ValueError: if one is below.
    """
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} must be a whole number; got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}")


def require_at_least(least: float, **options: float) -> None:
    """Raise unless each option is a number from ``least`` on.

    Raises:
        TypeError: if one is no number.
        ValueError: if one is below, or nan.
    """
    for name, value in options.items():
        if not _number(name, value) >= least:
            raise ValueError(f"{name} must be at least {least}; got {value}")


def require_above(bound: float, **options: float) -> None:
    """Raise unless each option is a number above ``bound``.

    Raises:
        TypeError: if one is no number.
        ValueError: if one is not above, or nan.
    """
    for name, value in options.items():
        if not _number(name, value) > bound:
            raise ValueError(f"{name} must be above {bound}; got {value}")


def require_share(**options: float) -> None:
    """Raise unless each option is a number in [0, 1).

    Raises:
        TypeError: if one is no number.
        ValueError: if one is outside, or nan.
    """
    for name, value in options.items():
        if not 0 <= _number(name, value) < 1:
            raise ValueError(f"{name} must lie in [0, 1); got {value}")


def require_flags(**options: bool) -> None:
    """Raise a TypeError unless each option is True or False."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False; got {value!r}")


def require_filename(name: str, value: str | os.PathLike[str], example: str) -> None:
    """Raise unless an option is the path of a file.

    Raises:
        TypeError: if it is no path.
        ValueError: if it is empty, a folder, or no name that file systems take.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be the path of a file, such as {example!r}; got {value!r}")
    last = Path(value).name
    if not last.strip() or "\0" in last or last == ".." or len(os.fsencode(last)) > _LONGEST_NAME:
        raise ValueError(f"{name} must be the path of a file, such as {example!r}; got {str(value)!r}")


def local_path(value: str | os.PathLike[str], option: str = "path") -> Path:
    """Return the path of a file or folder, with the home folder in the place of ``~``.

    Raises:
        TypeError: if ``option``, as the message calls it, is no path.
        ValueError: if it is empty, no name that file systems take, or in the home of a user whom there is not.
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{option} must be the path of a file or folder; got {value!r}")
    text = os.fspath(value)
    if not text.strip() or "\0" in text or any(len(os.fsencode(part)) > _LONGEST_PART for part in Path(text).parts):
        raise ValueError(
            f"{option} must be the path of a file or folder, with names of 1 to {_LONGEST_PART} bytes; "
            f"got {text[:80]!r}"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{option} must be the path of a file or folder; {text} is in the home folder of a user whom this machine "
            "does not know"
        ) from error


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number; got {value!r}")
    return value
