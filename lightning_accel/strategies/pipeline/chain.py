"""The chain of layers that a module calls one after another, and its division into stages."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_accel._private.torch import apply_to_tensors_
from lightning_accel.ops.evaluation import evaluating


class Chain:
    """Hold layers in the order in which ``forward`` calls them; stage ``s`` owns a contiguous slice of them.

    Args:
        layers: distinct modules, none inside another.
        sizes: number of layers of each stage.
    """

    def __init__(self, layers: Sequence[nn.Module], sizes: Sequence[int]) -> None:
        self.layers = list(layers)
        self.num_stages = len(sizes)
        self.stage_of = [stage for stage, size in enumerate(sizes) for _ in range(size)]

    def layers_of(self, stage: int) -> list[nn.Module]:
        """Return the layers of ``stage``."""
        return [layer for layer, owner in zip(self.layers, self.stage_of, strict=True) if owner == stage]


def find_layers(module: nn.Module, num_stages: int) -> list[nn.Module]:
    """Return the layers that ``module.pipeline_layers()`` declares, or the items of its one dominant container.

    The container is the one ``nn.Sequential`` or ``nn.ModuleList`` that holds most of the parameters. Submodules with
    a true attribute ``indivisible``, whose layers pass on more than tensors of one shape, are not searched.

    Raises:
        TypeError: if nothing is declared and no single ``nn.Sequential`` or ``nn.ModuleList`` stands out.
        ValueError: if the layers are fewer than the stages, repeated, or inside one another.
    """
    declare: Any = getattr(module, "pipeline_layers", None)
    layers = list(declare()) if callable(declare) else list(_largest_container(module, num_stages))
    name = type(module).__name__
    if len(layers) < num_stages:
        raise ValueError(
            f"{name} has {len(layers)} pipeline layers, too few for {num_stages} stages. Return more of them, smaller "
            "ones, from pipeline_layers(), or use fewer devices"
        )
    inside = [inner for layer in layers for inner in layer.modules()]
    if len({id(inner) for inner in layers}) < len(layers) or any(
        sum(inner is layer for inner in inside) > 1 for layer in layers
    ):
        raise ValueError(f"the pipeline layers of {name} must be distinct, and none of them inside another")
    return layers


def _largest_container(module: nn.Module, num_stages: int) -> Iterable[nn.Module]:
    total = num_parameters(module)
    whole = {id(part) for inner in module.modules() if getattr(inner, "indivisible", False) for part in inner.modules()}
    holders = [
        inner
        for inner in module.modules()
        if isinstance(inner, nn.Sequential | nn.ModuleList)
        and id(inner) not in whole
        and len(inner) >= num_stages
        and 2 * num_parameters(inner) > total
    ]
    inner_ones = {id(inner) for holder in holders for inner in holder.modules() if inner is not holder}
    outer = [holder for holder in holders if id(holder) not in inner_ones]
    if len(outer) != 1:
        raise TypeError(
            f"{type(module).__name__} does not tell which layers form its pipeline: it has {len(outer)} nn.Sequential "
            f"or nn.ModuleList with {num_stages} items or more that hold most of its parameters, and one is needed. "
            "Give it a method pipeline_layers(self) that returns the submodules that forward calls one after another, "
            "such as [self.embedding, *self.blocks, self.head]"
        )
    return outer[0]


def num_parameters(module: nn.Module) -> int:
    """Count the elements of all parameters, trained or frozen."""
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def measure_costs(module: pl.LightningModule, layers: Sequence[nn.Module]) -> list[float]:
    """Measure the seconds of each of ``layers`` in a forward pass of the ``example_input_array``, on the CPU."""
    example, seconds = module.example_input_array, [0.0] * len(layers)
    hooks = []
    for number, layer in enumerate(layers):

        def begin(*_: object, number: int = number) -> None:
            seconds[number] -= perf_counter()

        def end(*_: object, number: int = number) -> None:
            seconds[number] += perf_counter()

        hooks += [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)]
    try:
        with evaluating(module):
            for _ in range(2):  # the first warms up
                seconds[:] = [0.0] * len(layers)
                if isinstance(example, Mapping):
                    module(**example)
                else:
                    module(*example if isinstance(example, tuple) else (example,))
    finally:
        for hook in hooks:
            hook.remove()
    return seconds


def stage_sizes(costs: Sequence[float], num_stages: int) -> list[int]:
    """Split layers into contiguous stages such that the most expensive stage costs as little as possible.

    >>> stage_sizes([5, 1, 1, 1, 5], num_stages=3)
    [1, 3, 1]
    """
    before = [0.0, *accumulate(costs)]

    @cache
    def best(stop: int, parts: int) -> tuple[float, tuple[int, ...]]:
        if parts == 1:
            return before[stop], (0,)
        starts = range(parts - 1, stop)
        cost, start = min((max(best(start, parts - 1)[0], before[stop] - before[start]), start) for start in starts)
        return cost, (*best(start, parts - 1)[1], start)

    return [stop - start for start, stop in pairwise((*best(len(costs), num_stages)[1], len(costs)))]


def move_to_meta_(module: nn.Module, freed: set[nn.Parameter]) -> None:
    """Move ``freed`` parameters to the meta device, where they keep name, shape and place in lists of parameters."""
    empty = {one: nn.Parameter(one.detach().to("meta"), one.requires_grad) for one in freed}
    for inner in module.modules():
        for name, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in empty:
                setattr(inner, name, empty[parameter])


def move_(module: nn.Module, device: torch.device) -> None:
    """Move all tensors of ``module`` that are not on the meta device to ``device``."""
    apply_to_tensors_(module, lambda tensor: tensor if tensor.is_meta else tensor.to(device))
