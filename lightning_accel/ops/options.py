"""Options of one subject, held by a dataclass."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

Options = TypeVar("Options")


def read_options(kind: type[Options], options: Options | Mapping[str, Any]) -> Options:
    """Return ``options`` as an instance of the dataclass ``kind``, from one or from a mapping as checkpoints hold it.

    Raises:
        TypeError: if they are neither, or ``kind`` has no option so named.
    """
    if isinstance(options, kind):
        return options
    if not isinstance(options, Mapping):
        raise TypeError(f"need {kind.__name__}, or a mapping of its options; got {options!r}")
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # checked by its users' types
    if unknown := [name for name in options if name not in known]:
        raise TypeError(f"{kind.__name__} has no option {unknown[0]!r}; it has {', '.join(known)}")
    return kind(**options)


def options_of(group: Any) -> dict[str, Any]:
    """Return the options by name of a dataclass, a mapping or a parsed config; none if ``group`` is another value."""
    if isinstance(group, Mapping):
        return dict(group)
    if is_dataclass(group) and not isinstance(group, type):
        return {field.name: getattr(group, field.name) for field in fields(group)}
    return dict(vars(group)) if isinstance(group, Namespace) else {}
