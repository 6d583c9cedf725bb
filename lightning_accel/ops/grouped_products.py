"""Products of groups of rows with a matrix each, and sums of rows, on CUDA by Triton, with derivatives of all orders.

Shapes: M rows, N rows to gather from, I features in, O features out, D features, E groups. The gradients of each
operation are made of the others. Groups are given by ``ends`` (E,) int64, the number of rows up to the end of each.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_accel.ops.extras import HAS_TRITON, runs_triton

Shape = tuple[int, ...]
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Sources(NamedTuple):
    """Say which of N rows each of M rows is taken from, or added to."""

    source: Tensor  # (M,) int64 in [0, N); N for a row that is taken from none
    order: Tensor | None  # (M,) int64, the M rows sorted by source; None if they are
    bounds: Tensor  # (N + 1,) int64, where the rows of each source begin in ``order``


def sort_by_source(source: Tensor, count: Tensor | int, num_sources: int) -> Sources:
    """Describe rows by their ``source`` (M,) in [0, N); those past the first ``count`` are taken from none."""
    taken = torch.arange(len(source), device=source.device) < count
    source = torch.where(taken, source, num_sources)
    ordered, order = source.sort(stable=True)
    return Sources(source, order, torch.searchsorted(ordered, torch.arange(num_sources + 1, device=source.device)))


def multiply_rows(
    x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None, sources: Sources | None = None
) -> Tensor:
    """Multiply the rows of group e by ``weight[e].T`` and add ``bias[e]``; rows of no group give 0.

    Args:
        x: (M, I), or (N, I) with ``sources``.
        weight: (E, O, I).
        ends: (E,).
        bias: (E, O).
        sources: of the M rows, which are gathered within the product.

    Returns:
        (M, O).

    Raises:
        ValueError: if tensors are not on CUDA, or float64, dtypes differ, or Triton is missing.
    """
    if not (runs_triton(x) and x.dtype in TRITON_DTYPES):
        raise ValueError(
            "the backend 'triton' takes bfloat16, float16 or float32 on CUDA, and needs Triton; got "
            f"{x.dtype} on {x.device}, and Triton is {'' if HAS_TRITON else 'not '}installed. Use 'auto'"
        )
    if weight.dtype != x.dtype:
        raise ValueError(f"x and weight must have one dtype; got {x.dtype} and {weight.dtype}. Cast one of them")
    out: Tensor = _multiply_rows(x, weight, ends, bias, *(sources or (None, None, None)))
    return out


def sum_rows(rows: Tensor, weights: Tensor | None, sources: Sources) -> Tensor:
    """Sum the rows (M, D) of each source times their ``weights`` (M,), in one order and in float32 or wider: (N, D)."""
    out: Tensor = _sum_rows(rows, weights, *sources)
    return out


def gather_rows(x: Tensor, sources: Sources) -> Tensor:
    """Take the rows of ``x`` (N, D) that ``sources`` names, (M, D); the gradient is added up as by :func:`sum_rows`."""
    out: Tensor = _spread_rows(x, None, None, *sources)[0]
    return out


def bias_of_rows(bias: Tensor, ends: Tensor, num_rows: int) -> Tensor:
    """Return the bias (M, O) of each row, 0 for one of no group, given the biases (E, O) of the groups."""
    sources = _sources_of_groups(ends, num_rows)
    if runs_triton(bias):
        return gather_rows(bias, sources)  # the gradient of index_select is added up in 16 bits
    return F.pad(bias, (0, 0, 0, 1)).index_select(0, sources.source)


def _sources_of_groups(ends: Tensor, num_rows: int) -> Sources:
    group = torch.searchsorted(ends, torch.arange(num_rows, device=ends.device), right=True)
    return Sources(group, None, F.pad(ends, (1, 0)))


@torch.library.custom_op("lightning_accel::multiply_rows", mutates_args=())
def _multiply_rows(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    bias: Tensor | None,
    source: Tensor | None,
    order: Tensor | None,
    bounds: Tensor | None,
) -> Tensor:
    from lightning_accel.ops.grouped_triton import multiply_rows

    return multiply_rows(x, weight, ends, bias, source)


MULTIPLY_ROWS = torch.ops.lightning_accel.multiply_rows.default


@torch.library.custom_op("lightning_accel::multiply_groups", mutates_args=())
def _multiply_groups(
    left: Tensor, right: Tensor, ends: Tensor, source: Tensor | None, order: Tensor | None, bounds: Tensor | None
) -> Tensor:
    from lightning_accel.ops.grouped_triton import multiply_groups

    return multiply_groups(left, right, ends, source)


@torch.library.custom_op("lightning_accel::sum_rows", mutates_args=())
def _sum_rows(rows: Tensor, weights: Tensor | None, source: Tensor, order: Tensor | None, bounds: Tensor) -> Tensor:
    from lightning_accel.ops.row_sums_triton import sum_rows

    return sum_rows(rows, weights, order, bounds)


@torch.library.custom_op("lightning_accel::spread_rows", mutates_args=())
def _spread_rows(
    x: Tensor, rows: Tensor | None, weights: Tensor | None, source: Tensor, order: Tensor | None, bounds: Tensor
) -> tuple[Tensor, Tensor]:
    from lightning_accel.ops.row_sums_triton import spread_rows

    return spread_rows(x, rows, weights, source)


@_multiply_rows.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, source: Tensor | None, *_: Tensor | None) -> Tensor:
    return x.new_empty((x if source is None else source).shape[0], weight.shape[1])


@_multiply_groups.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor, *_: Tensor | None) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


@_sum_rows.register_fake
def _(rows: Tensor, weights: Tensor | None, source: Tensor, order: Tensor | None, bounds: Tensor) -> Tensor:
    return rows.new_empty(bounds.shape[0] - 1, rows.shape[1])


@_spread_rows.register_fake
def _(x: Tensor, rows: Tensor | None, weights: Tensor | None, source: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    dots = x.new_empty(0 if rows is None else source.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(source.shape[0], x.shape[1]), dots


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _multiply_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends, _, *sources = ctx.saved_tensors
    needs_x, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
    d_x = _gradient_of_gathered(grad, weight.transpose(1, 2), ends, sources) if needs_x else None
    d_weight = _multiply_groups(grad, x, ends, *sources) if needs_weight else None
    d_bias = sum_rows(grad, None, _sources_of_groups(ends, len(grad))) if needs_bias else None
    return d_x, d_weight, None, d_bias, None, None, None


def _multiply_groups_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    left, right, ends, *sources = ctx.saved_tensors
    needs_left, needs_right, *_ = ctx.needs_input_grad
    d_left = _multiply_rows(right, grad, ends, None, *sources) if needs_left else None
    d_right = _gradient_of_gathered(left, grad.transpose(1, 2), ends, sources) if needs_right else None
    return d_left, d_right, None, None, None, None


def _gradient_of_gathered(rows: Tensor, weight: Tensor, ends: Tensor, sources: list[Tensor | None]) -> Tensor:
    product = multiply_rows(rows, weight, ends)
    return product if sources[0] is None else _sum_rows(product, None, *sources)


def _sum_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, *sources = ctx.saved_tensors
    d_rows, d_weights = _spread_rows(grad, rows if ctx.needs_input_grad[1] else None, weights, *sources)
    return d_rows, d_weights.to(weights.dtype) if ctx.needs_input_grad[1] else None, None, None, None


def _spread_rows_backward(ctx: Any, grad: Tensor, grad_of_dots: Tensor) -> tuple[Tensor | None, ...]:
    x, rows, weights, *sources = ctx.saved_tensors
    d_x, d_rows, d_weights = _sum_rows(grad, weights, *sources), None, None
    if rows is not None:
        d_x = d_x + _sum_rows(rows, grad_of_dots, *sources)
        d_rows, _ = _spread_rows(x, None, grad_of_dots, *sources)
    if weights is not None:
        _, dots = _spread_rows(x, grad, None, *sources)
        d_weights = dots.to(weights.dtype)
    return d_x, d_rows, d_weights, None, None, None


@register_flop_formula(torch.ops.lightning_accel.multiply_rows)
def _(x: Shape, weight: Shape, ends: Shape, bias: Shape | None, source: Shape | None, *_: Any, **__: Any) -> int:
    return 2 * (x if source is None else source)[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.lightning_accel.multiply_groups)
def _(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


_multiply_rows.register_autograd(_multiply_rows_backward, setup_context=_save)
_multiply_groups.register_autograd(_multiply_groups_backward, setup_context=_save)
_sum_rows.register_autograd(_sum_rows_backward, setup_context=_save)
_spread_rows.register_autograd(_spread_rows_backward, setup_context=_save)
