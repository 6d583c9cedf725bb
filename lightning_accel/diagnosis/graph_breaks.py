"""Graph breaks of compiled submodules, as ``torch._dynamo.explain`` finds them for inputs of a training batch."""

import sys
from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor, nn

from lightning_accel._private.torch import (
    compilations,
    compiled_call,
    compiled_original,
    explain_compilation,
    tree_map_only,
)
from lightning_accel.callbacks.recorded_calls import CallRecorder, Calls
from lightning_accel.diagnosis.joined_graphs import breaks_ms


class GraphBreaks(NamedTuple):
    """Hold a compiled submodule's name, how often its graph breaks, and the first reason with its place."""

    name: str
    breaks: int
    reason: str


class Compilations(NamedTuple):
    """Hold how often a run compiles anew, the time of that in ms, and the place and reason of the first time."""

    times: int
    ms: float
    first: str


def compilations_since(seconds: float) -> Compilations | None:
    """Return what was compiled in this process since ``time.time()`` was ``seconds``, None if nothing."""
    if "torch._dynamo" not in sys.modules:
        return None
    later = [each for each in compilations() if each.start_time is not None and each.start_time > seconds]
    frames = [each for each in later if each.co_name is not None]
    if not frames:
        return None
    first = frames[0]
    place = f"{first.co_name} at {first.co_filename}:{first.co_firstlineno}"
    reason = f", since {first.recompile_reason}" if first.recompile_reason else ""
    return Compilations(len(frames), sum(each.duration_us or 0 for each in later) / 1000, place + reason)


class CompiledCalls:
    """Record the first call of each compiled submodule between ``start`` and ``stop``, and explain it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = [
            name
            for name, each in module.named_modules()
            if compiled_original(each) is not None or compiled_call(each) is not None
        ]
        self._recorder = CallRecorder()
        self._stack = ExitStack()
        self._calls: Calls = {}
        self._times: dict[str, int] = {}  # of calls

    def start(self) -> None:
        self._recorder.watch(self.module, self.names)
        self._calls = self._stack.enter_context(self._recorder.recording())

    def stop(self) -> None:
        self._stack.close()
        self._recorder.close()
        for name, calls in self._calls.items():  # without graphs and outputs, which hold memory
            args, kwargs = tree_map_only(Tensor, _detach, (calls[0].args, calls[0].kwargs))
            self._times[name] = len(calls)
            self._calls[name] = [calls[0]._replace(args=args, kwargs=kwargs, output=None)]

    def breaks_ms(self, seconds: float) -> float | None:
        """Return the measured time that all graph breaks take of a batch, None where it cannot be measured.

        Args:
            seconds: how long to time calls, in all.
        """
        total = 0.0
        for name, (call,) in self._calls.items():
            module = self.module.get_submodule(name)
            ms = breaks_ms(module, call.args, call.kwargs, seconds / len(self._calls))
            if ms is None:
                return None
            total += ms * self._times[name]
        return max(total, 0.0)

    def explain(self) -> list[GraphBreaks]:
        """Return the submodules with graph breaks; this compiles them anew."""
        found = []
        for name, (call,) in self._calls.items():
            each = self.module.get_submodule(name)
            plain = compiled_original(each) or each
            explained = explain_compilation(plain.forward, *call.args, **call.kwargs)
            if explained.break_reasons:  # there are none either where nothing was compiled
                first = explained.break_reasons[0]
                frame = first.user_stack[-1] if first.user_stack else None
                place = f" at {frame.filename}:{frame.lineno}" if frame else ""
                reason = next(iter(str(first.reason).strip().splitlines()), "unknown reason")
                found.append(GraphBreaks(name, explained.graph_break_count, reason + place))
        return found


def _detach(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)  # a graph of its own, for which nothing recompiles
