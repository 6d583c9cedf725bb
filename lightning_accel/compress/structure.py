"""Calls and what they return as tensors with names, so that a file that knows no class of the user's can hold them."""

import copy
import dataclasses
import inspect
from collections import namedtuple
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, str)


class Record(dict[str, Any]):
    """A dict whose values are attributes too, and are found by their place, as in the ``ModelOutput`` of transformers.

    Args:
        values: by name.
        fields: names that may be missing: as attributes they are None.

    >>> record = Record({"logits": 3}, fields=["loss", "logits"])
    >>> record.logits, record["logits"], record[0], record.loss
    (3, 3, 3, None)
    """

    def __init__(self, values: Mapping[str, Any], fields: Sequence[str] = ()) -> None:
        super().__init__(values)
        self._fields_known = tuple(fields)

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in self.__dict__.get("_fields_known", ()):
            return None
        raise AttributeError(f"no output {name!r}; there are: {', '.join(self)}")


def bind(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of one call by the names that ``function`` has for them, in its order.

    What ``**kwargs`` takes has its own names, and what ``*args`` takes is numbered.

    >>> bind(lambda x, *rest, **batch: None, (1, 2, 3), {"mask": 4})
    {'x': 1, 'rest_0': 2, 'rest_1': 3, 'mask': 4}
    """
    signature = inspect.signature(function)
    found: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            found |= {f"{name}_{number}": one for number, one in enumerate(value)}
        else:
            found[name] = value
    return found


def in_order(function: Any, call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call, with keyword arguments in the order in which ``function`` has them."""
    args, kwargs = call
    order = list(inspect.signature(function).parameters)
    return args, dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def named_tensors(value: Any, name: str = "", others: list[str] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors in ``value`` by their place: ``x``, ``batch.lengths``, ``states.0``.

    Args:
        value: tensors, plain values, and containers of them: tuples, lists, mappings, NamedTuples and dataclasses.
        name: of ``value``.
        others: takes the places of what is none of these, such as a cache of a language model.

    Raises:
        TypeError: if there is something else, and no list for it.

    >>> list(named_tensors({"a": torch.ones(1), "b": [torch.ones(1), None]}))
    ['a', 'b.0']
    """
    if isinstance(value, torch.Tensor):
        return {name or "output": value}
    if isinstance(value, _PLAIN):
        return {}
    parts = _parts(value)
    if parts is None:
        if others is None:
            raise TypeError(
                f"{name or 'the output'} is a {type(value).__name__}; a file takes and gives tensors, and tuples, "
                "lists, dicts, NamedTuples and dataclasses of them. Export a module whose forward takes the tensors "
                "that are in it"
            )
        others.append(name or "output")
        return {}
    return {
        path: tensor
        for key, part in parts.items()
        for path, tensor in named_tensors(part, f"{name}.{key}" if name else key, others).items()
    }


def describe(value: Any, name: str = "", kept: set[str] | None = None) -> Any:
    """Return ``value`` as JSON, with the names of its tensors in their places.

    None stands for tensors that are not ``kept``, and for what is neither tensor, plain value nor container.
    """
    if isinstance(value, torch.Tensor):
        name = name or "output"
        return {"tensor": name} if kept is None or name in kept else {"plain": None}
    if isinstance(value, _PLAIN):
        return {"plain": value}
    parts = _parts(value)
    if parts is None:
        return {"plain": None}
    inner = {key: describe(part, f"{name}.{key}" if name else key, kept) for key, part in parts.items()}
    if isinstance(value, Mapping):
        return {"dict": inner, "fields": _field_names(value)} if _has_attributes(value) else {"dict": inner}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return {"list" if isinstance(value, list) else "tuple": list(inner.values())}
    return {"fields": inner, "name": type(value).__name__}


def rebuild(description: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return what :func:`describe` described.

    Classes of the user's become NamedTuples of the same names, and a :class:`Record` where they are dicts whose values
    are attributes too.
    """
    ((kind, content), *_) = description.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "plain":
        return content
    if kind == "dict":
        values = {key: rebuild(part, tensors) for key, part in content.items()}
        if "fields" not in description:
            return values
        return Record({key: value for key, value in values.items() if value is not None}, description["fields"])
    if kind == "fields":
        made = namedtuple(description["name"], list(content))  # type: ignore[misc]
        return made(*(rebuild(part, tensors) for part in content.values()))
    listed = [rebuild(part, tensors) for part in content]
    return listed if kind == "list" else tuple(listed)


def restore(example: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return ``example``, with its own classes, and ``tensors`` in the places of its tensors, in order."""
    if isinstance(example, torch.Tensor):
        return next(tensors)
    parts = None if isinstance(example, _PLAIN) else _parts(example)
    if parts is None:
        return example
    values = {key: restore(part, tensors) for key, part in parts.items()}
    if type(example) is dict:
        return dict(zip(example, values.values(), strict=True))
    if isinstance(example, MutableMapping):
        made = copy.copy(example)
        for key, value in zip(list(example), values.values(), strict=True):
            made[key] = value
        return made
    if isinstance(example, Mapping):
        return type(example)(dict(zip(example, values.values(), strict=True)))  # type: ignore[call-arg]
    if isinstance(example, tuple | list) and not hasattr(example, "_fields"):
        return type(example)(values.values())
    return type(example)(**values)


def plain_values(value: Any, name: str = "") -> dict[str, Any]:
    """Return the plain values in ``value`` by their place."""
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
    """Return what a container holds by name; None of what is no container.

    A mapping is asked first: a ``ModelOutput`` of transformers is a dict of those of its fields that are set, and a
    dataclass of all of them.
    """
    if isinstance(value, Mapping):
        return {str(key): part for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list):
        return {str(number): part for number, part in enumerate(value)}
    return None


def _field_names(value: Mapping[Any, Any]) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return [str(key) for key in value]


def _has_attributes(value: Mapping[Any, Any]) -> bool:
    """Whether what is in a mapping is an attribute of it too."""
    return dataclasses.is_dataclass(value) or (
        type(value) is not dict and all(isinstance(key, str) and hasattr(value, key) for key in value)
    )
