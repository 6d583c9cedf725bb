"""C++ kernels of :func:`lightning_accel.ops.find_triples`. Shapes: N nodes, M entries, E edges, T triangles."""

import torch
from torch import Tensor

from lightning_accel.ops.native import KERNELS, check_one_device


def simple_graph(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``edge`` (2, E), ``rowptr`` (N + 1,), ``col`` and ``edge_of`` (2 E,) from ``edge_index`` (2, M)."""
    return torch.ops.lightning_accel_native.simple_graph(edge_index, num_nodes)


def find_triangles(edge: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Find ``triangle`` and ``side``, (3, T) each, in lexicographic order, given ``edge`` (2, E)."""
    return torch.ops.lightning_accel_native.find_triangles(edge, num_nodes)


def group_triangles(
    triangle: Tensor, side: Tensor, num_nodes: int, num_edges: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``num_triangles`` (N,), ``third_rowptr`` (E + 1,), ``third`` (3 T,) and ``triangle_edge`` (S,)."""
    return torch.ops.lightning_accel_native.group_triangles(triangle, side, num_nodes, num_edges)


def _fake_graph(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_edges = torch.library.get_ctx().new_dynamic_size()
    col, edge_of = edge_index.new_empty(2 * num_edges), edge_index.new_empty(2 * num_edges)
    return edge_index.new_empty(2, num_edges), edge_index.new_empty(num_nodes + 1), col, edge_of


def _fake_triangles(edge: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    num_triangles = torch.library.get_ctx().new_dynamic_size()
    return edge.new_empty(3, num_triangles), edge.new_empty(3, num_triangles)


def _fake_groups(
    triangle: Tensor, side: Tensor, num_nodes: int, num_edges: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_one_device(triangle=triangle, side=side)
    num_used = torch.library.get_ctx().new_dynamic_size()
    of_nodes, of_edges = triangle.new_empty(num_nodes), triangle.new_empty(num_edges + 1)
    return of_nodes, of_edges, triangle.new_empty(triangle.shape[1] * 3), triangle.new_empty(num_used)


@KERNELS.on_load
def _register() -> None:
    for name, fake in (
        ("simple_graph", _fake_graph),
        ("find_triangles", _fake_triangles),
        ("group_triangles", _fake_groups),
    ):
        torch.library.register_fake(f"lightning_accel_native::{name}", fake)
