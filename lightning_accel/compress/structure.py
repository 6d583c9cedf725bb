"""Calls and what they return as tensors with names, so that a file that knows no class of the user's can hold them."""

import dataclasses
import inspect
from collections import namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, str)


def bind(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one call by the names that ``function`` has for them, in its order."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    return dict(bound.arguments)


def in_order(function: Any, call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call, with keyword arguments in the order in which ``function`` has them."""
    args, kwargs = call
    order = list(inspect.signature(function).parameters)
    return args, dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def named_tensors(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Tensors in ``value`` by their place: ``x``, ``batch.lengths``, ``states.0``.

    Raises:
        TypeError: if it holds something else than tensors, plain values, and tuples, lists, dicts, NamedTuples and
            dataclasses of them.

    >>> list(named_tensors({"a": torch.ones(1), "b": [torch.ones(1), None]}))
    ['a', 'b.0']
    """
    if isinstance(value, torch.Tensor):
        return {name or "output": value}
    if isinstance(value, _PLAIN):
        return {}
    parts = _parts(value)
    if parts is None:
        raise TypeError(
            f"{name or 'the output'} is a {type(value).__name__}; a file takes and gives tensors, and tuples, lists, "
            "dicts, NamedTuples and dataclasses of them. Export a module whose forward takes the tensors that are in it"
        )
    return {
        path: tensor
        for key, part in parts.items()
        for path, tensor in named_tensors(part, f"{name}.{key}" if name else key).items()
    }


def describe(value: Any, name: str = "", kept: set[str] | None = None) -> Any:
    """``value`` as JSON, with the names of its tensors in their places; None for those that are not ``kept``."""
    if isinstance(value, torch.Tensor):
        name = name or "output"
        return {"tensor": name} if kept is None or name in kept else {"plain": None}
    if isinstance(value, _PLAIN):
        return {"plain": value}
    parts = _parts(value) or {}
    inner = {key: describe(part, f"{name}.{key}" if name else key, kept) for key, part in parts.items()}
    if isinstance(value, dict):
        return {"dict": inner}
    if type(value) in (tuple, list):
        return {type(value).__name__: list(inner.values())}
    return {"fields": inner, "name": type(value).__name__}


def rebuild(description: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What :func:`describe` described; classes of the user's become NamedTuples of the same names."""
    ((kind, content), *_) = description.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "plain":
        return content
    if kind == "dict":
        return {key: rebuild(part, tensors) for key, part in content.items()}
    if kind == "fields":
        made = namedtuple(description["name"], list(content))  # type: ignore[misc]
        return made(*(rebuild(part, tensors) for part in content.values()))
    values = [rebuild(part, tensors) for part in content]
    return values if kind == "list" else tuple(values)


def restore(example: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """``example``, with its own classes, and ``tensors`` in the places of its tensors, in order."""
    if isinstance(example, torch.Tensor):
        return next(tensors)
    if isinstance(example, _PLAIN):
        return example
    parts = {key: restore(part, tensors) for key, part in (_parts(example) or {}).items()}
    if isinstance(example, dict):
        return dict(zip(example, parts.values(), strict=True))
    if type(example) in (tuple, list):
        return type(example)(parts.values())
    return type(example)(**parts)


def plain_values(value: Any, name: str = "") -> dict[str, Any]:
    """What in ``value`` is no tensor, by its place."""
    if isinstance(value, torch.Tensor):
        return {}
    if isinstance(value, _PLAIN):
        return {name: value}
    parts = _parts(value) or {}
    return {
        path: plain
        for key, part in parts.items()
        for path, plain in plain_values(part, f"{name}.{key}" if name else key).items()
    }


def _parts(value: Any) -> dict[str, Any] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if type(value) in (tuple, list):
        return {str(number): part for number, part in enumerate(value)}
    return {str(key): part for key, part in value.items()} if type(value) is dict else None
