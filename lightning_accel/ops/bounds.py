"""Kinds and bounds of options that are numbers, truth values or names of files."""

import os
from numbers import Integral, Real
from pathlib import Path

_LONGEST_NAME = 240  # bytes; file systems allow 255, of which suffixes and temporary names take some


def require_integers(least: int, **options: int | None) -> None:
    """Raise unless each option that is set is a whole number from ``least`` on.

    Raises:
        TypeError: if one is no whole number.
        ValueError: if one is below.
    """
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} must be a whole number; got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}")


def require_at_least(least: float, **options: float | None) -> None:
    """Raise unless each option that is set is a number from ``least`` on.

    Raises:
        TypeError: if one is no number.
        ValueError: if one is below, or nan.
    """
    for name, value in options.items():
        if value is not None and not _number(name, value) >= least:
            raise ValueError(f"{name} must be at least {least}; got {value}")


def require_above(bound: float, **options: float | None) -> None:
    """Raise unless each option that is set is a number above ``bound``.

    Raises:
        TypeError: if one is no number.
        ValueError: if one is not above, or nan.
    """
    for name, value in options.items():
        if value is not None and not _number(name, value) > bound:
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


def require_flags(**options: bool | None) -> None:
    """Raise a TypeError unless each option that is set is True or False."""
    for name, value in options.items():
        if not isinstance(value, bool | None):
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


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number; got {value!r}")
    return value
