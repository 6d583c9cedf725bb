"""Checks of the graphs passed to layers. Shapes: N nodes, M entries of edge_index."""

from typing import Any

import torch
from torch import Tensor


def check_edge_index(name: str, edge_index: Any) -> None:
    """Raise a ValueError unless ``edge_index`` is a dense (2, M) int64 tensor; its values are not checked."""
    if not isinstance(edge_index, Tensor):
        raise ValueError(f"{name} needs edge_index (2, M) int64; got {type(edge_index).__name__}")
    if edge_index.is_sparse or edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"{name} needs edge_index (2, M) int64; got {tuple(edge_index.shape)}")
    if edge_index.dtype != torch.int64:
        raise ValueError(f"{name} needs edge_index (2, M) int64; got {edge_index.dtype}: convert it with .long()")
