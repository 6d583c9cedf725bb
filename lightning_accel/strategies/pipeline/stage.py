"""Execution of the module's own step for one micro-batch on one stage, with stand-ins for layers of other stages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_accel._private.torch import (
    TreeSpec,
    change_count,
    compiled_call,
    plain_call,
    set_compiled_call,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from lightning_accel.strategies.pipeline.chain import Chain
from lightning_accel.strategies.pipeline.message import TensorSpec, connect, pack, unpack
from lightning_accel.strategies.pipeline.random import RandomOpDetector

OutputIndex = tuple[int, int]  # number of the call of a layer, number of the tensor in its outputs


class AbsentTensor(NamedTuple):
    """Describe a tensor that is not sent on: it went into a later layer, and nothing else needs it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class SentTensor(NamedTuple):
    """Describe a tensor that is sent on."""

    consumed: bool  # it was the input of an earlier layer; report if it is used again


class Header(NamedTuple):
    """Describe everything about a message but its numbers."""

    calls: list[tuple[int, TreeSpec, list[Any]]]  # number of the layer; leaves: SentTensor, AbsentTensor, or a constant
    parts: list[TensorSpec]  # one for each SentTensor


class Message(NamedTuple):
    header: Header
    flat: list[Tensor]


class StandInTensor(Tensor):
    """Stand for an output of an earlier layer that went into the next one, when code between the layers uses it again.

    In the first run of a step it has its value, and its use is recorded in ``needed``. From then on unused outputs are
    not sent: they are empty stand-ins on the meta device, and using one is an error. Results computed from it between
    the layers are such objects, too, which count as used if they reach a layer of this stage, the loss or a metric.
    """

    plain: Tensor
    home: torch.device
    sources: frozenset[OutputIndex]
    needed: set[OutputIndex]

    @staticmethod
    def make(
        plain: Tensor, home: torch.device, sources: frozenset[OutputIndex], needed: set[OutputIndex]
    ) -> "StandInTensor":
        stand_in = plain.as_subclass(StandInTensor)
        stand_in.plain, stand_in.home, stand_in.sources, stand_in.needed = plain, home, sources, needed
        return stand_in

    def materialize(self) -> Tensor:
        """Return the value, and record that it is needed."""
        if self.plain.is_meta:
            raise RuntimeError(
                "the code between the layers of the pipeline needs an output of an earlier layer that it did not need "
                "in the first batch, so that it did not travel to this stage. Let a layer do what depends on it"
            )
        self.needed |= self.sources
        return self.plain

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        stand_ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandInTensor)]
        if func is Tensor.device.__get__:
            return stand_ins[0].home
        if func in _SHAPE_FUNCTIONS:
            return func(*_plain(args), **_plain(kwargs))
        if _changes_other_tensor(func, args, kwargs):
            return func(*materialize(args), **materialize(kwargs))
        with RandomOpDetector() as noted:
            if not any(stand_in.plain.is_meta for stand_in in stand_ins):
                result = func(*_plain(args), **_plain(kwargs))
            else:
                try:
                    with torch.no_grad():
                        result = func(*_on_meta(args), **_on_meta(kwargs))
                except (NotImplementedError, RuntimeError):
                    result = func(*materialize(args), **materialize(kwargs))  # explains why it cannot
        if noted.drawn:
            materialize(stand_ins)  # generators must advance as with its value, not as on the meta device
        leaves, spec = tree_flatten(result)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            materialize(stand_ins)
        sources = frozenset[OutputIndex]().union(*[stand_in.sources for stand_in in stand_ins])
        wrap = partial(StandInTensor.make, home=stand_ins[0].home, sources=sources, needed=stand_ins[0].needed)
        return tree_unflatten([wrap(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


_SHAPE_FUNCTIONS = {
    Tensor.size,
    Tensor.stride,
    Tensor.dim,
    Tensor.numel,
    Tensor.__len__,
    Tensor.is_floating_point,
    Tensor.is_complex,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "layout", "requires_grad", "is_leaf", "is_meta", "grad_fn")
    ),
}


def _plain(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.plain if isinstance(leaf, StandInTensor) else leaf, tree)


def _changes(leaf: Tensor) -> int:
    """Return how often a tensor was changed in place, which uses no value of a stand-in."""
    return change_count(leaf.plain if isinstance(leaf, StandInTensor) else leaf)


def _on_meta(tree: Any) -> Any:
    def move(leaf: Any) -> Any:
        leaf = leaf.plain if isinstance(leaf, StandInTensor) else leaf
        if isinstance(leaf, Tensor):
            return leaf.to("meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    return tree_map(move, tree)


def materialize(tree: Any) -> Any:
    """Replace every :class:`StandInTensor` in ``tree`` by its value."""
    return tree_map(lambda leaf: leaf.materialize() if isinstance(leaf, StandInTensor) else leaf, tree)


def to_cpu(tree: Any) -> Any:
    """Return ``tree`` with its tensors on the CPU, detached from the graph."""
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, tree)


def _changes_other_tensor(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a tensor other than a :class:`StandInTensor` is changed in place, such as a metric state."""
    name = getattr(func, "__name__", "")
    in_place = name in ("__setitem__", "set_") or name.startswith("__i") or (name[-1:] == "_" and name[-2:] != "__")
    in_place = in_place and name not in ("__index__", "__int__", "__invert__")
    target = args[0] if args and in_place else kwargs.get("out")
    return isinstance(target, Tensor) and not isinstance(target, StandInTensor)


class _LaterLayer(BaseException):  # not an Exception, which the user's own code may catch
    """Unwind a step whose next layer belongs to a later stage."""


class Call(NamedTuple):
    """Record one call of a layer, on this stage or an earlier one."""

    layer: int
    leaves: list[Any]
    spec: TreeSpec
    versions: list[int]


class StageRun:
    """Run one micro-batch on one stage.

    Args:
        chain: the layers.
        stage: number of this stage.
        needed: outputs that later stages need although they went into a layer; None to find out, and send all.
        received: message of the stage before.
        device: device on which messages are sent.
    """

    def __init__(
        self,
        chain: Chain,
        stage: int,
        needed: set[OutputIndex] | None,
        received: Message | None,
        device: torch.device,
    ) -> None:
        self.chain = chain
        self.stage = stage
        self.device = device
        self.needed_later = needed
        self.needed_here: set[OutputIndex] = set()
        self.calls: list[Call] = []
        self._replayed = 0
        self._index_of: dict[int, OutputIndex] = {}
        self._consumed: set[OutputIndex] = set()
        self._into_next: set[int] = set()
        self._anchor: Tensor | None = None
        if received is not None:
            self._unpack(received)
        self._num_received = len(self.calls)

    def run(self, step: Callable[[], Any]) -> Any:
        """Run ``step``; return its result on the last stage, and the :class:`Message` to the next stage on others.

        Raises:
            RuntimeError: if the step does not call the layers as the pipeline needs it.
        """
        with self._replace_layer_calls():
            try:
                result = step()
            except _LaterLayer:
                return self._message()
        if self.stage < self.chain.num_stages - 1:
            raise RuntimeError(
                f"the step ended on stage {self.stage} of {self.chain.num_stages} without calling any layer of a later "
                "stage. Let pipeline_layers() return layers that forward always calls, and training_step a loss for "
                "each batch: None leaves none out here"
            )
        return materialize(result)

    def connect(self, output: Tensor) -> Tensor:
        """Return ``output``, with a backward pass that reaches all that was received."""
        return connect(self._anchor, output)

    @contextmanager
    def _replace_layer_calls(self) -> Iterator[None]:
        # A patched forward would also run hooks for stand-ins, and would be traced if the layer is compiled
        before = [compiled_call(layer) for layer in self.chain.layers]
        for number, (layer, own) in enumerate(zip(self.chain.layers, before, strict=True)):
            set_compiled_call(layer, partial(self._call, number, own or plain_call(layer)))
        try:
            yield
        finally:
            for layer, own in zip(self.chain.layers, before, strict=True):
                set_compiled_call(layer, own)

    def _call(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stage = self.chain.stage_of[number]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if stage > self.stage:
            self._into_next = {id(leaf) for leaf in inputs}
            raise _LaterLayer
        self._consumed |= {self._index_of[id(leaf)] for leaf in inputs if id(leaf) in self._index_of}
        if stage < self.stage:
            return self._replay(number)
        outputs = forward(*materialize(args), **materialize(kwargs))
        self._record(number, *tree_flatten(outputs))
        return outputs

    def _replay(self, number: int) -> Any:
        if self._replayed == self._num_received or self.calls[self._replayed].layer != number:
            raise RuntimeError(
                f"layer {number} of the pipeline ({type(self.chain.layers[number]).__name__}) was called out of order, "
                "or again after a layer of a later stage. A pipeline runs through its layers once: no generation token "
                "by token, no second pass. Run such steps on one device, from the checkpoint"
            )
        call = self.calls[self._replayed]
        self._replayed += 1
        return tree_unflatten(call.leaves, call.spec)

    def _record(self, layer: int, leaves: list[Any], spec: TreeSpec) -> None:
        versions = [_changes(leaf) if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._index_of[id(leaf)] = len(self.calls), number
        self.calls.append(Call(layer, leaves, spec, versions))

    def _unpack(self, message: Message) -> None:
        self._anchor, tensors = unpack(message.header.parts, message.flat)
        coming = iter(tensors)
        for number, (layer, spec, slots) in enumerate(message.header.calls):
            leaves: list[Any] = []
            for at, slot in enumerate(slots):
                make = partial(StandInTensor.make, sources=frozenset([(number, at)]), needed=self.needed_here)
                if isinstance(slot, AbsentTensor):
                    stand_in = torch.empty(slot.shape, dtype=slot.dtype, device="meta")
                    leaves.append(make(stand_in, home=self.device))
                elif isinstance(slot, SentTensor):
                    tensor = next(coming)
                    is_stand_in = slot.consumed and self.needed_later is None
                    leaves.append(make(tensor, home=tensor.device) if is_stand_in else tensor)
                else:
                    leaves.append(slot)
                if isinstance(slot, SentTensor) and slot.consumed:
                    self._consumed.add((number, at))
            self._record(layer, leaves, spec)

    def _message(self) -> Message:
        calls, tensors = [], []
        for number, call in enumerate(self.calls):
            slots = []
            for at, (leaf, version) in enumerate(zip(call.leaves, call.versions, strict=True)):
                slot = self._slot((number, at), leaf)
                if isinstance(slot, SentTensor):
                    plain = leaf.plain if isinstance(leaf, StandInTensor) else leaf
                    if _changes(leaf) != version:
                        raise RuntimeError(
                            f"an output of layer {call.layer} of the pipeline was changed in place by the code between "
                            "the layers, which every later stage would do again. Write x = x + y in place of x += y"
                        )
                    tensors.append(plain)
                slots.append(slot)
            calls.append((call.layer, call.spec, slots))
        parts, flat = pack(tensors, self.device)
        flat[0] = self.connect(flat[0])
        return Message(Header(calls, parts), flat)

    def _slot(self, index: OutputIndex, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        consumed = index in self._consumed and id(leaf) not in self._into_next
        absent = isinstance(leaf, StandInTensor) and leaf.plain.is_meta
        if absent or (consumed and self.needed_later is not None and index not in self.needed_later):
            return AbsentTensor(tuple(leaf.shape), leaf.dtype)
        return SentTensor(consumed)
