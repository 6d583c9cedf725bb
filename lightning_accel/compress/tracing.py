"""Tracing of modules by ``torch.export``."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lightning_accel._private.others import has_grouped_experts
from lightning_accel._private.torch import tree_map_only
from lightning_accel.nn.moe.layer import Experts

_HALF = torch.bfloat16, torch.float16


def trace(
    module: nn.Module,
    tensors: Sequence[Tensor],
    shapes: tuple[Any, ...] | None = None,
    strict: Sequence[bool] = (False, True),
) -> ExportedProgram:
    """Trace ``module`` by a call, or by its bytecode where that fails.

    In a call, ``len()`` of a tensor and ``int()`` of its values are numbers, those of the traced batch; in bytecode
    they stay unknown. Losses of transformers and the poolings of PyTorch Geometric use them.

    Args:
        module: takes tensors and returns a tuple of tensors.
        tensors: arguments of the call.
        shapes: dynamic dimensions of each of ``tensors``; None if all sizes are fixed.
        strict: ways to trace in the order in which they are tried: False is a call, True bytecode.

    Raises:
        Exception: the first one, if all ways fail.
    """
    failure: Exception | None = None
    for way in strict:
        try:
            # a trace marks dynamic dimensions of its inputs, and a later one with fixed sizes would read the marks
            inputs = tuple(one.clone() for one in tensors)
            with _traceable(module):
                return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=way)
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise failure


@contextmanager
def _traceable(module: nn.Module) -> Iterator[None]:
    """Compute attention within graphs by operators that a trace holds; who has none does not import its package."""
    if not any(type(one).__name__ == "GPSConv" for one in module.modules()):
        yield
        return
    from lightning_accel.nn.graph_attention import replace_gps_, restore_gps_

    layers = replace_gps_(module)
    try:
        yield
    finally:
        restore_gps_(layers)


def copy_with_same_parameters(module: nn.Module) -> nn.Module:
    """Return a deep copy that has the same parameters, so that it takes no memory for them."""
    return copy.deepcopy(module, {id(one): one for one in module.parameters()})


def has_half_precision(module: nn.Module) -> bool:
    """Return whether a module has weights in bfloat16 or float16."""
    return any(one.dtype in _HALF for one in (*module.parameters(), *module.buffers()))


def to_float32(value: Any) -> Any:
    """Return nested tensors with those in bfloat16 and float16 converted to float32."""
    return tree_map_only(Tensor, lambda one: one.float() if one.dtype in _HALF else one, value)


def make_experts_dense_(module: nn.Module) -> None:
    """Compute experts, ours and those of transformers, by operators that every runtime has."""
    for one in module.modules():
        if isinstance(one, Experts):
            one.backend = "dense"
        elif has_grouped_experts(one):
            one.set_experts_implementation("batched_mm")  # type: ignore[operator]  # of PreTrainedModel
