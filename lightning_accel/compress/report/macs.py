"""Counts of the multiply-accumulates of a module. Shapes: G groups, M rows, K and N features."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_accel._private.torch import grouped_mm
from lightning_accel.ops.evaluation import evaluating
from lightning_accel.ops.native import KERNELS


class Macs(NamedTuple):
    """Hold the multiply-accumulates of one call, in total and for each submodule without its children."""

    total: int
    of_layer: dict[str, int]  # by name of the submodule; "" is the module itself


@torch.no_grad()
def count_macs(module: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Macs:
    """Count the multiply-accumulates of ``module(*args, **kwargs)``, which is run once, in evaluation mode.

    All convolutions and matrix products count, whatever calls them: layers, recurrent cells, attention, experts. Zero
    weights count like others.

    Args:
        module: module on any device; its mode is restored.
        args: positional arguments of a call; papers report the count for one sample.
        kwargs: keyword arguments of the call.

    >>> count_macs(nn.Linear(3, 2), (torch.ones(5, 3),)).total
    30
    """
    counter = FlopCounterMode(display=False, custom_mapping=_PRODUCTS)
    with evaluating(module), _plain_kernels(), counter:
        module(*args, **(kwargs or {}))
    of_layer = {name: count for name, count in _own_counts(module, counter).items() if count}
    return Macs(counter.get_total_flops() // 2, of_layer)


def _own_counts(module: nn.Module, counter: FlopCounterMode) -> dict[str, int]:
    root = type(module).__name__
    whole: dict[str, int] = {}
    for name, counts in counter.get_flop_counts().items():
        if name == root or name.startswith(f"{root}."):
            whole[name[len(root) + 1 :]] = sum(counts.values()) // 2
    own = dict(whole)
    for name, count in whole.items():
        if name:
            parent = name.rpartition(".")[0]
            while parent and parent not in own:
                parent = parent.rpartition(".")[0]
            own[parent] = own.get(parent, 0) - count
    return own


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Disable fused kernels of recurrent layers, experts and attention, whose products are not dispatched."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TF32 acceleration", category=UserWarning)  # in builds without it
            with (
                torch.backends.mkldnn.flags(enabled=False),
                torch.backends.cudnn.flags(enabled=False),
                sdpa_kernel(SDPBackend.MATH),
                KERNELS.switched_off(),
            ):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _vector_flops(matrix: Any, vector: Any, **options: Any) -> int:
    return 2 * prod(matrix)


def _added_vector_flops(added: Any, matrix: Any, vector: Any, **options: Any) -> int:
    return 2 * prod(matrix)


def _grouped_flops(first: Any, second: Any, *rest: Any, **options: Any) -> int:
    """Count the operations of a grouped product: (M, K) by (G, K, N), (G, M, K) by (K, N), both 2-D, or both 3-D."""
    rows = first[1:] if len(first) > len(second) else first
    return 2 * prod(rows) * second[-1]


_PRODUCTS: dict[Any, Any] = {
    torch.ops.aten.mv: _vector_flops,
    torch.ops.aten.dot: _vector_flops,
    torch.ops.aten.addmv: _added_vector_flops,
    grouped_mm(): _grouped_flops,
}
