"""Places where the host waits for a number that a device computes, as torch.profiler sees them."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_accel.diagnosis.call_tree import CallTree, callers, place_of, walk

_READS = ("__bool__", "__complex__", "__float__", "__index__", "__int__")
_LOADING = "pytorch/loops/fetchers.py"  # where Lightning calls a loader


class HostSync(NamedTuple):
    """Hold a line of the user's, how often a batch waits there and for how many ms, and whether it prints or loads."""

    place: str
    times: float
    ms: float
    is_print: bool
    is_loading: bool = False


class ReadCalls:
    """Turn reads such as ``float(x)`` and ``if x`` into Python calls, whose lines torch.profiler records."""

    def start(self) -> None:
        for name in _READS:
            setattr(Tensor, name, _as_call(getattr(Tensor, name)))

    def stop(self) -> None:
        for name in _READS:
            delattr(Tensor, name)  # the base class of Tensor has the original


def _as_call(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def call(tensor: Tensor) -> Any:
        return read(tensor)

    # which would compile the call where a graph breaks
    return torch.compiler.disable(call) if "torch._dynamo" in sys.modules else call


def host_syncs(tree: CallTree, batches: int) -> list[HostSync]:
    """Return the lines at which ``.item()``, ``float``, ``if`` or ``print`` read a tensor, the slowest first.

    What Lightning and torchmetrics read themselves is left out: logging and metrics are parts of their own.

    Args:
        tree: what ran.
        batches: number of batches that it holds.
    """
    found: dict[tuple[str, bool], HostSync] = {}
    for event in (each for root in tree.roots for each in walk(root) if each.name == "aten::item"):
        place, is_users = place_of(event)
        if not is_users or place.endswith(" in <module>"):  # the call that trains, as where a backward pass reads
            continue
        is_loading = any(_LOADING in call.name for call in callers(event))
        is_print = any("_tensor_str.py" in call.name for call in callers(event))
        _, times, ms, *_ = found.get((place, is_print), HostSync(place, 0.0, 0.0, is_print))
        ms += event.duration_time_ns / 1e6 / batches
        found[place, is_print] = HostSync(place, times + 1 / batches, ms, is_print, is_loading)
    return sorted(found.values(), key=lambda sync: -sync.ms)
