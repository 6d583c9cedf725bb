"""Checks of the inputs of layers: type, shape and dtype, which take microseconds, but not values.

Shapes: N nodes, M entries of edge_index.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def require_width(layer: nn.Module, x: Any, size: str, width: int, shape: str, *, ndim: int = 0, dim: int = -1) -> None:
    """Raise an error that names ``layer`` unless ``x`` is a tensor of ``width`` features.

    Args:
        layer: the layer that is called.
        x: its input.
        size: name of the constructor argument that sets the width.
        width: number of features that the layer accepts; any number if negative.
        shape: description of the expected input for the message, with a place for the width, such as ``x (N, {})``.
        ndim: required number of dimensions of ``x``; 0 for any number.
        dim: the dimension of the features.

    Raises:
        TypeError: if ``x`` is not a tensor.
        ValueError: if ``x`` has another shape.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{_takes(layer, size, width, shape)}; got a {type(x).__name__}. Make it a tensor")
    if x.ndim == 0 or (ndim and x.ndim != ndim) or (x.shape[dim] != width and width >= 0):
        is_other_width = x.ndim > 0 and ndim in (0, x.ndim)
        hint = f". Pass {size}={x.shape[dim]}, or an input of that width" if is_other_width else ""
        raise ValueError(f"{_takes(layer, size, width, shape)}; got {tuple(x.shape)}{hint}")


def require_rows(layer: nn.Module, x: Any, size: str, width: int) -> None:
    """Raise an error that names ``layer`` unless ``x`` is (B, ...) with ``width`` values per sample."""
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[1:].numel() != width:
        found = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
        error = ValueError if isinstance(x, Tensor) else TypeError
        raise error(f"{_takes(layer, size, width, 'rows (B, ...) of {} values')}; got {found}")


def require_floating(layer: nn.Module, x: Tensor, name: str, weights: Iterator[Tensor] | None = None) -> None:
    """Raise a TypeError unless ``x``, which the message calls ``name``, is floating and fits the layer's weights.

    Args:
        layer: the layer that is called.
        x: its input.
        name: name of the input in the message.
        weights: parameters, the first of which multiplies ``x`` without conversion; None if the layer converts ``x``.
    """
    if not x.is_floating_point():
        raise TypeError(f"{type(layer).__name__} takes floating-point {name}; got {x.dtype}. Convert with .float()")
    weight = None if weights is None else next(weights, None)
    # a weight that is sharded (a DTensor) or quantized may be used in another dtype
    if weight is None or weight.dtype == x.dtype or type(weight) not in (Tensor, nn.Parameter):
        return
    device = x.device.type
    is_cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # float64 excepted
    if weight.is_floating_point() and not (is_cast and torch.float64 not in (x.dtype, weight.dtype)):
        raise TypeError(
            f"{type(layer).__name__} has {weight.dtype} weights and takes {weight.dtype} {name}; got {x.dtype}. "
            f"Convert them with .to({weight.dtype}), or the layer with .to({x.dtype})"
        )


def _takes(layer: nn.Module, size: str, width: int, shape: str) -> str:
    return f"{type(layer).__name__}({size}={width}) takes {shape.format(width)}"


def check_edge_index(name: str, edge_index: Any) -> None:
    """Raise a ValueError unless ``edge_index`` is a dense (2, M) int64 tensor; its values are not checked."""
    if not isinstance(edge_index, Tensor):
        raise ValueError(f"{name} needs edge_index (2, M) int64; got {type(edge_index).__name__}")
    if edge_index.is_sparse or edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"{name} needs edge_index (2, M) int64; got {tuple(edge_index.shape)}")
    if edge_index.dtype != torch.int64:
        raise ValueError(f"{name} needs edge_index (2, M) int64; got {edge_index.dtype}: convert it with .long()")
