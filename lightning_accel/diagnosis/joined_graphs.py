"""Time that graph breaks take: a compiled call beside the same graphs, joined and compiled as one."""

import time
from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_accel._private.torch import compiled_original, tree_leaves

_BACKEND = "inductor"  # the default of torch.compile
_WARM_UP = 2  # pairs of calls, the first of which compiles
_LEAST = 5  # pairs of calls to time

Values = Sequence[Any]
Graph = Callable[..., Values]


class _GraphCall(NamedTuple):
    """Hold a graph of a call, with its inputs and outputs, which the next graphs or the caller take."""

    graph: Graph
    inputs: Values
    outputs: Values


class _Times(NamedTuple):
    """Hold the time of a call by the clock, and that of the processor in this thread, which runs the call."""

    clock_ms: float
    processor_ms: float


def breaks_ms(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], seconds: float) -> float | None:
    """Return how much longer a call of a compiled module and its backward pass take for the breaks of its graph.

    Args:
        module: the compiled module, which has been called before.
        args: arguments of the call.
        kwargs: its keyword arguments.
        seconds: how long to time calls; the graphs are compiled before.

    Returns:
        Milliseconds, 0 without breaks; None where the graphs cannot be joined, since operations between them take part
        in the gradient, or cannot be compiled as one.
    """
    calls, output = _graph_calls(module, args, kwargs)
    if len(calls) < 2:
        return 0.0
    joined = _joined(calls, [each for each in tree_leaves(output) if _has_gradient(each)])
    if joined is None:
        return None
    del calls, output  # and the activations that they hold
    whole, inputs = joined
    whole = torch.compile(whole, backend=_BACKEND, fullgraph=True)
    sources = [each for each in inputs if _has_gradient(each)]

    def as_it_is() -> list[Tensor]:
        return [each for each in tree_leaves(module(*args, **kwargs)) if _has_gradient(each)]

    try:
        return _difference_ms(as_it_is, lambda: whole(inputs), sources, seconds)
    except RuntimeError:  # of a backend, for what it compiles in pieces alone
        return None


def _graph_calls(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[_GraphCall], Any]:
    """Return the graphs that a call of a compiled module runs, in their order, and the output of the call."""
    calls: list[_GraphCall] = []

    def record(graph: Graph, _: Any) -> Graph:
        def run(*inputs: Any) -> Values:
            outputs = graph(*inputs)
            calls.append(_GraphCall(graph, inputs, outputs))
            return outputs

        return run

    plain = compiled_original(module) or module
    return calls, torch.compile(plain.forward, backend=record)(*args, **kwargs)


def _joined(
    calls: Sequence[_GraphCall], results: Sequence[Tensor]
) -> tuple[Callable[[Values], list[Tensor]], list[Any]] | None:
    """Return a function that calls graphs in turn and returns ``results``, and its inputs; None if it cannot."""
    inputs: list[Any] = []
    places: dict[int, tuple[int, int]] = {}  # by identity: which list, the inputs' being the first, and where in it
    plan: list[tuple[Graph, list[tuple[int, int]]]] = []
    for made, call in zip(count(1), calls, strict=False):
        for each in call.inputs:
            if id(each) not in places:
                if isinstance(each, Tensor) and each.grad_fn is not None:
                    return None  # an operation between graphs made it
                places[id(each)] = 0, len(inputs)
                inputs.append(each)
        plan.append((call.graph, [places[id(each)] for each in call.inputs]))
        places |= {id(each): (made, at) for at, each in enumerate(call.outputs) if isinstance(each, Tensor)}
    if any(id(each) not in places for each in results):
        return None
    returned = [places[id(each)] for each in results]

    def whole(inputs: Values) -> list[Tensor]:
        values = [inputs]
        for graph, taken in plan:
            values.append(graph(*[values[one][at] for one, at in taken]))
        return [values[one][at] for one, at in returned]

    return whole, inputs


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _difference_ms(
    slow: Callable[[], list[Tensor]], fast: Callable[[], list[Tensor]], sources: Sequence[Tensor], seconds: float
) -> float:
    """Return how much longer ``slow`` takes with its backward pass than ``fast``.

    Both are timed in turns. On a CPU, other processes make the time by the clock vary by more than the difference, but
    not that of the processor: its difference counts, as much longer as all calls took by the clock.
    """
    times: dict[bool, list[_Times]] = {True: [], False: []}
    begin = 0.0
    while len(times[True]) < _WARM_UP + _LEAST or time.monotonic() - begin < seconds:
        is_slow_first = len(times[True]) % 2 == 0
        for is_slow in (is_slow_first, not is_slow_first):
            times[is_slow].append(_timed(slow if is_slow else fast, sources))
        if len(times[True]) == _WARM_UP:
            begin = time.monotonic()
    pairs = list(zip(times[True][_WARM_UP:], times[False][_WARM_UP:], strict=True))
    if any(each.device.type == "cuda" for each in sources):
        return median(one.clock_ms - other.clock_ms for one, other in pairs)
    stretch = sum(each.clock_ms for pair in pairs for each in pair) / sum(
        each.processor_ms for pair in pairs for each in pair
    )
    return median(one.processor_ms - other.processor_ms for one, other in pairs) * stretch


def _timed(call: Callable[[], list[Tensor]], sources: Sequence[Tensor]) -> _Times:
    begin, of_thread = time.perf_counter(), time.thread_time()
    results = call()
    if results and sources:
        torch.autograd.grad(results, sources, [torch.ones_like(each) for each in results], allow_unused=True)
    if any(each.device.type == "cuda" for each in (*results, *sources)):
        torch.cuda.synchronize()
    return _Times(1000 * (time.perf_counter() - begin), 1000 * (time.thread_time() - of_thread))
