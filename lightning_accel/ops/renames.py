"""Renamed arguments: their old names work for one release, with a warning."""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from lightning_accel.ops.options import options_of

P = ParamSpec("P")
R = TypeVar("R")

DROPPED_IN = "0.2"  # the release without the old names


class _NoArguments:
    def __init__(self) -> None: ...


def renamed_arguments(**new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function or a constructor accept the old names of keyword arguments, ``old="new"``, with a FutureWarning.

    An argument that has become an option of a dataclass has a new name with a dot, ``old="argument.option"``. The
    signature shows the new names alone. Checkpoints with the old names load; as for functions that are not decorated,
    Lightning's ``load_from_checkpoint`` drops hyperparameters that are no arguments of the function.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        has_kwargs = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        owner = function.__qualname__.removesuffix(".__init__")

        def accept(kwargs: Mapping[str, Any]) -> dict[str, Any]:
            if kwargs.keys() <= parameters.keys():
                return dict(kwargs)
            if _is_loading_checkpoint():
                # Beside an old name, the new one has its default from a config parser, or the value of an override
                for old, new in new_names.items():
                    if old in kwargs and _has(kwargs, new):
                        is_unset = _as_list(_value(kwargs, new)) == _as_list(_value(defaults, new))
                        kwargs = _without(kwargs, new if is_unset else old)
                kwargs = rename(kwargs, new_names, owner, stacklevel=4)
                return {name: value for name, value in kwargs.items() if has_kwargs or name in parameters}
            return rename(kwargs, new_names, owner, stacklevel=4)

        wrapper: Callable[..., R]
        if function.__name__ == "__init__":

            def __init__(self: Any, *args: Any, **kwargs: Any) -> R:
                # save_hyperparameters walks up the frames of constructors, which it knows by their __class__
                __class__ = _NoArguments  # noqa: F841
                return cast(Callable[..., R], function)(self, *args, **accept(kwargs))

            wrapper = __init__
        else:

            def wrapper(*args: Any, **kwargs: Any) -> R:
                return cast(Callable[..., R], function)(*args, **accept(kwargs))

        functools.update_wrapper(wrapper, function)
        vars(wrapper)["new_names"] = new_names
        return cast(Callable[P, R], wrapper)

    return decorate


def new_names_of(target: Any) -> dict[str, str]:
    """Return the new names by the old names that a function, or a class and its bases, accept.

    >>> @renamed_arguments(width="dim")
    ... def make(dim: int): ...
    >>> new_names_of(make)
    {'width': 'dim'}
    """
    if not isinstance(target, type):
        return dict(getattr(target, "new_names", {}))
    own = inspect.signature(target).parameters
    found: dict[str, str] = {}
    for base in reversed(target.__mro__):
        found |= getattr(vars(base).get("__init__"), "new_names", {})
    return {old: new for old, new in found.items() if old not in own}


def rename(values: Mapping[str, Any], new_names: Mapping[str, str], owner: str, stacklevel: int = 2) -> dict[str, Any]:
    """Return ``values`` by their new names; warn of each that has an old name of ``owner``'s.

    Raises:
        TypeError: if a value has both names.

    >>> with warnings.catch_warnings(action="ignore"):
    ...     rename({"k": 2, "experts": {"dim": 8}}, {"k": "experts.k"}, "Model")
    {'experts': {'dim': 8, 'k': 2}}
    """
    renamed: dict[str, Any] = {}
    for name, value in values.items():
        new = new_names.get(name, name)
        group, _, option = new.partition(".")
        if new != name:
            if _has(values, new):
                raise TypeError(f"{owner} has {new} and {name}, its old name; leave {name} out")
            warn_of_old_name(name, new, owner, stacklevel + 1)
        if option:
            renamed[group] = options_of(renamed.get(group, values.get(group))) | {option: value}
        elif name not in renamed:  # else it is there, with an option that had an old name
            renamed[new] = value
    return renamed


def warn_of_old_name(old: str, new: str, owner: str, stacklevel: int = 2) -> None:
    """Warn that an argument of ``owner``'s is called ``new`` now."""
    warnings.warn(
        f"{owner}: {old} is now called {new}; the old name goes in lightning_accel {DROPPED_IN}",
        FutureWarning,
        stacklevel=stacklevel,
    )


def _has(values: Mapping[str, Any], name: str) -> bool:
    group, _, option = name.partition(".")
    return group in values and (not option or option in options_of(values[group]))


def _value(values: Mapping[str, Any], name: str) -> Any:
    group, _, option = name.partition(".")
    return options_of(values[group])[option] if option else values[group]


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    group, _, option = name.partition(".")
    remaining = {key: value for key, value in values.items() if key != group}
    if option:
        remaining[group] = {key: value for key, value in options_of(values[group]).items() if key != option}
    return remaining


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value  # a config parser makes lists of tuples


def _is_loading_checkpoint() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "lightning.pytorch.core.saving":
            return True
    return False
