"""Python calls, operations and backward nodes of a profiled batch, as the tree that torch.profiler records."""

import os
import re
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import profile

import lightning_accel
from lightning_accel._private.torch import event_tree

_NODE = "autograd::engine::evaluate_function: "
_REGION = "Torch-Compiled Region"
_GRAPH = "## Call CompiledFxGraph"
_OBJECT = re.compile(r" of .*| at 0x.*|_\d+$")  # which of a kind is called
_REPEATED = 8  # calls of one line from which it is a loop
_MOST_ADDED_NS = 1000.0  # more for each event is not the profiler's, which takes 300 to 600
_SMALL_NS = 10_000  # self time of an operation, below which dispatching it takes longer than its work


def _folders(*names: str) -> tuple[str, ...]:
    return tuple(os.path.join(os.path.realpath(sysconfig.get_path(name)), "") for name in names)


_STDLIB = _folders("stdlib", "platstdlib")
_GENERATED = os.path.join(os.path.realpath(tempfile.gettempdir()), "torch_geometric.")  # code that PyG writes
_NOT_THE_USERS = ("<", *_STDLIB, *_folders("scripts"), str(Path(lightning_accel.__file__).resolve().parent), _GENERATED)
_PACKAGES = re.compile(r"[\\/](?:site|dist)-packages[\\/]")  # also of other environments on the path; dist is Debian's
_TORCH = os.path.join(os.path.dirname(os.path.realpath(torch.__file__)), "")
_OWN = os.path.join(os.path.dirname(os.path.realpath(__file__)), "")


class Span(NamedTuple):
    """Hold the time of a stretch under the profiler in ns, and the number of events that were recorded in it."""

    ns: int = 0
    events: int = 0

    def plus(self, other: "Span") -> "Span":
        return Span(self.ns + other.ns, self.events + other.events)


class Loop(NamedTuple):
    """Hold a loop of small operations: its place, how often it runs in a batch, its operations and its two spans."""

    place: str
    times: int
    operations: int
    forward: Span
    backward: Span


class Tracing(NamedTuple):
    """Hold what the profiler adds to each event of the forward and of the backward pass, in ns."""

    forward_ns: float
    backward_ns: float

    def ms(self, forward: Span, backward: Span = Span()) -> float:  # noqa: B008  # a tuple
        """Return the time in ms that spans take without the profiler."""
        spent = max(forward.ns - self.forward_ns * forward.events, 0.0)
        return (spent + max(backward.ns - self.backward_ns * backward.events, 0.0)) / 1e6


class CallTree:
    """Read the tree of batches that a profile with stacks saw, and pick the one that was disturbed least.

    Attributes:
        roots: the events of all batches, outermost only.
        step: the shortest call of the user's ``training_step``; None if the profile has none.
        from_last: how many batches later the profile ended, 0 for the last.
        nodes: nodes of the backward pass of that batch, in their order.
    """

    def __init__(self, profiled: profile) -> None:
        self.roots: Sequence[Any] = event_tree(profiled)
        events = [each for root in self.roots for each in walk(root)]
        steps: list[Any] = [each for each in events if _function(each) == "training_step"]
        steps = [each for each in steps if is_users(each)] or steps  # the strategy has one of this name too
        inner = {each for step in steps for each in walk(step) if each is not step}  # super().training_step()
        steps = [each for each in steps if each not in inner]
        steps.sort(key=lambda each: each.start_time_ns)
        self.step: Any = min(steps, key=lambda each: each.duration_time_ns, default=None)
        self.from_last = len(steps) - 1 - steps.index(self.step) if steps else 0
        begin = self.step.start_time_ns if self.step else 0
        end = steps[-self.from_last].start_time_ns if self.from_last else float("inf")
        nodes = [each for each in events if each.name.startswith(_NODE) and begin <= each.start_time_ns < end]
        self.nodes = sorted(nodes, key=lambda node: node.start_time_ns)

    def tracing(self, profiled: dict[str, float], timed: dict[str, float]) -> Tracing:
        """Return what the profiler adds to an event: what it adds to a pass, by the number of events in that.

        Args:
            profiled: times of the parts of this batch in ms.
            timed: those of batches without the profiler.
        """
        forward = 0 if self.step is None else sum(1 for _ in _forward(self.step))
        backward = sum(_span(node).events for node in self.nodes)
        added = {part: 1e6 * max(profiled[part] - timed[part], 0.0) for part in ("forward", "backward")}
        each = min(added["forward"] / max(forward, 1), _MOST_ADDED_NS)
        # Python calls take longer to record than operations, so more than in the forward pass is chance
        return Tracing(each, min(added["backward"] / max(backward, 1), each))

    def modules(self, modules: Sequence[nn.Module]) -> Span:
        """Return the span of the calls of these modules in the forward pass."""
        wanted = {id(module) for module in modules}
        total = Span()
        for each in () if self.step is None else walk(self.step):
            module = getattr(each.extra_fields, "module", None)
            if module is not None and module.self_ptr in wanted:
                total = total.plus(_span(each))
        return total

    def compiled(self) -> tuple[int, Span, Span]:
        """Return the number of compiled regions that ran, and their spans in both passes without the kernels' time."""
        found = [] if self.step is None else list(walk(self.step))
        regions = [each for each in found if each.name.startswith(_REGION)]
        forward = backward = Span()
        for region in regions:
            if not any(outer.name.startswith(_REGION) for outer in callers(region)):  # the rest of a function is inside
                forward = forward.plus(_without_graphs(region))
        for node in self.nodes:
            if node.name.startswith(_NODE + "CompiledFunction"):
                backward = backward.plus(_without_graphs(node))
        return len(regions), forward, backward

    def loops(self) -> list[Loop]:
        """Return the outermost loops of the user's code whose time goes to small operations."""
        return [] if self.step is None else list(self._loops_in(self.step))

    def _loops_in(self, call: Any) -> Iterator[Loop]:
        """Yield loops of the function ``call``, or else of the functions that it calls."""
        children = [each for each in call.children if not each.name.startswith(_NODE)]
        done = 0
        if _function(call) and is_users(call):
            for first, last, line, times in _repeated(call, children):
                loop = self._loop(call, children[first : last + 1], children[last + 1 :], line, times)
                if loop is not None:
                    for each in children[done:first]:
                        yield from self._loops_in(each)
                    yield loop
                    done = last + 1
        for each in children[done:]:
            yield from self._loops_in(each)

    def _loop(self, call: Any, body: Sequence[Any], after: Sequence[Any], line: int, times: int) -> Loop | None:
        """Return the loop with this body, None if most of its time goes to operations that are not small."""
        whole = Span(body[-1].end_time_ns - body[0].start_time_ns, sum(_span(each).events for each in body))
        operations = [each for top in body for each in walk(top) if _is_operation(each)]
        small, large = _work_ns(operations)
        if large >= small:  # none of either is no loop of operations
            return None
        forward = Span(max(whole.ns - int(large), 0), whole.events)
        numbers = [each.extra_fields.sequence_number for each in operations]
        begin = min((number for number in numbers if number >= 0), default=0)
        later = (each for top in after for each in walk(top) if _is_operation(each))
        end = next((n for each in later if (n := each.extra_fields.sequence_number) >= 0), max(numbers) + 1)
        backward = Span()
        for node, following in zip(self.nodes, [*self.nodes[1:], None], strict=True):
            if begin <= node.extra_fields.sequence_number < end:
                until = node.end_time_ns if following is None else following.start_time_ns
                backward = backward.plus(Span(until - node.start_time_ns, _span(node).events))
        place = _place(call, line)
        return Loop(place, times, sum(1 for each in operations if not _is_operation(each.parent)), forward, backward)


def _repeated(call: Any, children: Sequence[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Yield first and last child, line (0 if unknown) and number of repetitions of each loop, in their order."""
    keys = [(_line_in(call, each) or 0, _OBJECT.sub("", each.name)) for each in children]
    found = [
        (keys.index(key), len(keys) - 1 - keys[::-1].index(key), key[0], times)
        for key, times in Counter(keys).items()
        # operators have no line: their names repeat in code without loops, too
        if times >= (_REPEATED if key[0] else 2 * _REPEATED)
    ]
    merged: list[tuple[int, int, int, int]] = []
    for first, last, line, times in sorted(found):
        if merged and first <= merged[-1][1]:  # other lines of the same loop
            before = merged.pop()
            named = before if before[2] else (first, last, line, times)
            first, last, line, times = before[0], max(last, before[1]), named[2], named[3]
        merged.append((first, last, line, times))
    yield from merged


def walk(event: Any) -> Iterator[Any]:
    """Yield an event and all within it, each before what it contains."""
    stack = [event]
    while stack:
        each = stack.pop()
        yield each
        stack.extend(reversed(each.children))


def is_users(call: Any) -> bool:
    """Return whether the function of a Python call is neither of a package that is installed nor of Python's."""
    return is_users_file(_file(call))


def is_users_file(file: str) -> bool:
    """Return whether a file is neither of a package that is installed nor of Python's."""
    return bool(file) and not _PACKAGES.search(file) and not file.startswith(_NOT_THE_USERS)


def short_path(file: str) -> str:
    """Return the path without the folder of installed packages, or relative to the working directory."""
    if installed := _PACKAGES.search(file):
        return file[installed.end() :]
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def callers(event: Any) -> Iterator[Any]:
    """Yield the events that contain an event, the innermost first."""
    while (event := event.parent) is not None:
        yield event


def place_of(event: Any) -> tuple[str, bool]:
    """Return the innermost place outside of torch that an event was called from, and whether it is the user's.

    The place is ``file:line in function`` with the line of the call; it is ``file in function`` if only operators were
    on the way, such as indexing, which have no lines.
    """
    inner = event
    for call in callers(event):
        file = _file(call)
        is_torch = file.startswith(("<", _TORCH, _OWN, *_STDLIB))  # or a decorator, or ReadCalls
        if file and not is_torch:
            return _place(call, _line_in(call, inner)), is_users(call)
        inner = call
    return "", False


def _forward(step: Any) -> Iterator[Any]:
    """Yield the events of a training step, without the passes of manual optimization."""
    stack = [step]
    while stack:
        each = stack.pop()
        yield each
        stack.extend(child for child in each.children if not child.name.startswith((_NODE, "Optimizer.")))


def _span(event: Any) -> Span:
    return Span(event.duration_time_ns, sum(1 for _ in walk(event)))


def _without_graphs(event: Any) -> Span:
    span = _span(event)
    graphs = [_span(each) for each in walk(event) if each.name.startswith(_GRAPH)]
    return Span(span.ns - sum(each.ns for each in graphs), span.events - sum(each.events for each in graphs))


def _own_ns(event: Any) -> int:
    return int(event.duration_time_ns) - sum(child.duration_time_ns for child in event.children)


def _work_ns(operations: Sequence[Any]) -> tuple[float, float]:
    """Return the time of small and of large operations, each at the lower quartile of its kind."""
    times: dict[str, list[int]] = {}
    for each in operations:
        times.setdefault(each.name, []).append(_own_ns(each))
    small = large = 0.0
    for each in times.values():
        usual = sorted(each)[len(each) // 4]  # any may be interrupted
        if usual < _SMALL_NS:
            small += len(each) * usual
        else:
            large += len(each) * usual
    return small, large


def _is_operation(event: Any) -> bool:
    return event is not None and hasattr(event.extra_fields, "sequence_number")


def _file(call: Any) -> str:
    """Return the file of the function that an event calls, empty if it is no Python call."""
    return _whole(str(call.extra_fields.callsite.file_name)) if hasattr(call.extra_fields, "callsite") else ""


@cache
def _whole(file: str) -> str:
    """Return the path of a file whose folder torch.profiler has cut off, if that is one of modules."""
    found = (path for folder in sys.path if (path := Path(folder, file)).is_file())
    return file if file.startswith("<") else os.path.realpath(next(found, file))


def _function(call: Any) -> str:
    """Return the name of the function that an event calls, empty if it is no Python call."""
    return str(call.extra_fields.callsite.function_name) if hasattr(call.extra_fields, "callsite") else ""


def _place(call: Any, line: int | None) -> str:
    return f"{short_path(_file(call))}{f':{line}' if line else ''} in {_function(call)}"


def _line_in(call: Any, child: Any) -> int | None:
    """Return the line of the function ``call`` that calls ``child``, None for operators, which are no calls."""
    caller = getattr(child.extra_fields, "caller", None)
    return None if caller is None or caller.function_name != _function(call) else int(caller.line_number)
