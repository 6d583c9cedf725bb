"""Random numbers in a pipeline: draws of a step are equal on all its stages, draws of a layer are its own."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lightning_accel._private.torch import TorchDispatchMode, compiled_call, plain_call, set_compiled_call
from lightning_accel.strategies.pipeline.chain import Chain

_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric"}
_DEPTH = 4  # how deep attributes of attributes of a module are searched for generators
_LONGEST = 1000  # longer containers hold data, not generators


class _Generator(NamedTuple):
    """Hold the functions that save, restore and seed one source of random numbers."""

    state: Callable[[], Any]
    restore: Callable[[Any], object]
    seed: Callable[[int], object]


_Container = Mapping[str, Any] | Mapping[Any, Any] | list[Any] | tuple[Any, ...]


class StepRandom:
    """Seed each micro-batch and each layer separately, from one number drawn for the whole batch.

    The stages of a pipeline run the same step, each up to its own layers, so that their generators advance unequally.
    So every micro-batch starts from a seed, the same on all stages, and layers restore the generators after they ran. A
    layer's own seed is drawn from the step's numbers where it is called: with activation checkpointing, which restores
    those, it draws the same numbers again, whichever stage the layer is on.

    The seeded generators are the global ones of torch, CUDA, NumPy and Python, and those that are held by ``module`` or
    by a submodule outside the layers: as attributes, in lists, tuples, dicts and helper objects among these, in their
    classes, or at the top of the files that define those. The places are found at the first batch of each kind of step;
    a generator that later replaces another there is seeded, too.

    Args:
        module: module whose steps run.
        chain: its layers.
        ranks: the processes of the pipeline; the first one draws the seeds.
        device: device of this process.
    """

    def __init__(self, module: nn.Module, chain: Chain, ranks: Any, device: torch.device) -> None:
        self.module = module
        self.chain = chain
        self.ranks = ranks
        self.device = device
        self._seed = 0
        self._generators: list[_Generator] = []
        self._containers: dict[bool, list[_Container]] = {}  # by module.training

    def align(self) -> None:
        """Set the global generators of all stages to the states of those of the first."""
        everywhere = _global_generators(self.device)
        states: list[Any] = [[one.state() for one in everywhere]]
        dist.broadcast_object_list(states, src=self.ranks.world_rank(0), group=self.ranks.objects)
        for one, state in zip(everywhere, states[0], strict=True):
            one.restore(state)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Seed the layers of this stage separately, then restore the generators, advanced by one draw for the batch."""
        drawn = torch.randint(2**63 - 1, (1,), generator=torch.default_generator, device="cpu")
        dist.broadcast(drawn, src=self.ranks.world_rank(0), group=self.ranks.objects)
        self._seed = _mix_seed(int(drawn), self.ranks.world_rank(0))  # other pipelines draw other numbers
        self._generators = _global_generators(self.device) + self._own_generators()
        stage_of = self.chain.stage_of
        owned = [
            (number, layer) for number, layer in enumerate(self.chain.layers) if stage_of[number] == self.ranks.rank
        ]
        before = [compiled_call(layer) for _, layer in owned]
        for (number, layer), own in zip(owned, before, strict=True):
            set_compiled_call(layer, partial(self._call_with_own_seed, number, own or plain_call(layer)))
        try:
            with self._preserved_states():
                yield
        finally:
            for (_, layer), own in zip(owned, before, strict=True):
                set_compiled_call(layer, own)

    def begin(self, number: int) -> None:
        """Seed the generators for a micro-batch."""
        self._seed_all(_mix_seed(self._seed, number))

    def _call_with_own_seed(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._preserved_states():
            drawn = torch.randint(2**63 - 1, (), generator=torch.default_generator, device="cpu")
            self._seed_all(_mix_seed(int(drawn), number))
            return forward(*args, **kwargs)

    @contextmanager
    def _preserved_states(self) -> Iterator[None]:
        before = [one.state() for one in self._generators]
        try:
            yield
        finally:
            for one, state in zip(self._generators, before, strict=True):
                one.restore(state)

    def _seed_all(self, seed: int) -> None:
        for one in self._generators:
            one.seed(seed)

    def _own_generators(self) -> list[_Generator]:
        inside = {id(inner) for layer in self.chain.layers for inner in layer.modules()}
        outside = [inner for inner in self.module.modules() if id(inner) not in inside]
        if self.module.training not in self._containers:
            self._containers[self.module.training] = _find_containers(outside, inside)
        places = [*map(vars, outside), *self._containers[self.module.training]]
        sources = {id(value): value for place in places for value in _values(place)}
        found = [_as_generator(value) for value in sources.values()]
        return [one for one in found if one is not None]


class RandomOpDetector(TorchDispatchMode):
    """Record whether an operation draws random numbers."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn = self.drawn or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _mix_seed(*parts: int) -> int:
    """Return a seed in [0, 2**63) that differs for different ``parts``, which must not be negative."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]) >> 1


def _global_generators(device: torch.device) -> list[_Generator]:
    sources: list[Any] = [torch.default_generator, np.random, random]
    if device.type == "cuda":
        sources.append(torch.cuda.default_generators[device.index])
    return [_as_generator(source) for source in sources]  # type: ignore[misc]


def _as_generator(source: Any) -> _Generator | None:
    """Return the functions that save, restore and seed ``source``; None if it is no generator."""
    if isinstance(source, torch.Generator):
        return _Generator(source.get_state, source.set_state, source.manual_seed)
    if isinstance(source, np.random.RandomState) or source is np.random:
        return _Generator(source.get_state, source.set_state, lambda seed: source.seed(seed % 2**32))
    if isinstance(source, random.Random) or source is random:
        return _Generator(source.getstate, source.setstate, source.seed)
    if isinstance(source, np.random.Generator):
        bits: Any = source.bit_generator
        restore = partial(setattr, bits, "state")
        return _Generator(lambda: bits.state, restore, lambda seed: restore(type(bits)(seed).state))
    return None


def _find_containers(modules: Iterable[nn.Module], skipped: set[int]) -> list[_Container]:
    """Find the containers of generators in what ``modules`` hold, nearest first, skipping ids in ``skipped``."""
    found: list[_Container] = []
    seen = set(skipped)
    level: list[Any] = list(modules)
    for _ in range(1 + _DEPTH):
        beyond: list[Any] = []
        for one in level:
            if id(one) in seen or isinstance(one, type | ModuleType):  # searched by way of their instances
                continue
            seen.add(id(one))
            for holder in _containers_of(one, seen):
                values = _values(holder)
                if any(_as_generator(value) is not None for value in values):
                    found.append(holder)
                beyond += values
        level = beyond
    return found


def _containers_of(one: Any, seen: set[int]) -> list[_Container]:
    """List the containers of what ``one`` holds, including its classes and their files unless ``seen`` has them."""
    if isinstance(one, dict | list | tuple):
        return [one] if len(one) <= _LONGEST else []
    if isinstance(one, torch.Tensor) or not (isinstance(one, nn.Module) or _is_user_class(type(one))):
        return []
    holders: list[_Container] = [vars(one)] if hasattr(one, "__dict__") else []
    for origin in filter(_is_user_class, type(one).__mro__):
        for place in (origin, sys.modules.get(origin.__module__)):
            if place is not None and id(place) not in seen:
                seen.add(id(place))
                holders.append(vars(place))
    return holders


def _is_user_class(kind: type) -> bool:
    return kind.__module__ == "__main__" or kind.__module__.partition(".")[0] not in _LIBRARIES


def _values(holder: _Container) -> list[Any]:
    return list(holder.values() if isinstance(holder, Mapping) else holder)
