"""Operations that allocate their results, but do not compute them, so that a step of any model runs on any machine.

Memory that nobody writes to takes no room: the system maps a page when it is first touched. So tensors here are
torch's own, with storages of their true sizes, which strategies, optimizers and autograd handle as they always do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from lightning_accel._private.torch import (
    FakeTensor,
    TorchDispatchMode,
    arguments_of,
    is_functional_collective,
    number_read,
    returns_of,
    storage_id,
    tree_flatten,
    tree_map,
)
from lightning_accel.planning.live_memory import HOST, LiveMemory

_aten = torch.ops.aten
_NUMBER_READ = number_read()
_MAX_COMPUTED = 2**22  # elements of integers that are computed from random values
_MAX_MASK = 2**18  # and of masks
_FEW = 16  # elements that are read by the host, such as losses: these are set to one
# these may read from another device, by CUDA's rules
_BETWEEN_DEVICES = {"aten::copy_", "aten::_foreach_copy_", "aten::_to_copy", "aten::index.Tensor"}
_EMPTY = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default}
# these change only what a tensor says of its storage, or must see the values of indices
_METADATA = {
    _aten.lift_fresh.default,
    _aten.resize_.default,
    _aten.set_.source_Tensor,
    _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset,
}


class SimulatedTensors(TorchDispatchMode):
    """Let operations on floats allocate their results without computing them, and count memory and operations.

    Integers, such as token ids, lengths, edges and the choice of experts, are computed, since sizes and control flow
    depend on them; where they depend on floats, these are drawn at random. Floats that no parameter and no large or
    empty tensor has entered, such as those of a data pipeline, are computed, too.

    What meets tensors of the device in an operation is on the device itself; all else that is made while the memory's
    kind is ``HOST`` stays there, such as a dataset.

    Args:
        memory: is told of each storage.
        observe: called with each operation that reads or writes memory, its arguments (positional ones, those by name,
            and all tensors among them) and its result.
    """

    def __init__(self, memory: LiveMemory, observe: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self.memory = memory
        self._observe = observe
        self._kind: str | None = None  # of the results of the operation that runs
        self._known: dict[Any, tuple[Any, dict[int, int], list[Tensor]]] = {}

    def take(self, module: nn.Module) -> None:
        """Treat the parameters and buffers of a module as simulated, whatever made them."""
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point() and not tensor.is_meta:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                self.memory.add(local.untyped_storage(), simulated=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(one, FakeTensor) for one in types):
            return func(*args, **kwargs)  # DTensors look for the sizes of results with these
        if any(one.__torch_dispatch__ is not _PLAIN for one in types):
            return NotImplemented  # such as DTensors, whose operations on their local parts come here
        operation = _describe(func)
        leaves, _ = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if is_functional_collective(func) and func.name().endswith("::wait_tensor"):
            return args[0]
        is_meta = kwargs.get("device") == torch.device("meta") or any(tensor.is_meta for tensor in tensors)
        if operation.is_view or is_meta:
            return func(*args, **kwargs)
        is_dense = all(tensor.layout == torch.strided for tensor in tensors)
        self._kind = self._kind_of_results(func, tensors) if is_dense else None
        if is_dense and self._is_simulated(func, tensors, args, kwargs):
            result = self._simulate(func, operation, tensors, args, kwargs)
        else:
            result = func(*args, **kwargs)
            self._add(result)
        if func not in _EMPTY:
            self._observe(func, (args, kwargs, tensors), result)
        return result

    def _kind_of_results(self, func: Any, tensors: list[Tensor]) -> str | None:
        kinds = [self.memory.kind_of(tensor.untyped_storage()) if tensor.dim() else None for tensor in tensors]
        if all(kind in (None, HOST) for kind in kinds):
            return HOST if HOST in kinds else None
        if func.name() not in _BETWEEN_DEVICES:
            for tensor, kind in zip(tensors, kinds, strict=True):
                if tensor.dim() and kind in (None, HOST):
                    self.memory.add(tensor.untyped_storage(), kind="other")
        return "other" if self.memory.kind == HOST else None

    @contextmanager
    def read_by_host(self) -> Iterator[None]:
        """Let Python and NumPy read random numbers where tensors have no values."""
        as_array, as_list, generator = Tensor.numpy, Tensor.tolist, np.random.default_rng(0)

        def is_random(tensor: Tensor) -> bool:
            return (
                tensor.layout == torch.strided
                and tensor.is_floating_point()
                and _FEW < tensor.numel() <= _MAX_COMPUTED
                and self.memory.is_simulated(tensor.untyped_storage())
            )

        @wraps(as_array)
        def numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.dtype == torch.bfloat16 and self.memory.is_simulated(tensor.untyped_storage()):
                tensor = tensor.float()  # it stands for float16 where the run has 16-mixed
            found = as_array(tensor, *args, **kwargs)
            return generator.random(found.shape).astype(found.dtype) if is_random(tensor) else found

        @wraps(as_list)
        def tolist(tensor: Tensor) -> Any:
            return generator.random(tuple(tensor.shape)).tolist() if is_random(tensor) else as_list(tensor)

        with patch.object(Tensor, "numpy", numpy), patch.object(Tensor, "tolist", tolist):
            yield

    def _is_simulated(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> bool:
        if any(self.memory.is_simulated(tensor.untyped_storage()) for tensor in tensors):
            return True
        if tensors and func not in _EMPTY:
            return False
        try:
            made, _ = self._sizes(func, args, kwargs)
        except (RuntimeError, NotImplementedError):
            return False
        if not isinstance(made, Tensor):
            return False
        return made.numel() > _MAX_COMPUTED or (func in _EMPTY and made.is_floating_point())

    def _simulate(self, func: Any, operation: "_Operation", tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        if func is _NUMBER_READ:
            return func(*args) if args[0].dtype in _INTEGERS else 1.0
        for argument in operation.written:
            for tensor in _tensors_in(argument.of(args, kwargs)):
                if tensor.dtype not in _INTEGERS:
                    self.memory.add(tensor.untyped_storage(), simulated=True)
        if operation.returns_arguments:
            returned = [argument.of(args, kwargs) for argument in operation.returned if argument is not None]
            return returned[0] if len(returned) == 1 else tuple(returned) or None
        if func in (_aten.index.Tensor, _aten.masked_select.default):
            args = _with_positions(func, args)
            if func is _aten.masked_select.default:
                func = _aten.index.Tensor
        try:
            shapes, sources = self._sizes(func, args, kwargs)
        except (RuntimeError, NotImplementedError):  # sizes depend on values, or torch does not know the sizes
            shapes, sources = None, {}
        if any(one.layout != torch.strided for one in _tensors_in(shapes)):  # as gradients of sparse embeddings
            return func(*args, **kwargs)
        if shapes is None:
            computed = self._computed(func, args, kwargs)
            result = tree_map(lambda one: self._made(one, one, {}) if isinstance(one, Tensor) else one, computed)
        else:
            wanted = [one for one in tree_flatten(shapes)[0] if isinstance(one, Tensor) and one.dtype in _INTEGERS]
            values: Any = shapes
            if wanted and _is_computable(wanted, tensors):
                with suppress(NotImplementedError):  # for CUDA alone, whose integers are the state of a generator
                    values = self._computed(func, args, kwargs)
            flat, spec = tree_flatten(shapes)
            filled = tree_flatten(values)[0]
            result = spec.unflatten(
                [self._made(a, b, sources) if isinstance(a, Tensor) else a for a, b in zip(flat, filled, strict=True)]
            )
        return result

    def _sizes(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, dict[int, Tensor]]:
        """Return the results without storages, and of which arguments they are parts, by their storages' stand-ins.

        Blocks and micro-batches repeat themselves, so what is known is kept.
        """
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key: Any = func, spec, *((type(leaf), _size_of(leaf)) for leaf in leaves)
        try:
            known = self._known.get(key)
        except TypeError:  # such as a size that is a symbol
            known, key = None, None
        if known is None:
            stand_ins: list[Tensor] = []
            shapes = _on_meta(func, args, kwargs, stand_ins)
            known = shapes, {storage_id(one.untyped_storage()): at for at, one in enumerate(stand_ins)}, stand_ins
            if key is not None:
                self._known[key] = known
        return known[0], {number: tensors[at] for number, at in known[1].items()}

    def _made(self, shape: Tensor, value: Tensor, sources: dict[int, Tensor]) -> Tensor:
        """Return a tensor of the sizes of ``shape``, with the values of ``value`` where these are integers.

        It is a part of an argument if ``shape`` is one of the stand-in of that, whether the operation says so or not.
        """
        if (source := sources.get(storage_id(shape.untyped_storage()))) is not None:
            return source.as_strided(shape.shape, shape.stride(), source.storage_offset() + shape.storage_offset())
        if shape.dtype in _INTEGERS and not value.is_meta:
            made, simulated = value, False
        elif shape.dtype in _INTEGERS and shape.dtype != torch.bool:
            made, simulated = torch.zeros(shape.shape, dtype=shape.dtype), True
        else:
            made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
            simulated = True
            if made.numel() <= _FEW:
                made.fill_(1)
        self.memory.add(made.untyped_storage(), simulated, self._kind)
        return made

    def _add(self, result: Any) -> None:
        for tensor in _tensors_in(result):
            if tensor.layout == torch.strided:
                known = self.memory.kind_of(tensor.untyped_storage()) is not None
                self.memory.add(tensor.untyped_storage(), kind=None if known else self._kind)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of an operation on random floats where these have no values."""
        drawn: dict[int, Tensor] = {}  # a tensor is equal to itself, by which finite numbers are recognized

        def draw(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dtype in _INTEGERS:
                return value
            if not self.memory.is_simulated(value.untyped_storage()):
                return value
            if id(value) not in drawn:
                drawn[id(value)] = torch.rand(value.shape).to(value.dtype)
            return drawn[id(value)]

        return func(*tree_map(draw, args), **tree_map(draw, kwargs))


_PLAIN = Tensor.__torch_dispatch__
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


@dataclass(frozen=True)
class _Argument:
    position: int
    name: str

    def of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return args[self.position] if self.position < len(args) else kwargs.get(self.name)


@dataclass(frozen=True)
class _Operation:
    is_view: bool
    written: tuple[_Argument, ...]
    returned: tuple[_Argument | None, ...]  # for each result the argument that it is, None if it is new
    returns_arguments: bool  # or nothing


@cache
def _describe(func: Any) -> _Operation:
    written = {}
    for position, argument in enumerate(arguments_of(func)):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names = argument.alias_info.before_set or {argument.name}  # lists of tensors have no names there
            written.update(dict.fromkeys(names, _Argument(position, argument.name)))
    returned = tuple(
        next((written[name] for name in one.alias_info.before_set if name in written), None) if one.alias_info else None
        for one in returns_of(func)
    )
    wraps = is_functional_collective(func) and not any(one.name == "group_name" for one in arguments_of(func))
    is_view = wraps or func in _METADATA or torch.Tag.inplace_view in func.tags or func.is_view
    return _Operation(is_view, tuple(written.values()), returned, bool(written) and all(returned))


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _size_of(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _on_meta(func: Any, args: Any, kwargs: Any, stand_ins: list[Tensor] | None = None) -> Any:
    """Return the results of an operation without storages; ``stand_ins`` gets what stands for its tensors."""

    def as_meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            stand_in = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            if stand_ins is not None:
                stand_ins.append(stand_in)
            return stand_in
        if isinstance(value, torch.device):
            return torch.device("meta")
        return None if isinstance(value, torch.Generator) else value

    args, kwargs = tree_map(as_meta, args), tree_map(as_meta, kwargs)
    if any(one.name == "device" for one in arguments_of(func)):
        kwargs["device"] = torch.device("meta")
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return func(*args, **kwargs)


def _is_computable(wanted: list[Tensor], tensors: list[Tensor]) -> bool:
    size = max(one.numel() for one in [*wanted, *tensors])
    return size <= (_MAX_MASK if all(one.dtype == torch.bool for one in wanted) else _MAX_COMPUTED)


def _with_positions(func: Any, args: Any) -> Any:
    """Return the arguments of an index with positions in place of masks, whose values the result's size depends on."""
    tensor, indices = args[0], args[1]
    if func is _aten.masked_select.default:
        indices = [indices.expand(tensor.shape)] if indices.dim() <= tensor.dim() else [indices]
    found: list[Tensor | None] = []
    for index in indices:
        found += index.nonzero().unbind(1) if isinstance(index, Tensor) and index.dtype == torch.bool else [index]
    return tensor, found
