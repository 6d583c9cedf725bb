"""Bounds of options that are numbers."""

from numbers import Real


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


def _number(name: str, value: float) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number; got {value!r}")
    return value
