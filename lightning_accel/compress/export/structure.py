"""Named tensors of nested inputs and outputs, so that a file can describe them without the user's classes."""

import copy
import dataclasses
import inspect
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_accel.compress.calls import Inputs

_PLAIN = (type(None), bool, int, float, str)


class Record(dict[str, Any]):
    """Hold values that are also attributes and indexed by position, as in the ``ModelOutput`` of transformers.

    Args:
        values: values by name.
        fields: names that may be missing; as attributes they are None.

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


class Structure(NamedTuple):
    """Hold the containers and plain values of a call and of its output, without their tensors."""

    inputs: Inputs
    output: Any

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module, inputs: Inputs) -> "Structure":
        """Return the structure of a call, which is made."""
        args, kwargs = inputs
        nothing = torch.empty(0)
        return cls(*(restore(value, repeat(nothing)) for value in (inputs, module(*args, **kwargs))))

    def tensors_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """Return the tensors of a call, whose keywords may be in another order.

        Raises:
            ValueError: if the call has other plain values.
        """
        values = [*args, *(kwargs[name] for name in self.inputs[1])]
        if all(isinstance(one, torch.Tensor) for one in values):  # the usual call, faster by microseconds
            return values
        example = [*self.inputs[0], *self.inputs[1].values()]
        if changing := changing_values([{"arguments": example}, {"arguments": values}]):
            raise ValueError(f"this form holds plain values of its calls as constants: {describe_changing(changing)}")
        return tensors_of(values)

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output, in its classes, from its tensors."""
        return tensors[0] if isinstance(self.output, torch.Tensor) else restore(self.output, iter(tensors))


class Flat(nn.Module):
    """Call a module with the tensors of a call as separate arguments, and return those of its output as a tuple."""

    def __init__(self, module: nn.Module, structure: Structure) -> None:
        super().__init__()
        self.module = module
        self.structure = structure

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = restore(self.structure.inputs, iter(tensors))
        return tuple(tensors_of(self.module(*args, **kwargs)))


class Unflat(nn.Module):
    """Call a function like :class:`Flat` with the arguments of the module, and return outputs in its classes."""

    def __init__(self, run: Callable[..., Sequence[torch.Tensor]], structure: Structure) -> None:
        super().__init__()
        self.run = run
        self.structure = structure

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.structure.rebuild(tensors_of(self.run(*self.structure.tensors_of(args, kwargs))))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested containers, in order."""
    return [leaf for _, leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]


def bind(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the parameters of ``function``, in their order.

    Arguments of ``**kwargs`` have their own names, those of ``*args`` are numbered.

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


def is_needed(function: Any, name: str, value: Any) -> bool:
    """Return whether a call that leaves the argument ``name`` out is another one than with this ``value``.

    Without numbers this is so of arguments without a default alone: files name the tensors that they take, and flags
    of what to return have defaults in files.

    >>> is_needed(lambda x, power=2: None, "power", 2), is_needed(lambda x, power=2: None, "power", 3)
    (False, True)
    """
    parameter = inspect.signature(function).parameters.get(name)
    if parameter is not None and parameter.default is inspect.Parameter.empty:
        return True
    return bool(_numbers_of({name: value})) and (parameter is None or parameter.default != value)


def numbers_of_call(function: Any, call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> dict[str, int | float]:
    """Return the Python numbers of a call that ``function`` requires, or has other defaults of, by name.

    >>> numbers_of_call(lambda x, num_graphs, power=2, norm=1: None, ((torch.ones(2), 3), {"power": 4, "norm": 1}))
    {'num_graphs': 3, 'power': 4}
    """
    arguments = {name: value for name, value in bind(function, *call).items() if is_needed(function, name, value)}
    return _numbers_of(arguments)


def _numbers_of(value: Any) -> dict[str, int | float]:
    plain = plain_values(value).items()
    return {path: leaf for path, leaf in plain if isinstance(leaf, int | float) and not isinstance(leaf, bool)}


def sort_keywords(
    function: Any, call: tuple[tuple[Any, ...], Mapping[str, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``call`` with its keyword arguments sorted in the order of the parameters of ``function``."""
    args, kwargs = call
    order = list(inspect.signature(function).parameters)
    return args, dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def named_tensors(value: Any, name: str = "", others: list[str] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors in ``value`` by their path: ``x``, ``batch.lengths``, ``states.0``.

    Args:
        value: tensors, plain values, and containers of them: tuples, lists, mappings, NamedTuples and dataclasses.
        name: path of ``value`` itself.
        others: list to append the paths of other objects to, such as a cache of a language model.

    Raises:
        TypeError: if there are other objects, and no list for them.

    >>> list(named_tensors({"a": torch.ones(1), "b": [torch.ones(1), None]}))
    ['a', 'b.0']
    """
    found: dict[str, torch.Tensor] = {}
    for path, leaf in _leaves(value, name):
        if isinstance(leaf, torch.Tensor):
            found[path or "output"] = leaf
        elif not isinstance(leaf, _PLAIN):
            if others is None:
                raise TypeError(
                    f"{path or 'the output'} is a {type(leaf).__name__}; a file takes and gives tensors, and tuples, "
                    "lists, dicts, NamedTuples and dataclasses of them. Call it with tensors, such as "
                    "torch.from_numpy(x), or export a module whose forward takes the tensors that are in it"
                )
            others.append(path or "output")
    return found


def describe(value: Any, name: str = "", kept: set[str] | None = None) -> Any:
    """Describe ``value`` as JSON, with the paths of its tensors in place of them.

    None replaces tensors whose path is not in ``kept``, and objects that are neither tensor, plain value nor container.
    """
    if isinstance(value, torch.Tensor):
        name = name or "output"
        return {"tensor": name} if kept is None or name in kept else {"plain": None}
    if isinstance(value, _PLAIN):
        return {"plain": value}
    parts = _children(value)
    if parts is None:
        return {"plain": None}
    inner = {key: describe(part, f"{name}.{key}" if name else key, kept) for key, part in parts.items()}
    if isinstance(value, Mapping):
        return {"dict": inner, "fields": _field_names(value)} if _has_attributes(value) else {"dict": inner}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return {"list" if isinstance(value, list) else "tuple": list(inner.values())}
    return {"fields": inner, "name": type(value).__name__}


def rebuild(description: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild the value of a description by :func:`describe`.

    Classes of the user become NamedTuples of the same name, or a :class:`Record` if they are dicts whose values are
    also attributes.
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
    """Return a copy of ``example``, of the same classes, with its tensors replaced by ``tensors``, in order."""
    if isinstance(example, torch.Tensor):
        return next(tensors)
    parts = None if isinstance(example, _PLAIN) else _children(example)
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


def plain_values(value: Any) -> dict[str, Any]:
    """Return the plain values in ``value`` by their path."""
    return {path: leaf for path, leaf in _leaves(value) if isinstance(leaf, _PLAIN)}


def changing_values(calls: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the plain values that calls, their arguments by name, differ in, by their path.

    >>> changing_values([{"x": torch.ones(2), "num_graphs": 2}, {"x": torch.ones(3), "num_graphs": 3}])
    {'num_graphs': [2, 3]}
    """
    found = [plain_values(call) for call in calls]
    return {
        path: values
        for path in dict.fromkeys(path for one in found for path in one)
        if len(set(values := [one.get(path) for one in found])) > 1
    }


def describe_changing(changing: Mapping[str, Sequence[Any]]) -> str:
    """Describe the values that calls differ in, as :func:`changing_values` returns them."""
    return ", ".join(f"{path} is {' and '.join(dict.fromkeys(map(repr, values)))}" for path, values in changing.items())


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is in nested containers, with its path."""
    parts = None if isinstance(value, (torch.Tensor, *_PLAIN)) else _children(value)
    if parts is None:
        yield name, value
        return
    for key, part in parts.items():
        yield from _leaves(part, f"{name}.{key}" if name else key)


def _children(value: Any) -> dict[str, Any] | None:
    """Return the items of a container by name, or None if ``value`` is no container.

    Mappings are tested first: a ``ModelOutput`` of transformers is a dict of the fields that are set, but a dataclass
    of all fields.
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
    """Return whether the items of a mapping are also its attributes."""
    return dataclasses.is_dataclass(value) or (
        type(value) is not dict and all(isinstance(key, str) and hasattr(value, key) for key in value)
    )
