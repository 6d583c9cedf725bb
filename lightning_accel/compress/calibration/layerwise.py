"""Visits to the layers of a module in the order of their calls, each on calibration data that earlier ones have seen.

What a visit changes in a layer, the inputs of the next layers show. Memory is bounded by the outputs of one layer: the
layers before it are left out, where the module is a chain of them, in each call, and computed again, where it is not.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel._private.torch import TorchDispatchMode, tree_leaves, tree_map_only
from lightning_accel.compress.calls import Inputs, replaced_forward
from lightning_accel.ops.blocks import find_blocks

Visit = Callable[[nn.Module, Callable[[], None]], None]


class _ReachedError(BaseException):  # which no ``except Exception`` of a module may catch
    """End a call of the whole module after one of its layers."""


class _NoChainError(BaseException):
    """Say that the module uses outputs of a layer that was left out."""


def find_layers_of(
    module: nn.Module, owners: Sequence[nn.Module], inputs: Sequence[Inputs]
) -> dict[nn.Module, list[int]]:
    """Find the layers to visit, in the order of their first calls, so that each owner of weights lies in one.

    These are the repeated blocks of ``module`` (:func:`~lightning_accel.strategies.find_blocks`), and outside of them
    the innermost modules that are called.

    Args:
        module: any module.
        owners: submodules; those that are not called stand for the module around them.
        inputs: arguments of calls, of which those are made that show all owners.

    Returns:
        Layers, and the positions in ``owners`` of those in each. Owners that no call reaches are in none.
    """
    calls: list[nn.Module] = []
    called = set()

    def note(one: nn.Module, *_: Any) -> None:
        if one not in called:
            called.add(one)
            calls.append(one)

    with ExitStack() as stack:
        for one in module.modules():
            stack.callback(one.register_forward_pre_hook(note).remove)
        for call in inputs:
            _call(module, call)
            if called.issuperset(owners):
                break
    blocks = set(find_blocks(module)) & called
    layer_of: dict[nn.Module, nn.Module] = {}
    for path, one in module.named_modules(remove_duplicate=False):
        steps = path.split(".") if path else []
        around = [module.get_submodule(".".join(steps[:end])) for end in range(len(steps) + 1)]
        inside = [layer for layer in around if layer in called]
        if inside:
            layer_of.setdefault(one, next((layer for layer in around if layer in blocks), inside[-1]))
    found: dict[nn.Module, list[int]] = {}
    for number, owner in enumerate(owners):
        if owner in layer_of:
            found.setdefault(layer_of[owner], []).append(number)
    return {layer: found[layer] for layer in calls if layer in found}


@torch.no_grad()
def visit_layerwise(module: nn.Module, inputs: Sequence[Inputs], layers: Sequence[nn.Module], visit: Visit) -> None:
    """Call ``visit`` for each of ``layers``, with a function that runs the layer once on the data of all ``inputs``.

    Args:
        module: any module.
        inputs: arguments of its calls.
        layers: submodules in the order of their calls.
        visit: called with a layer and with a function that runs it, which may run more of the module, too. What is
            changed in the layer after that is in the inputs of the layers that follow. It is called again where that
            function finds that layers cannot be left out.
    """
    replay = _Replay(module, inputs, layers)
    for position, layer in enumerate(layers):
        if replay.is_chain and position:
            replay.is_chain = replay.agrees_at(position)
        try:
            visit(layer, partial(replay.run, position))
            if replay.is_chain and position + 1 < len(layers):
                replay.keep_outputs(position)
        except _NoChainError:
            replay.is_chain = False
            if not replay.has_run:
                visit(layer, partial(replay.run, position))


class _Replay:
    """Run a module up to one of its layers, with what is known of the outputs of the layers before."""

    def __init__(self, module: nn.Module, inputs: Sequence[Inputs], layers: Sequence[nn.Module]) -> None:
        self.module, self.inputs, self.layers = module, inputs, layers
        self.is_chain = self._is_each_called_once()
        self.has_run = False  # whether a layer has seen all inputs
        self._shapes: list[list[Any]] = []  # of each layer before the last one, for each call: outputs without values
        self._outputs: list[Any] = []  # of the last layer, for each call

    def _is_each_called_once(self) -> bool:
        counts = dict.fromkeys(self.layers, 0)

        def count(layer: nn.Module, *_: Any) -> None:
            counts[layer] += 1

        if any(one in counts for layer in self.layers for one in layer.modules() if one is not layer):
            return False
        with ExitStack() as stack:
            for layer in self.layers:
                stack.callback(layer.register_forward_pre_hook(count).remove)
            for calls, inputs in enumerate(self.inputs, 1):
                _call(self.module, inputs)
                if set(counts.values()) != {calls}:
                    return False
        return True

    def run(self, position: int) -> None:
        self.has_run = False
        for number in range(len(self.inputs)):
            self._run_to(position, number)
        self.has_run = True

    def agrees_at(self, position: int) -> bool:
        """Return whether the layer gets the same inputs if the layers before it are computed again."""
        met: list[list[Any]] = []

        def note(layer: nn.Module, args: Any, kwargs: Any) -> None:
            met.append(tree_leaves((args, kwargs)))

        with ExitStack() as stack:
            stack.callback(self.layers[position].register_forward_pre_hook(note, with_kwargs=True).remove)
            stack.enter_context(suppress(_NoChainError))
            self._run_to(position, 0)
            self._run_to(position, 0, from_start=True)
        return len(met) == 2 and len(met[0]) == len(met[1]) and all(map(_equal, *met))

    def keep_outputs(self, position: int) -> None:
        """Run the layer on all inputs, and keep its outputs in place of those of the layer before it."""
        shapes = [_without_values(one) for one in self._outputs]
        outputs = []
        for number in range(len(self.inputs)):
            outputs.append(self._run_to(position, number))
            if self._outputs:
                self._outputs[number] = None
        if shapes:
            self._shapes.append(shapes)
        self._outputs = outputs

    def _run_to(self, position: int, number: int, from_start: bool = False) -> Any:
        """Return the outputs of a layer in the given call of the module, in a tuple.

        Raises:
            _NoChainError: if outputs of layers before are used but by the next one, or a layer is not called.
        """
        if not self.is_chain:
            _call(self.module, self.inputs[number])
            return None
        layer, own = self.layers[position], self.layers[position].forward
        reached: list[Any] = []
        unknown: list[Any] = []
        if not from_start and position:
            unknown = [shapes[number] for shapes in self._shapes]
        detector = _UseDetector(unknown)

        def run_and_end(*args: Any, **kwargs: Any) -> Any:
            detector.is_in_layer = True
            reached.append(own(*args, **kwargs))
            raise _ReachedError

        with ExitStack() as stack:
            stack.enter_context(replaced_forward(layer, run_and_end))
            if not from_start and position:
                known = [*unknown, self._outputs[number]]
                for before, result in zip(self.layers[:position], known, strict=True):
                    stack.enter_context(replaced_forward(before, partial(_return_copy, result)))
                stack.enter_context(detector)
            stack.enter_context(suppress(_ReachedError))
            _call(self.module, self.inputs[number])
        if not reached:
            raise _NoChainError
        return (reached[0],)


class _UseDetector(TorchDispatchMode):
    """Raise an error when a layer, or the host, uses values that are computed from tensors without values."""

    def __init__(self, results: Sequence[Any]) -> None:
        super().__init__()
        self.is_in_layer = False
        self._unknown = [value for value in tree_leaves(results) if isinstance(value, Tensor)]  # kept: addresses recur
        self._addresses = {value.untyped_storage().data_ptr() for value in self._unknown}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_unknown = any(
            isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._addresses
            for value in tree_leaves((args, kwargs))
        )
        if is_unknown and self.is_in_layer:
            raise _NoChainError
        results = func(*args, **(kwargs or {}))
        if is_unknown:
            tensors = [value for value in tree_leaves(results) if isinstance(value, Tensor)]
            if not tensors:
                raise _NoChainError
            self._unknown += tensors
            self._addresses |= {value.untyped_storage().data_ptr() for value in tensors}
        return results


def _call(module: nn.Module, inputs: Inputs) -> None:
    args, kwargs = tree_map_only(Tensor, torch.clone, inputs)  # the module may change them in place
    module(*args, **kwargs)


def _return_copy(result: tuple[Any], *_: Any, **__: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, result[0])  # the module may change it in place


def _without_values(result: Any) -> Any:
    """Return outputs of the same shapes, without memory for their elements."""

    def empty(value: Tensor) -> Tensor:
        return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)

    return tree_map_only(Tensor, empty, result)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return isinstance(one, Tensor) == isinstance(other, Tensor)
