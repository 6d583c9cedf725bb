"""Memory that grows from step to step, and what in it does."""

import gc
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accel.measure.machine import memory_bytes
from lightning_accel.measure.peak_memory import resident_bytes
from lightning_accel.measure.table import in_bytes

_STEPS = 20  # at least between two looks
_RISES = 6  # in a row, until it is said
_LEAST = 64 * 2**20  # bytes
_CONTAINERS = (list, dict, set, deque)

Kind = tuple[str, str, str, bool]  # of tensors: shape, dtype, device and whether they hold a graph


class MemoryGrowth:
    """Notice that the memory of a run grows in each of six looks in a row, and say what grows.

    What counts is the resident memory of the process, or what tensors take on its GPU. When it has grown three times,
    lists and dictionaries of the owners and live tensors are counted, and again when it has grown six times. The first
    six looks, in which caches fill, count nothing. It is said again when it has grown by twice as much.

    Args:
        device: of the run.
        owners: objects whose attributes may grow, by what they are called: the module, the data module, callbacks.
        period: seconds between two looks, at least.
    """

    def __init__(self, device: torch.device, owners: Mapping[str, Any], period: float) -> None:
        self.device, self.owners, self.period = device, owners, period
        self._looks = 0
        self._due = 0.0
        self._last: tuple[int, int] = (0, 0)  # step and bytes
        self._first: tuple[int, int] = (0, 0)  # where the rise began
        self._rises = 0
        self._least = _LEAST
        self._counted: tuple[int, Counter[str], Counter[Kind]] | None = None

    def look(self, step: int) -> str | None:
        """Return what to say after training batch ``step``; the thread of the Trainer calls it after each."""
        now = time.monotonic()
        if now < self._due or step - self._last[0] < _STEPS:
            return None
        self._due = now + self.period
        held, before = resident_bytes(self.device), self._last
        self._last = (step, held)
        self._looks += 1
        if self._looks <= _RISES or held <= before[1]:
            self._rises, self._first, self._counted = 0, self._last, None
            return None
        self._rises += 1
        if self._rises == _RISES // 2:
            self._counted = (step, _containers(self.owners), _tensors())
        grown = held - self._first[1]
        if self._rises < _RISES or grown < self._least:
            return None
        text = self._describe(step, grown)
        self._rises, self._first, self._counted, self._least = 0, self._last, None, 2 * grown
        return text

    def _describe(self, step: int, grown: int) -> str:
        steps = step - self._first[0]
        is_gpu = self.device.type == "cuda"
        total = torch.cuda.mem_get_info(self.device)[1] if is_gpu else min(filter(None, memory_bytes()))
        left = max(0, total - self._last[1]) * steps // grown
        where = "; ".join(self._grown(step)) or (
            "no tensors, and no lists of the module, its data or callbacks grow: look at libraries that are not Python"
        )
        return (
            f"memory {'on the GPU' if is_gpu else 'of the process'} grows: by {in_bytes(grown)} in {steps:,} steps, "
            f"since step {self._first[0]:,}; {in_bytes(total)} are full after {left:,} more. {where}"
        )

    def _grown(self, step: int) -> Iterator[str]:
        assert self._counted is not None
        before, containers, tensors = self._counted
        found = _containers(self.owners)
        more = Counter({name: count - containers[name] for name, count in found.items()})
        for name, added in more.most_common(2):
            if added >= (step - before) // 2 > 0:  # something in every second step at least
                yield f"{name} has grown by {added:,} to {found[name]:,} entries since step {before:,}"
        kinds = Counter({kind: count - tensors[kind] for kind, count in _tensors().items()})
        for (shape, dtype, place, has_graph), added in kinds.most_common(1):
            if added >= (step - before) // 2 > 0:
                graphs = ", with the graphs that computed them, which detach() frees" if has_graph else ""
                yield f"there are {added:,} more tensors of shape {shape}, {dtype} on {place}{graphs}"


def _containers(owners: Mapping[str, Any]) -> Counter[str]:
    """Return the entries of lists, dictionaries and sets that are attributes, and of those within them, by name."""
    found: Counter[str] = Counter()
    for name, owner in owners.items():
        parts = owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]
        for path, part in parts:
            for attribute, value in list(vars(part).items()):
                if isinstance(value, _CONTAINERS):
                    found[".".join(filter(None, (name, path, attribute)))] = _entries(value)
    return found


def _entries(value: Any, depth: int = 3) -> int:
    inner = [each for each in (value.values() if isinstance(value, dict) else value) if isinstance(each, _CONTAINERS)]
    return len(value) + (sum(_entries(each, depth - 1) for each in inner) if depth > 1 else 0)


def _tensors() -> Counter[Kind]:
    found: Counter[Kind] = Counter()
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter):  # isinstance fails on weak proxies of what is gone
            shape = str(tuple(each.shape))
            found[shape, str(each.dtype).removeprefix("torch."), str(each.device), each.grad_fn is not None] += 1
    return found
