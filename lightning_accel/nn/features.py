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
    needed = f"{name} needs edge_index (2, M) int64"
    if not isinstance(edge_index, Tensor):
        is_adjacency = type(edge_index).__name__ == "SparseTensor"  # of the package torch_sparse
        hint = ". Pass torch.stack(adj_t.t().coo()[:2])" if is_adjacency else ""
        raise ValueError(f"{needed}; got {type(edge_index).__name__}{hint}")
    shape = tuple(edge_index.shape)
    if edge_index.layout != torch.strided:
        hint = "to_edge_index(adj)[0] of torch_geometric.utils makes one of an adjacency matrix"
        raise ValueError(f"{needed}; got a sparse tensor {shape}: {hint}")
    if edge_index.ndim != 2 or shape[0] != 2:
        is_square = edge_index.ndim == 2 and shape[0] == shape[1]
        hint = ": dense_to_sparse(adj)[0] of torch_geometric.utils makes one of an adjacency matrix" * is_square
        raise ValueError(f"{needed}; got {shape}{hint or (': pass edge_index.T' if shape[1:] == (2,) else '')}")
    if edge_index.dtype != torch.int64:
        raise ValueError(f"{needed}; got {edge_index.dtype}: convert it with .long()")


def check_edge_attr(name: str, edge_attr: Any, num_nodes: int, num_edges: int, instead: str) -> None:
    """Raise an error unless ``edge_attr`` has a row for each edge, such as for a ``batch`` that was passed third.

    Args:
        name: of what is called.
        edge_attr: given as such, None if it is not.
        num_nodes: N.
        num_edges: M.
        instead: what to do with ``batch``, for the message.
    """
    if edge_attr is None:
        return
    if not isinstance(edge_attr, Tensor):
        raise TypeError(f"{name} takes edge_attr (M, ...) third, a tensor; got a {type(edge_attr).__name__}")
    if edge_attr.ndim and len(edge_attr) == num_edges:
        return
    found = f"{edge_attr.dtype} {tuple(edge_attr.shape)} with {num_edges} edges"
    if edge_attr.dtype == torch.int64 and edge_attr.shape == (num_nodes,):
        found += f" and {num_nodes} nodes"
        raise ValueError(f"{name} takes edge_attr third, a row for each edge; got {found}. {instead}")
    raise ValueError(f"{name} needs edge_attr with a row for each column of edge_index; got {found}")


def wrong_edge_attr(edge_attr: Tensor | None, num_edges: int, edge_dim: int | None, num_relations: int | None) -> str:
    """Return what is needed and what was found if ``edge_attr`` is not what a layer of these options takes, else ""."""
    if edge_dim is not None:
        needed = f"floating edge_attr of shape ({num_edges}, {edge_dim}), as edge_dim={edge_dim}"
        is_right = edge_attr is not None and edge_attr.is_floating_point() and edge_attr.shape == (num_edges, edge_dim)
    else:
        needed = f"int64 edge_attr of shape ({num_edges},), as num_relations={num_relations}"
        is_right = edge_attr is not None and edge_attr.dtype == torch.int64 and edge_attr.shape == (num_edges,)
    if is_right:
        return ""
    if edge_attr is None:
        return f"{needed}; got none"
    hint = ""
    if edge_dim is None and edge_attr.shape == (num_edges, 1):
        hint = ". Pass edge_attr[:, 0]" + ("" if edge_attr.dtype == torch.int64 else ".long()")
    elif edge_dim == 1 and edge_attr.shape == (num_edges,):
        hint = ". Pass edge_attr[:, None]" + ("" if edge_attr.is_floating_point() else ".float()")
    elif edge_dim is not None and edge_attr.shape == (num_edges, edge_dim):
        hint = ". Convert it with .float()"
    elif edge_dim is None and edge_attr.shape == (num_edges,):
        hint = ". Convert it with .long()"
    return f"{needed}; got {edge_attr.dtype} of shape {tuple(edge_attr.shape)}{hint}"
