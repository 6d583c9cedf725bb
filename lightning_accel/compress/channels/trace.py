"""Tracing of channels through the operations of a running module.

Each dimension of a tensor has an array of nodes, one for each of its indices, or None if no index can be removed.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_accel._private.torch import TorchDispatchMode, arguments_of, tree_leaves
from lightning_accel.ops.native import KERNELS

Labels = npt.NDArray[np.int64]
Dims = list[Labels | None]
Given = dict[str, Any]  # arguments of an operation, by name
Rule = Callable[["ChannelTrace", Given, Any], list[Dims | None]]  # returns the dimensions of each result
KERNEL = "size of a kernel"
MULTIPLE = 8  # rows of grouped products start at multiples of 16 bytes, in bfloat16 too
_HEADS = ("num_heads", "n_heads", "n_head", "heads", "nhead", "num_attention_heads", "num_key_value_heads")
_PARTS = ("split_size",)  # attributes with the size of parts that a layer's output is cut into
_IGNORED_OPERATIONS = {"_local_scalar_dense", "equal", "promote_types", "is_same_size", "sym_size", "prim::device"}


class ChannelTrace(TorchDispatchMode):
    """Follow channels through the operations of a module that runs under :meth:`watch`.

    Unknown operations pin the dimensions of their inputs, and so do those that depend on their size, such as a
    normalization over them: their indices are never removed.

    Args:
        module: module to run.
        find_rule: function that returns the rule of an operation, or None.
        exact: whether normalizations over channels keep them from removal.
    """

    def __init__(self, module: nn.Module, find_rule: Callable[[Any], Rule | None], exact: bool = True) -> None:
        super().__init__()
        self._rule_of = find_rule
        self.exact = exact
        self.normalized: list[Labels] = []  # nodes that are normalized over, without ``exact``
        self.nodes = _Nodes()
        self.own: dict[tuple[str, int], Labels] = {}  # nodes of parameters and buffers, by name and dimension
        self.contracted: list[Labels] = []  # nodes that a product sums over
        self.taken: list[Labels] = []  # those of them in parameters: the inputs of layers
        self.grouped: list[Labels] = []  # those with sizes that must be multiples of MULTIPLE
        self.splits: list[
            tuple[str, str, Labels]
        ] = []  # module, attribute with a number, one node of each that it counts
        self.repeated: set[int] = set()  # nodes of dimensions that were made by repetition
        self._dims = WeakTensorKeyDictionary()
        self._parameter_storages = {one.untyped_storage().data_ptr() for one in module.parameters()}
        self._module = module
        self._is_paused = False
        self.running: list[tuple[str, nn.Module]] = [("", module)]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.ndim:
                self._dims[tensor] = [self.nodes.make(size) for size in tensor.shape]
                self.own.update({(name, dim): nodes for dim, nodes in enumerate(self._dims[tensor])})

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Follow the operations in this context, where plain ones replace fused ones and gradients are disabled."""
        fast = torch.backends.mha.get_fastpath_enabled()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(KERNELS.switched_off())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # setting this flag, torch warns of one of another device
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
            for name, part in self._module.named_modules():
                stack.callback(part.register_forward_pre_hook(partial(self._enter, name), prepend=True).remove)
                stack.callback(part.register_forward_hook(self._leave, always_call=True).remove)
            stack.enter_context(self)
            stack.enter_context(_WholeAttention(self))
            yield

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.running.append((name, module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if self._is_paused else self._run(func, args, kwargs or {})

    def run_whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of torch's dispatcher and follow it as one, whatever operations it is made of."""
        self._is_paused = True
        try:
            return self._run(func, args, kwargs)
        finally:
            self._is_paused = False

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        arguments = arguments_of(func)
        given = {one.name: one.default_value for one in arguments if one.has_default_value()}
        given.update(zip([one.name for one in arguments], args, strict=False))
        given.update(kwargs)
        out = func(*args, **kwargs)
        name = operation_name(func).removeprefix("aten::")
        made = self._follow(name, func, given, out)
        if made is not None:
            for result, dims in zip(_as_list(out), made, strict=False):
                if isinstance(result, Tensor) and dims is not None:
                    self._dims[result] = dims
        return out

    def of(self, tensor: Tensor) -> Dims:
        found: Dims | None = self._dims.get(tensor)
        return [None] * tensor.ndim if found is None else found

    def pin(self, tensor: Any, reason: str) -> None:
        """Exclude all dimensions of the tensors in ``tensor`` from removal."""
        for one in tree_leaves(tensor):
            if isinstance(one, Tensor):
                self.pin_dims(self.of(one), reason)

    def pin_dims(self, dims: Dims, reason: str) -> None:
        for nodes in dims:
            if nodes is not None:
                self.nodes.pin(nodes, reason)

    def unite(self, first: Labels | None, second: Labels | None, reason: str) -> Labels | None:
        """Unite two dimensions of equal size; if one cannot be removed, neither can the other."""
        if first is None or second is None or len(first) != len(second):
            self.pin_dims([first, second], reason)
            return first if second is None else second
        self.nodes.unite(first, second)
        return first

    def contract(self, one: Tensor, first: Labels | None, other: Tensor, second: Labels | None) -> None:
        """Record that a product of two tensors sums over these dimensions, so that zeros in one add nothing."""
        self.unite(first, second, "what it is multiplied with has a fixed size")
        for tensor, nodes in ((one, first), (other, second)):
            if nodes is not None:
                self.contracted.append(nodes)
                if tensor.untyped_storage().data_ptr() in self._parameter_storages:
                    self.taken.append(nodes)

    def where(self) -> str:
        return self.running[-1][0] or type(self._module).__name__

    def split(self, flat: Labels, shape: tuple[int, ...]) -> Dims:
        """Return the labels of each of the dimensions ``shape`` that ``flat`` is viewed as; at most one has any."""
        full = flat.reshape(shape)
        roots = self.nodes.roots(full)
        long = [dim for dim, size in enumerate(shape) if size > 1]
        for dim in long:
            if (roots == np.take(roots, [0], axis=dim)).all() and len(long) > 1:
                continue
            rows = np.moveaxis(roots, dim, 0).reshape(shape[dim], -1)
            if (rows == rows[:, :1]).all():
                return self._labels_along(dim, full)
        if not long:
            return [flat if dim == 0 else None for dim in range(len(shape))]
        dim, attribute = self._dim_to_keep(shape, long)
        rows = np.moveaxis(full, dim, 0).reshape(shape[dim], -1)
        self.nodes.unite(rows[:, :1], rows)
        if attribute is not None:
            self.splits.append((*attribute, rows[:, 0]))
        return self._labels_along(dim, full)

    def count_part(self, nodes: Labels) -> None:
        """Note which attribute of the module that runs has the size of a part, ``nodes``, of a layer's output."""
        name, part = self.running[-1]
        self.splits += [(name, one, nodes) for one in _PARTS if vars(part).get(one) == len(nodes)]

    def _labels_along(self, dim: int, full: Labels) -> Dims:
        labels = np.moveaxis(full, dim, 0).reshape(full.shape[dim], -1)[:, 0]
        return [labels if other == dim else None for other in range(full.ndim)]

    def _dim_to_keep(self, shape: tuple[int, ...], long: list[int]) -> tuple[int, tuple[str, str] | None]:
        """Return the dimension of attention heads, if a running module has as many, else the outermost dimension."""
        for name, part in reversed(self.running):
            for dim in long:  # before attributes: the parts of a group may be as many as all heads
                for attribute in _HEADS:
                    if vars(part).get(attribute) == shape[dim]:
                        return dim, (name, attribute)
        return long[0], None

    def _follow(self, name: str, func: Any, given: Given, out: Any) -> list[Dims | None] | None:
        rule = self._rule_of(func)
        if rule is not None:
            try:
                made = rule(self, given, out)
                _require_fit(made, out)
                return made
            except Exception:  # a case that the rule does not cover: pin its inputs
                self.pin(given, f"{self.where()} runs {operation_name(func)} in a way that is not followed")
        elif name not in _IGNORED_OPERATIONS:
            self.pin(given, f"{self.where()} runs {operation_name(func)}, through which channels are not followed")
        if any(one.alias_info is not None and one.alias_info.is_write for one in arguments_of(func)):
            for one in tree_leaves(out):  # overwritten, so that its previous dimensions are void
                if isinstance(one, Tensor):
                    self._dims[one] = [None] * one.ndim
        return None


class _WholeAttention(TorchFunctionMode):
    """Let a trace see attention as one operation, also where torch computes it by products and a softmax."""

    def __init__(self, trace: ChannelTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._trace.run_whole(torch.ops.aten.scaled_dot_product_attention.default, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def operation_name(func: Any) -> str:
    """Return the name of an operation of torch's dispatcher without its overload: ``aten::add``."""
    name: str = func.name()
    return name.partition(".")[0]


def _as_list(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _require_fit(made: list[Dims | None], out: Any) -> None:
    """Raise a ValueError unless there is one node for each index of each dimension."""
    for result, dims in zip(_as_list(out), made, strict=False):
        if isinstance(result, Tensor) and dims is not None:
            for nodes, size in zip(dims, result.shape, strict=True):
                if nodes is not None and len(nodes) != size:
                    raise ValueError(f"{len(nodes)} nodes for {size} indices")


class _Nodes:
    """Track a node per index of each dimension of a tensor; unite (union-find) those that must be removed together."""

    def __init__(self) -> None:
        self._parent: Labels = np.zeros(0, dtype=np.int64)
        self._pins: list[tuple[Labels, str]] = []

    def make(self, count: int) -> Labels:
        first = len(self._parent)
        made = np.arange(first, first + count)
        self._parent = np.concatenate([self._parent, made])
        return made

    def roots(self, nodes: Labels) -> Labels:
        """Return the representative of the set of each of ``nodes``."""
        nodes = self._parent[nodes]
        while True:
            above = self._parent[nodes]
            if np.array_equal(above, nodes):
                return nodes
            nodes = above

    def unite(self, first: Labels, second: Labels) -> None:
        """Unite ``first[i]`` with ``second[i]``, for each i; the two broadcast."""
        first, second = (side.ravel() for side in np.broadcast_arrays(first, second))
        while True:
            one, other = self.roots(first), self.roots(second)
            differ = one != other
            if not differ.any():
                return
            one, other = one[differ], other[differ]
            self._parent[np.maximum(one, other)] = np.minimum(one, other)  # of several writes the last wins: repeat

    def pin(self, nodes: Labels, reason: str) -> None:
        """Exclude ``nodes`` from removal."""
        self._pins.append((nodes.ravel(), reason))

    def is_pinned(self, nodes: Labels) -> bool:
        pinned = np.unique(self.roots(np.concatenate([one for one, _ in self._pins] or [nodes[:0]])))
        return bool(np.isin(self.roots(nodes), pinned).all())

    def pinned(self) -> dict[int, str]:
        """Return the first reason of each pinned set, by its representative."""
        reasons: dict[int, str] = {}
        for nodes, reason in self._pins:
            for root in np.unique(self.roots(nodes)).tolist():
                reasons.setdefault(root, reason)
        return reasons
