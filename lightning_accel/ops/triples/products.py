"""Sums of products over triangles. Shapes: N nodes, E edges, T triangles, S edges in triangles, R channels."""

from typing import Any

import torch
from torch import Tensor

from lightning_accel._private.torch import is_transformed
from lightning_accel.ops.float32 import at_least_float32
from lightning_accel.ops.triples.csr import bag_sum, csr_sum_reference

# Bytes of one factor for a block of edges. On CPU per thread, so that several blocks fit into cache; elsewhere enough
# to fill the device.
_BLOCK_BYTES = {"cpu": 2**20, "other": 2**28}


def triangle_product(
    x: Tensor, y: Tensor | None, edge: Tensor, triangle_edge: Tensor, third_rowptr: Tensor, third: Tensor
) -> Tensor:
    """Sum ``x_j y_k + x_k y_j``, or ``x_j x_k`` without ``y``, over the triangles {i, j, k} of each node i.

    For each edge {i, j} of node i, ``x_j`` is multiplied by the sum of ``y`` over the third nodes of its triangles: 3 T
    rows are summed and S multiplied, a block of edges at a time, so that no tensor larger than x stays in memory. The
    function is symmetric in x and y; the gradient of either is the same function of the other and the output's
    gradient, so derivatives of any order work. Sums are float32 for narrower factors, also under autocast.

    On CUDA the order of summation varies between calls, unless torch.use_deterministic_algorithms is on.

    Args:
        x: (N, R) floating.
        y: (N, R) floating.
        edge: (2, E) int64.
        triangle_edge: (S,) int64, the edges in triangles, ascending.
        third_rowptr: (E + 1,) int64, where the third nodes of each edge begin in ``third``.
        third: (3 T,) int64, the third nodes of the triangles of each edge.

    Returns:
        (N, R), float32 or float64.
    """
    x, y = with_common_dtype(x, y)
    if is_transformed(x) or (y is not None and is_transformed(y)):
        return _product_by_rows(x, y, edge, third_rowptr, third)
    call = torch.ops.lightning_accel.triangle_product if torch.compiler.is_compiling() else _TriangleProduct.apply
    return call(x, y, edge, triangle_edge, third_rowptr, third)


def with_common_dtype(x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Cast the factors to one dtype, float32 or wider."""
    x = at_least_float32(x)
    if y is None:
        return x, None
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype)


def _product(
    x: Tensor, y: Tensor | None, edge: Tensor, triangle_edge: Tensor, third_rowptr: Tensor, third: Tensor
) -> Tensor:
    x = x.contiguous()
    out, num_edges = torch.zeros_like(x), len(triangle_edge)
    if not num_edges or not x.shape[1]:
        return out
    size = _block_size(x)
    summed = x if y is None else y.contiguous()
    # edges in no triangle have no entries in third, so each edge's entries end where the next edge's begin
    rowptr = torch.cat([third_rowptr.index_select(0, triangle_edge), third_rowptr[-1:]])
    borders = rowptr[:-1:size].tolist() if num_edges > size else [0]  # a host sync
    buffer = x.new_empty(min(size, num_edges), x.shape[1])  # reused: allocating takes longer than the sums
    for first, start, stop in zip(range(0, num_edges, size), borders, [*borders[1:], len(third)], strict=True):
        last = min(first + size, num_edges)
        u, v = edge.index_select(1, triangle_edge[first:last])
        partial = bag_sum(rowptr[first : last + 1] - start, third[start:stop], summed)
        for this, other in ((u, v), (v, u)):
            factor = torch.index_select(x, 0, other, out=buffer[: last - first])
            out.index_add_(0, this, factor.mul_(partial))
    return out.div_(2) if y is None else out


def _product_by_rows(x: Tensor, y: Tensor | None, edge: Tensor, third_rowptr: Tensor, third: Tensor) -> Tensor:
    """Compute :func:`triangle_product` by tensors (E, R), which can be transformed and differentiated forwards."""
    partial = csr_sum_reference(third_rowptr, third, x if y is None else y)
    u, v = edge
    out = torch.zeros_like(x).index_add(0, u, x[v] * partial).index_add(0, v, x[u] * partial)
    return out / 2 if y is None else out


def _block_size(x: Tensor) -> int:
    on_cpu = x.device.type == "cpu"
    num_bytes = _BLOCK_BYTES["cpu"] * torch.get_num_threads() if on_cpu else _BLOCK_BYTES["other"]
    return max(num_bytes // (x.shape[1] * x.element_size()), 64)


@torch.library.custom_op("lightning_accel::triangle_product", mutates_args=())
def _triangle_product_op(
    x: Tensor, y: Tensor | None, edge: Tensor, triangle_edge: Tensor, third_rowptr: Tensor, third: Tensor
) -> Tensor:
    return _product(x, y, edge, triangle_edge, third_rowptr, third)


@_triangle_product_op.register_fake
def _(x: Tensor, y: Tensor | None, edge: Tensor, triangle_edge: Tensor, third_rowptr: Tensor, third: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y, *graph = ctx.saved_tensors
    d_x = triangle_product(x if y is None else y, grad, *graph) if ctx.needs_input_grad[0] else None
    d_y = triangle_product(x, grad, *graph) if ctx.needs_input_grad[1] else None
    return d_x, d_y, None, None, None, None


_triangle_product_op.register_autograd(_backward, setup_context=_setup_context)


class _TriangleProduct(torch.autograd.Function):
    """Compute :func:`triangle_product` in eager mode, where a custom op's call takes longer than small graphs' sums."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return _product(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grad)
